// The loading thread: tiles of a and b, 64 values of the inner dimension at a time, through a ring of stages.
//
// Both blocks of a cluster need the same of b, so each loads half of it, for both; a stage is free when the math warps of
// both have read it.
#pragma once
#include "kernels/gemm16/tiles.cuh"

template <class Shape>
__device__ __forceinline__ void load_tiles(const Gemm16Args& args, Gemm16Shared<Shape>& shared, int32 block) {
    using Shared = Gemm16Shared<Shape>;
    constexpr uint16 kBoth = 3;
    constexpr int kBoxRows = 128;  // of what lies along the inner dimension
    ClaimedTiles<Shape> tiles(shared, block);
    Tile tile;
    for (uint32 use = 0; tiles.next(tile, 1, true);) {
        for (int32 depth = 0; depth < tile.depth; depth += kDepth, ++use) {
            const RingUse<Shape::stages> at(use);
            mbarrier_wait(&shared.empty[at.place], at.parity ^ 1);
            uint64* full = &shared.full[at.place];
            mbarrier_arrive_expect(full, (tile.rows > 0 ? Shared::kStageA : 0) + Shared::kStageB);
            unsigned char *a = shared.a[at.place], *b = shared.b[at.place] + block * (Shared::kStageB / 2);
            if constexpr (Shape::of_weights != 0) {
                const int32 row = tile.first + depth;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if (tile.rows > 0) tensor_load(a + i * kBoxBytes, &args.a, tile.row + i * 64, row, full);
                    tensor_load_to_all(b + i * kBoxBytes, &args.b, tile.column + (2 * block + i) * 64, row, full, kBoth);
                }
            } else {
                if (tile.rows > 0) tensor_load(a, &args.a, depth, tile.first + tile.row, full);
                if constexpr (Shape::b_across != 0) {
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        tensor_load_to_all(b + i * kBoxBytes, &args.b, tile.column + (2 * block + i) * 64, depth,
                                           tile.expert, full, kBoth);
                } else {
                    const int32 column = tile.column + block * (Shape::swiglu ? Shape::n / 2 : kBoxRows);
                    tensor_load_to_all(b, &args.b, depth, column, tile.expert, full, kBoth);
                }
            }
        }
    }
}
