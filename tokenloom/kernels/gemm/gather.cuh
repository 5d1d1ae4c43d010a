// The gathering warp: rows of a and their scales from wherever an index says, in the place of the copy engine, which has
// no gather. Both blocks of a cluster gather all rows.
#pragma once
#include "kernels/gemm/load.cuh"

// 8 lanes copy 128 bytes of a row, where a 128-byte swizzle has them.
__device__ __forceinline__ void gather_block(unsigned char* stage, const unsigned char* a, const int32* gathered,
                                             int64 row_bytes, int rows, int lane) {
    const int unit = lane % 8;
    for (int row = lane / 8; row < rows; row += 4)
        copy_16_async(stage + row * kBlock + (unit ^ row % 8) * 16, a + gathered[row] * row_bytes + unit * 16);
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
            copy_16_async(&shared.a_scales[place.buffer][row][lane % 2 * 4],
                          args.a_scales + static_cast<int64>(shared.gathered[row]) * kBlocks + from);
    } else {
        for (int row = lane; row < rows; row += 32)
            copy_4_async(&shared.a_scales[place.buffer][row][place.slot],
                         args.a_scales + static_cast<int64>(shared.gathered[row]) * kBlocks + k);
    }
}

template <class Shape>
__device__ __forceinline__ void gather_rows(const GroupedGemmArgs& args, GemmShared<Shape>& shared, int32 block,
                                            int lane) {
    constexpr int kBlocks = Shape::k / kBlock, kInFlight = 2;  // stages whose copies have not been waited for
    static_assert(kInFlight < Shape::stages, "who waits for a stage would wait for ever");
    TileSource<Shape> tiles(shared.offsets, block);
    uint32 uses = 0;
    const auto arrive = [&](uint32 use) {  // the tensor cores read what ordinary copies have written
        fence_shared_to_bulk();
        mbarrier_arrive(&shared.full[use % Shape::stages]);
    };
    for (Tile tile; tiles.next(tile); uses += kBlocks) {
        const int rows = tile.groups() * kGroupRows;
        __syncwarp();
        for (int row = lane; row < rows; row += 32)
            shared.gathered[row] = args.row_index[tile.row + min(row, tile.rows - 1)];
        __syncwarp();
        for (int k = 0; k < kBlocks; ++k) {
            const uint32 use = uses + k;
            const RingUse<Shape::stages> at(use);
            const ScalePlace<Shape> place(uses, k);
            mbarrier_wait(&shared.empty[at.stage], at.parity ^ 1);
            gather_scales(args, shared, place, k, rows, lane);
            if (!GemmShared<Shape>::kWideScales && lane < kHalves)
                copy_4_async(&shared.b_scales[place.buffer][lane][place.slot],
                             column_scales<Shape>(args, tile, lane) + k);
            gather_block(shared.a[at.stage], args.a_rows + k * kBlock, shared.gathered, Shape::k, rows, lane);
            copies_commit();
            copies_wait<kInFlight>();
            if (use >= kInFlight) arrive(use - kInFlight);
        }
    }
    copies_wait<0>();
    for (uint32 use = uses > kInFlight ? uses - kInFlight : 0; use < uses; ++use) arrive(use);
}
