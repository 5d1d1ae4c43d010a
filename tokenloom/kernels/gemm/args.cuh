// What a grouped GEMM is given, and the sizes that its roles share.
#pragma once
#include "device/ptx/tensor.cuh"

struct GroupedGemmArgs {
    TensorMap a;                  // [rows, K] E4M3, boxes of 128 values x 32 rows, 128-byte swizzle
    TensorMap b;                  // [E, N, K] E4M3, boxes of 128 values x 128 rows
    TensorMap a_scale_map;        // [rows, K / 128], boxes of 8 values x 128 rows; K a multiple of 512, not if gathered
    const unsigned char* a_rows;  // if gathered: [any, K] E4M3
    const float* a_scales;        // [rows, K / 128]; if gathered, in the order of a_rows
    const int32* row_index;       // if gathered: [rows], which of a_rows each row is
    const int32* copied;          // if gathered: null, or [2] (first, n): the first n rows are also a's from `first` on
    const float* b_scales;        // [E, N / 128, K / 128]
    const int32* offsets;         // [E + 1] first row of each expert; device memory
    void* out;                    // [rows, N] bfloat16, or with SwiGLU [rows, N / 2] E4M3
    const uint64* row_targets;    // if scattered: [rows], addresses of output rows, which may be other GPUs'
    float* out_scales;            // with SwiGLU: [rows, N / 256]
    const float* row_weights;     // with SwiGLU: [rows], or null
    float clamp;                  // with SwiGLU: of gate from above, of up on both sides
    int32 padding;
    uint64* trace;                // [blocks][kTraceRoles][kTracedTiles][2] nanoseconds, where that is wanted
    int32 first_expert;           // of those whose rows are multiplied in this launch
    int32 end_expert;
    uint64 spare[3];              // the maps make this a multiple of 64 bytes
};

constexpr int kBlock = 128;                // values of K with one scale, and columns with one weight scale
constexpr int kGroups = 2;                 // math warpgroups
constexpr int kGroupRows = 64;             // of a tile, for each
constexpr int kTileRows = kGroups * kGroupRows;
constexpr int kHalves = 2, kTileColumns = kHalves * kBlock;  // multiplied one after the other
constexpr int kBoxRows = kGroupRows / 2;   // each block of a cluster loads half of the rows
constexpr int kScaleBlocks = 8;            // of K, whose scales are loaded together
constexpr int kMathWarps = 4 * kGroups, kStoreWarps = 2;

template <class Shape>
struct GemmShared {
    static constexpr bool kWideScales = Shape::k % (4 * kBlock) == 0;  // rows of scales are multiples of 16 bytes
    static constexpr bool kScalesByTma = kWideScales && !Shape::gathers;
    static constexpr bool kScaleWarp = !kWideScales && !Shape::gathers;
    static constexpr int kOutBytes = Shape::swiglu ? kTileColumns / 2 : kTileColumns * 2;  // of a row of a tile
    static constexpr int kPitch = kOutBytes + 16;                                          // against bank conflicts
    alignas(1024) unsigned char a[Shape::stages][kTileRows * kBlock];
    alignas(1024) unsigned char b[Shape::stages][kTileColumns * kBlock];
    alignas(16) unsigned char out[kGroups][kGroupRows * kPitch];  // of a warpgroup, on its way to memory
    alignas(128) float a_scales[2][kTileRows][kScaleBlocks];
    alignas(16) float b_scales[2][kHalves][kScaleBlocks];
    alignas(8) uint64 full[Shape::stages];  // operands and scales are here
    uint64 empty[Shape::stages];
    uint64 out_full[kGroups];
    uint64 out_empty[kGroups];
    float largest[kGroups][Shape::swiglu ? kGroupRows : 1];  // activations of rows whose columns are halved
    int32 gathered[Shape::gathers ? kTileRows : 1];  // of this tile: where each row is
    int32 offsets[Shape::num_experts + 1];
    int32 first_expert, end_expert;
};

// The n-th use of a ring. Counted, not stepped: so the compiler sees that all threads of a role are at the same.
template <int kStages>
struct RingUse {
    int stage;
    uint32 parity;
    __device__ __forceinline__ explicit RingUse(uint32 n) : stage(n % kStages), parity(n / kStages & 1) {}
};

// Where the scales of block `k` of a tile are. `uses` counts blocks of K before the tile. What is overwritten there has
// been read: all but the newest `stages` blocks have.
template <class Shape>
struct ScalePlace {
    static constexpr int kBlocks = Shape::k / kBlock;
    uint32 buffer;
    int slot;

    __device__ __forceinline__ ScalePlace(uint32 uses, int k) {
        if constexpr (GemmShared<Shape>::kWideScales) {  // 8 blocks at once, or the last 4 of a tile
            static_assert(Shape::stages <= 5, "the buffer before the last must not be in use");
            constexpr uint32 kBuffers = (kBlocks + kScaleBlocks - 1) / kScaleBlocks;  // that a tile fills
            buffer = (uses / kBlocks * kBuffers + k / kScaleBlocks) % 2;
            slot = k % kScaleBlocks;
        } else {
            static_assert(Shape::stages < 2 * kScaleBlocks, "slots in use must not be overwritten");
            buffer = (uses + k) / kScaleBlocks % 2;
            slot = (uses + k) % kScaleBlocks;
        }
    }
};
