// The loading warps: tiles of a and b and their scales, 128 values of K at a time, through a ring of stages. Where rows
// are gathered, gather.cuh loads those of a.
#pragma once
#include "device/ptx/cluster.cuh"
#include "kernels/gemm/tiles.cuh"

// Of the weights of half a tile; with SwiGLU, of its gates (0) or its ups (1).
template <class Shape>
__device__ __forceinline__ const float* column_scales(const GroupedGemmArgs& args, const Tile& tile, int half) {
    constexpr int kBlocks = Shape::k / kBlock, kColumnBlocks = Shape::n / kBlock;
    constexpr int kGates = kColumnBlocks / 2;
    // A pair of strips may reach beyond N.
    const int column_block = Shape::swiglu ? min(tile.column / kTileColumns, kGates - 1) + half * kGates
                                           : min(tile.column / kBlock + half, kColumnBlocks - 1);
    return args.b_scales + static_cast<int64>(tile.expert * kColumnBlocks + column_block) * kBlocks;
}

// Rows of a GEMM that gathers which are in order all the same: those of the first tiles, copied to where TMA finds them.
template <class Shape>
struct CopiedRows {
    int32 first = 0, rows = 0;  // row i is row first + i of args.a

    __device__ __forceinline__ explicit CopiedRows(const GroupedGemmArgs& args) {
        if (!Shape::gathers || args.copied == nullptr) return;
        first = args.copied[0];
        rows = args.copied[1];
    }

    __device__ __forceinline__ bool have(const Tile& tile) const {
        return !Shape::gathers || tile.row + tile.rows <= rows;
    }
};

// One thread. The rows are the same in both blocks, so each loads half of them, for both; a stage is free when the math
// warps of both have read it.
template <class Shape>
__device__ __forceinline__ void load_tiles(const GroupedGemmArgs& args, GemmShared<Shape>& shared, int32 block) {
    constexpr uint16 kBoth = 3;
    constexpr int kBlocks = Shape::k / kBlock, kRowScaleBytes = sizeof(shared.a_scales[0]);
    const CopiedRows<Shape> copied(args);
    TileSource<Shape> tiles(shared);
    uint32 uses = 0;
    for (; tiles.next(); uses += kBlocks) {
        const Tile tile = tiles.tile(block);
        const int groups = copied.have(tile) ? tile.groups() : 0;  // of rows that TMA finds
        trace<Shape>(args, kLoads, uses / kBlocks, 0);
        for (int k = 0; k < kBlocks; ++k) {
            const RingUse<Shape::stages> at(uses + k);
            mbarrier_wait(&shared.empty[at.stage], at.parity ^ 1);
            uint64* full = &shared.full[at.stage];
            // The scales of 8 blocks of K come with the first of them.
            const bool with_scales = GemmShared<Shape>::kWideScales && k % kScaleBlocks == 0;
            const int column_scale_bytes = with_scales ? min(kScaleBlocks, kBlocks - k) * 4 : 0;
            const int row_scale_bytes = with_scales && !Shape::gathers ? kRowScaleBytes : 0;
            mbarrier_arrive_expect(full, (groups * kGroupRows + kTileColumns) * kBlock + row_scale_bytes +
                                             kHalves * column_scale_bytes);
            if (with_scales) {
                const uint32 buffer = ScalePlace<Shape>(uses, k).buffer;
                if constexpr (!Shape::gathers)
                    tensor_load(shared.a_scales[buffer], &args.a_scale_map, k, tile.row, full);
                for (int half = 0; half < kHalves; ++half)
                    bulk_load(shared.b_scales[buffer][half], column_scales<Shape>(args, tile, half) + k,
                              column_scale_bytes, full);
            }
            for (int half = 0; half < kHalves; ++half)
                tensor_load(shared.b[at.stage] + half * kBlock * kBlock, &args.b, k * kBlock,
                            tile.column + half * kBlock, tile.expert, full);
            for (int group = 0; group < groups; ++group) {
                const int row = group * kGroupRows + block * kBoxRows;
                tensor_load_to_all(shared.a[at.stage] + row * kBlock, &args.a, k * kBlock,
                                   copied.first + tile.row + row, full, kBoth);
            }
        }
        trace<Shape>(args, kLoads, uses / kBlocks, 1);
    }
}

// One warp: the scales of any other K, a value a row. It takes the load path that wgmma reads its operands through.
template <class Shape>
__device__ __forceinline__ void load_scales(const GroupedGemmArgs& args, GemmShared<Shape>& shared, int32 block,
                                            int lane) {
    constexpr int kBlocks = Shape::k / kBlock, kLaneRows = kTileRows / 32;
    TileSource<Shape> tiles(shared);
    uint32 uses = 0;
    for (; tiles.next(); uses += kBlocks) {
        const Tile tile = tiles.tile(block);
        const float* rows = args.a_scales + static_cast<int64>(tile.row) * kBlocks;
        const float* columns = column_scales<Shape>(args, tile, lane % kHalves);
        int32 from[kLaneRows];
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) from[i] = min(i * 32 + lane, tile.rows - 1) * kBlocks;
        for (int k = 0; k < kBlocks; ++k) {
            const RingUse<Shape::stages> at(uses + k);
            const ScalePlace<Shape> place(uses, k);
            mbarrier_wait(&shared.empty[at.stage], at.parity ^ 1);
#pragma unroll
            for (int i = 0; i < kLaneRows; ++i)
                copy_4_async(&shared.a_scales[place.buffer][i * 32 + lane][place.slot], rows + from[i] + k);
            if (lane < kHalves) copy_4_async(&shared.b_scales[place.buffer][lane][place.slot], columns + k);
            mbarrier_arrive_after_copies(&shared.full[at.stage]);
        }
    }
}
