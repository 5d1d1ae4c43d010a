// The weights of a grouped GEMM: where they and their scales are, and which scale belongs to which column of a tile.
#pragma once
#include "device/ptx/tensor.cuh"
#include "device/roles/expert_tiles.cuh"
#include "device/roles/four_bits.cuh"
#include "device/roles/operand_ring.cuh"

// A *column order* says how columns of the output lie in the rows of the weights. An epilogue names the one it needs.
struct ColumnsInOrder {
    static constexpr bool kInTurns = false;

    // The block of weight scales, of `blocks`, for half of a tile's columns. A pair of strips may reach past the last.
    static __device__ __forceinline__ int scale_block(const Tile& tile, int half, int blocks) {
        return min(tile.column / kBlock + half, blocks - 1);
    }
};

// 8 rows of gates and 8 of ups take turns. Their scales do not: those of all gates come first, then those of all ups.
// Half 0 stands for a tile's gates, half 1 for its ups.
struct GatesAndUpsInTurns {
    static constexpr bool kInTurns = true;

    static __device__ __forceinline__ int scale_block(const Tile& tile, int half, int blocks) {
        const int gates = blocks / 2;
        return min(tile.column / kRowsOfB, gates - 1) + half * gates;
    }
};

// *Weights* say where those of a tile are, and bring them to a stage:
//
//   kBlocks              blocks of K
//   Cut                  how tiles divide the output (expert_tiles.cuh)
//   A, B, ScaleRing      the operands of a stage, of which one are the weights, and the ring of their scales
//   kOperandA            they are operand A
//   kScaledInBlocks      they have scales of blocks, which the loader brings too
//   kLoadedBytes         of a stage
//   prefetch()           fetches the tensor map ahead
//   load(ring, stage, tile, k, full)    block k of a tile, by the loading thread

// A box of 128 rows. kOnce: all weights are so few that a call is faster if they leave the second-level cache to what else
// it reads.
template <bool kOnce>
__device__ __forceinline__ void load_weight_box(void* to, const TensorMap& map, const Tile& tile, int32 column, int k,
                                                uint64* full) {
    if (kOnce && !tile.rereads) tensor_load_once(to, &map, k * kBlock, column, tile.expert, full);
    else tensor_load(to, &map, k * kBlock, column, tile.expert, full);
}

template <int kN, int kK, class ColumnOrder, bool kOnce = false>
struct BlockScaledWeights {
    static_assert(kK % kBlock == 0 && kN % kBlock == 0, "whole scale blocks");
    static constexpr int kBlocks = kK / kBlock, kColumnBlocks = kN / kBlock;
    using Columns = ColumnOrder;
    using Cut = FixedCut<kN>;
    using ScaleRing = BlockScaleRing;
    using A = OperandA;
    using B = Fp8Operand<kRowsOfB>;
    static constexpr bool kScaledInBlocks = true, kOperandA = false;
    static constexpr int kLoadedBytes = kHalves * kWeightBoxBytes;
    const TensorMap& map;        // [E, N, K] E4M3
    const float* const& scales;  // [E, N / 128, K / 128]

    __device__ __forceinline__ void prefetch() const { tensor_prefetch(&map); }

    template <class Ring>
    __device__ __forceinline__ void load(Ring& ring, int stage, const Tile& tile, int k, uint64* full) const {
        for (int half = 0; half < kHalves; ++half)
            load_weight_box<kOnce>(ring.b[stage] + half * kWeightBoxBytes, map, tile, tile.column + half * kWeightBox, k,
                                   full);
    }

    __device__ __forceinline__ const float* column_scales(const Tile& tile, int half) const {
        const int block = Columns::scale_block(tile, half, kColumnBlocks);
        return scales + static_cast<int64>(tile.expert * kColumnBlocks + block) * kBlocks;
    }
};

// Weights whose channels have one scale each, which multiply whole sums (transposed_epilogue.cuh). They are operand A.
template <int kN, int kK, int kMostRows, bool kOnce = false>
struct ChannelScaledWeights {
    static_assert(kK % kBlock == 0 && kN % kBlock == 0, "whole blocks");
    static constexpr int kBlocks = kK / kBlock;
    using Cut = EvenCut<kN, kMostRows>;
    using ScaleRing = NoScaleRing;
    using A = OperandA;
    using B = Fp8Operand<kMostRows>;
    static constexpr bool kScaledInBlocks = false, kOperandA = true;
    static constexpr int kLoadedBytes = kWeightBoxBytes;
    const TensorMap& map;  // [E, N, K] E4M3

    __device__ __forceinline__ void prefetch() const { tensor_prefetch(&map); }

    template <class Ring>
    __device__ __forceinline__ void load(Ring& ring, int stage, const Tile& tile, int k, uint64* full) const {
        load_weight_box<kOnce>(ring.a[stage], map, tile, tile.column, k, full);
    }
};

// The same in four bits, see four_bits.cuh.
template <int kN, int kK, int kMostRows, bool kOnce = false>
struct FourBitWeights {
    static_assert(kK % kBlock == 0 && kN % kBlock == 0, "whole blocks");
    static constexpr int kBlocks = kK / kBlock, kStrips = kN / kRowsOfA;
    using Cut = EvenCut<kN, kMostRows>;
    using ScaleRing = NoScaleRing;
    using A = FourBitOperand;
    using B = Fp8Operand<kMostRows>;
    static constexpr bool kScaledInBlocks = false, kOperandA = true;
    static constexpr int kLoadedBytes = kFourBitBlock;
    const unsigned char* const& blocks;  // [E, N / 128, K / 128, kFourBitBlock]

    __device__ __forceinline__ void prefetch() const {}

    // A pair of strips may reach past N: nobody stores its products.
    template <class Ring>
    __device__ __forceinline__ void load(Ring& ring, int stage, const Tile& tile, int k, uint64* full) const {
        const int64 strip = tile.expert * kStrips + min(tile.column / kRowsOfA, kStrips - 1);
        const unsigned char* from = blocks + (strip * kBlocks + k) * kFourBitBlock;
        if (kOnce && !tile.rereads) bulk_load_once(ring.a[stage], from, kFourBitBlock, full);
        else bulk_load(ring.a[stage], from, kFourBitBlock, full);
    }
};
