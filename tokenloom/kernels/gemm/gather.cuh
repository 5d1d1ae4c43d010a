// The gathering warp: rows of a and their scales from wherever an index says, in the place of the copy engine, which has
// no gather (and takes 45 cycles for each row that it is asked for by itself).
#pragma once
#include "kernels/gemm/load.cuh"

// 128 values of K of a tile's rows: 16 bytes a lane, where the swizzle wants them. 8 lanes share a row.
template <class Shape>
__device__ __forceinline__ void gather_values(GemmShared<Shape>& shared, int stage, const unsigned char* a, int rows,
                                              int lane) {
    const int unit = lane % 8;
#pragma unroll 4
    for (int row = lane / 8; row < rows; row += 4)
        copy_16_async(shared_address(shared.a[stage]) + row * kBlock + (unit ^ row % 8) * 16,
                      a + static_cast<int64>(shared.gathered[row]) * Shape::k + unit * 16);
}

// The scales of blocks k..k+7 of all rows, or where rows of scales are no multiples of 16 bytes, of block k.
template <class Shape>
__device__ __forceinline__ void gather_scales(const GroupedGemmArgs& args, GemmShared<Shape>& shared,
                                              const ScalePlace<Shape>& place, int k, int rows, int lane) {
    constexpr int kBlocks = Shape::k / kBlock;
    if constexpr (GemmShared<Shape>::kWideScales) {
        const int from = k + lane % 2 * 4;
        if (k % kScaleBlocks != 0 || from >= kBlocks) return;
        for (int row = lane / 2; row < rows; row += 16)
            copy_16_async(shared_address(&shared.a_scales[place.buffer][row][lane % 2 * 4]),
                          args.a_scales + static_cast<int64>(shared.gathered[row]) * kBlocks + from);
    } else {
        for (int row = lane; row < rows; row += 32)
            copy_4_async(&shared.a_scales[place.buffer][row][place.slot],
                         args.a_scales + static_cast<int64>(shared.gathered[row]) * kBlocks + k);
    }
}

// It waits for nothing that it has started: the stage hears of the copies when they are there.
template <class Shape>
__device__ __forceinline__ void gather_rows(const GroupedGemmArgs& args, GemmShared<Shape>& shared, int32 block,
                                            int lane) {
    constexpr int kBlocks = Shape::k / kBlock;
    const CopiedRows<Shape> copied(args);
    TileSource<Shape> tiles(shared);
    uint32 uses = 0;
    for (; tiles.next(); uses += kBlocks) {
        const Tile tile = tiles.tile(block);
        const int rows = copied.have(tile) ? 0 : tile.rows;  // whose values are not copied
        __syncwarp();
        for (int row = lane; row < tile.rows; row += 32) shared.gathered[row] = args.row_index[tile.row + row];
        __syncwarp();
        if (lane == 0) trace<Shape>(args, kGathers, uses / kBlocks, 0);
        for (int k = 0; k < kBlocks; ++k) {
            const RingUse<Shape::stages> at(uses + k);
            const ScalePlace<Shape> place(uses, k);
            mbarrier_wait(&shared.empty[at.stage], at.parity ^ 1);
            gather_scales(args, shared, place, k, tile.rows, lane);
            if (!GemmShared<Shape>::kWideScales && lane < kHalves)
                copy_4_async(&shared.b_scales[place.buffer][lane][place.slot],
                             column_scales<Shape>(args, tile, lane) + k);
            gather_values(shared, at.stage, args.a_rows + k * kBlock, rows, lane);
            mbarrier_arrive_after_copies(&shared.full[at.stage]);
        }
        if (lane == 0) trace<Shape>(args, kGathers, uses / kBlocks, 1);
    }
}
