// The ring of stages between loading and math warps. A stage holds a tile's operands for 128 values of K.
#pragma once
#include "device/ptx/bulk.cuh"
#include "device/roles/gemm_tile.cuh"

// An *operand* says how 128 values of K lie in a stage:
//
//   kRowBytes     bytes of one row
//   kStageBytes   bytes of a stage
//
// This one is E4M3 with the 128-byte swizzle, as wgmma reads it. Another is in four_bits.cuh.
template <int kRows>
struct Fp8Operand {
    static constexpr int kRowBytes = kBlock;
    static constexpr int kStageBytes = kRows * kRowBytes;
};
using OperandA = Fp8Operand<kRowsOfA>;

// Rows of a TMA box, of activations and of weights. Each block loads every other box of activations, for both.
constexpr int kRowBox = 32, kWeightBox = 128;
constexpr int kRowBoxBytes = kRowBox * kBlock, kWeightBoxBytes = kWeightBox * kBlock;

// Whether rows of scales are multiples of 16 bytes, as TMA needs them.
template <int kBlocks>
constexpr bool kWideScales = kBlocks % 4 == 0;

// Scales that change with blocks of K travel beside the operands.
struct BlockScaleRing {
    alignas(128) float a[2][kRowsOfA][kScaleBlocks];
    alignas(16) float b[2][kHalves][kScaleBlocks];
};

// Those of whole rows and channels do not.
struct NoScaleRing {};

// A kernel places it at a multiple of 1024 bytes, for the swizzle. Arrivals are sums over the roles that the kernel
// runs: on `full` the loading warps' of this block, on `empty` the math warps' of all blocks of the cluster.
template <int kRingStages, class ScaleRing, class OfA, class OfB>
struct OperandRing {
    using A = OfA;
    using B = OfB;
    static constexpr int kStages = kRingStages;
    unsigned char a[kStages][A::kStageBytes];
    unsigned char b[kStages][B::kStageBytes];
    ScaleRing scales;
    alignas(8) uint64 full[kStages];  // operands and scales are here
    uint64 empty[kStages];

    __device__ __forceinline__ void init(uint32 full_arrivals, uint32 empty_arrivals) {
        for (int i = 0; i < kStages; ++i) {
            mbarrier_init(&full[i], full_arrivals);
            mbarrier_init(&empty[i], empty_arrivals);
        }
    }
};

// The n-th use of a ring. Counted, not stepped: so the compiler sees that all threads of a role agree.
template <int kStages>
struct RingUse {
    int stage;
    uint32 parity;
    __device__ __forceinline__ explicit RingUse(uint32 n) : stage(n % kStages), parity(n / kStages & 1) {}
};

// Where the scales of block k of a tile lie. What they overwrite has been read: all but the newest kStages blocks have.
template <int kBlocks, int kStages>
struct ScalePlace {
    uint32 buffer;
    int slot;

    template <class At>
    __device__ __forceinline__ ScalePlace(const At& at, int k) {
        if constexpr (kWideScales<kBlocks>) {  // 8 blocks at once, or the last 4 of a tile
            static_assert(kStages <= 5, "the buffer before the last must not be in use");
            buffer = (at.scale_buffers() + k / kScaleBlocks) % 2;
            slot = k % kScaleBlocks;
        } else {
            static_assert(kStages < 2 * kScaleBlocks, "slots in use must not be overwritten");
            buffer = (at.blocks + k) / kScaleBlocks % 2;
            slot = (at.blocks + k) % kScaleBlocks;
        }
    }
};
