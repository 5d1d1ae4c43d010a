// The gathering warps, 64 rows of a tile each: rows of a and their scales from wherever an index says, in the place of the copy engine, which
// has no gather (and takes 45 cycles for each row that it is asked for by itself): 16 bytes a lane, where the swizzle
// wants them.
#pragma once
#include "kernels/gemm/load.cuh"

// Where the rows are that this lane copies, 16 bytes of each, in units of 16 bytes. 8 lanes share a row.
template <class Shape>
struct GatheredRows {
    static constexpr int kAtOnce = 4, kSteps = kGroupRows / kAtOnce;
    uint32 from[kSteps];
    uint32 to;  // from the first row; a 128-byte swizzle moves every other step's units by 4

    __device__ __forceinline__ void find(const int32* gathered, int rows, int lane) {
        to = lane / 8 * kBlock + (lane % 8 ^ lane / 8) * 16;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            from[step] = gathered[min(step * kAtOnce + lane / 8, rows - 1)] * (Shape::k / 16) + lane % 8;
    }

    // 128 values of K.
    __device__ __forceinline__ void copy(uint32 first_row, const unsigned char* a, int rows) const {
        const uint32 even = first_row + to, odd = first_row + (to ^ 4 * 16);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            if (step * kAtOnce < rows)
                copy_16_async((step % 2 ? odd : even) + step * kAtOnce * kBlock, a + from[step] * 16ull);
    }
};

// The scales of blocks k..k+7 of these rows, or where rows of scales are no multiples of 16 bytes, of block k.
template <class Shape>
__device__ __forceinline__ void gather_scales(const GroupedGemmArgs& args, GemmShared<Shape>& shared,
                                              const ScalePlace<Shape>& place, int k, int first, int end, int lane) {
    constexpr int kBlocks = Shape::k / kBlock;
    if constexpr (GemmShared<Shape>::kWideScales) {
        const int from = k + lane % 2 * 4;
        if (k % kScaleBlocks != 0 || from >= kBlocks) return;
        for (int row = first + lane / 2; row < end; row += 16)
            copy_16_async(shared_address(&shared.a_scales[place.buffer][row][lane % 2 * 4]),
                          args.a_scales + static_cast<int64>(shared.gathered[row]) * kBlocks + from);
    } else {
        for (int row = first + lane; row < end; row += 32)
            copy_4_async(&shared.a_scales[place.buffer][row][place.slot],
                         args.a_scales + static_cast<int64>(shared.gathered[row]) * kBlocks + k);
    }
}

// One warp waits for nothing that it has started: the stage hears of the copies when they are there.
template <class Shape>
__device__ __forceinline__ void gather_rows(const GroupedGemmArgs& args, GemmShared<Shape>& shared, int32 block,
                                            int group, int lane) {
    constexpr int kBlocks = Shape::k / kBlock;
    const int first = group * kGroupRows;
    TileSource<Shape> tiles(shared.offsets);
    uint32 uses = 0;
    for (; tiles.next(); uses += kBlocks) {
        const Tile tile = tiles.tile(block);
        const int end = min(tile.rows, first + kGroupRows);
        __syncwarp();
        for (int row = first + lane; row < end; row += 32) shared.gathered[row] = args.row_index[tile.row + row];
        __syncwarp();
        GatheredRows<Shape> gathered;
        if (first < end) gathered.find(shared.gathered + first, end - first, lane);
        for (int k = 0; k < kBlocks; ++k) {
            const RingUse<Shape::stages> at(uses + k);
            const ScalePlace<Shape> place(uses, k);
            mbarrier_wait(&shared.empty[at.stage], at.parity ^ 1);
            gather_scales(args, shared, place, k, first, end, lane);
            if (!GemmShared<Shape>::kWideScales && group == 0 && lane < kHalves)
                copy_4_async(&shared.b_scales[place.buffer][lane][place.slot],
                             column_scales<Shape>(args, tile, lane) + k);
            gathered.copy(shared_address(shared.a[at.stage] + first * kBlock), args.a_rows + k * kBlock, end - first);
            mbarrier_arrive_after_copies(&shared.full[at.stage]);
        }
    }
}
