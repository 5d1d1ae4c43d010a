// The weights of a grouped GEMM: where they and their scales are, and which scale belongs to which column of a tile.
#pragma once
#include "device/ptx/tensor.cuh"
#include "device/roles/expert_tiles.cuh"
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

// kReadOnce: all of them are so few that a call is faster if they leave the second-level cache to what else it reads.
template <int kN, int kK, class ColumnOrder, bool kReadOnce = false>
struct BlockScaledWeights {
    static_assert(kK % kBlock == 0 && kN % kBlock == 0, "whole scale blocks");
    static constexpr int kBlocks = kK / kBlock, kColumnBlocks = kN / kBlock;
    using Columns = ColumnOrder;
    using Cut = FixedCut<kN>;
    using ScaleRing = BlockScaleRing;
    using OperandB = Fp8Operand<kRowsOfB>;
    static constexpr bool kOnce = kReadOnce, kScaledInBlocks = true, kOperandA = false;
    const TensorMap& map;        // [E, N, K] E4M3
    const float* const& scales;  // [E, N / 128, K / 128]

    __device__ __forceinline__ const float* column_scales(const Tile& tile, int half) const {
        const int block = Columns::scale_block(tile, half, kColumnBlocks);
        return scales + static_cast<int64>(tile.expert * kColumnBlocks + block) * kBlocks;
    }
};

// Weights whose channels have one scale each, which multiply whole sums (transposed_epilogue.cuh). They are operand A.
template <int kN, int kK, int kMostRows, bool kReadOnce = false>
struct ChannelScaledWeights {
    static_assert(kK % kBlock == 0 && kN % kBlock == 0, "whole blocks");
    static constexpr int kBlocks = kK / kBlock;
    using Cut = EvenCut<kN, kMostRows>;
    using ScaleRing = NoScaleRing;
    using OperandB = Fp8Operand<kMostRows>;
    static constexpr bool kOnce = kReadOnce, kScaledInBlocks = false, kOperandA = true;
    const TensorMap& map;  // [E, N, K] E4M3
};
