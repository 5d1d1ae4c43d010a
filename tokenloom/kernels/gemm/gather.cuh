// The gathering warp: rows of a and their scales from wherever an index says, in the place of the copy engine, which
// has no gather.
//
// As with loads, each block of a cluster gathers half of the rows: 16 bytes a lane into its own shared memory, from
// where a bulk copy takes them to the other block.
#pragma once
#include "kernels/gemm/load.cuh"

// Of one tile: where the rows are that this lane copies, 16 bytes of each, in units of 16 bytes. 8 lanes share a row.
template <class Shape>
struct GatheredRows {
    static constexpr int kAtOnce = 4, kBoxSteps = kBoxRows / kAtOnce, kSteps = kGroups * kBoxSteps;
    uint32 from[kSteps];
    uint32 to;  // in a stage, of the first row; a 128-byte swizzle moves every other step's units by 4

    __device__ __forceinline__ void find(const int32* gathered, int32 block, int rows, int lane) {
        to = (block * kBoxRows + lane / 8) * kBlock + (lane % 8 ^ lane / 8) * 16;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const int row = step / kBoxSteps * kGroupRows + block * kBoxRows + step % kBoxSteps * kAtOnce + lane / 8;
            from[step] = gathered[min(row, rows - 1)] * (Shape::k / 16) + lane % 8;
        }
    }

    // 128 values of K.
    __device__ __forceinline__ void copy(uint32 stage, const unsigned char* a, int groups) const {
        const uint32 even = stage + to, odd = stage + (to ^ 4 * 16);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const int row = step / kBoxSteps * kGroupRows + step % kBoxSteps * kAtOnce;
            if (step < groups * kBoxSteps)
                copy_16_async((step % 2 ? odd : even) + row * kBlock, a + from[step] * 16ull);
        }
    }
};

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

// This warp's copies for a stage are there: on to the other block, and to who multiplies here.
template <class Shape>
__device__ __forceinline__ void pass_on(GemmShared<Shape>& shared, uint32 use, int groups, int32 block, int lane) {
    const int stage = use % Shape::stages;
    fence_shared_to_bulk();
    __syncwarp();
    if (lane < groups) {
        const uint32 rows = shared_address(shared.a[stage]) + (lane * kGroupRows + block * kBoxRows) * kBlock;
        bulk_copy_there(map_to_block(rows, block ^ 1), rows, kBoxRows * kBlock,
                        map_to_block(shared_address(&shared.full[stage]), block ^ 1));
    }
    mbarrier_arrive(&shared.full[stage]);
}

template <class Shape>
__device__ __forceinline__ void gather_rows(const GroupedGemmArgs& args, GemmShared<Shape>& shared, int32 block,
                                            int lane) {
    constexpr int kBlocks = Shape::k / kBlock;
    // Two stages are on their way, and a stage is held until the next is there: with three, who waits for the oldest to
    // be free would wait for ever.
    static_assert(Shape::stages > 3 || kBlocks == 1, "too few stages to gather");
    TileSource<Shape> tiles(shared.offsets, block);
    uint32 uses = 0;
    int last = 0, before_last = 0;  // groups of the tiles of the two newest stages
    for (Tile tile; tiles.next(tile); uses += kBlocks) {
        const int groups = tile.groups(), rows = groups * kGroupRows;
        __syncwarp();
        for (int row = lane; row < rows; row += 32)
            shared.gathered[row] = args.row_index[tile.row + min(row, tile.rows - 1)];
        __syncwarp();
        GatheredRows<Shape> gathered;
        gathered.find(shared.gathered, block, rows, lane);
        for (int k = 0; k < kBlocks; ++k) {
            const uint32 use = uses + k;
            const RingUse<Shape::stages> at(use);
            const ScalePlace<Shape> place(uses, k);
            mbarrier_wait(&shared.empty[at.stage], at.parity ^ 1);
            gather_scales(args, shared, place, k, rows, lane);
            if (!GemmShared<Shape>::kWideScales && lane < kHalves)
                copy_4_async(&shared.b_scales[place.buffer][lane][place.slot],
                             column_scales<Shape>(args, tile, lane) + k);
            gathered.copy(shared_address(shared.a[at.stage]), args.a_rows + k * kBlock, groups);
            copies_commit();
            copies_wait<2>();
            if (use >= 2) pass_on(shared, use - 2, before_last, block, lane);
            before_last = last;
            last = groups;
        }
    }
    copies_wait<0>();
    if (uses >= 2) pass_on(shared, uses - 2, before_last, block, lane);
    if (uses >= 1) pass_on(shared, uses - 1, last, block, lane);
}
