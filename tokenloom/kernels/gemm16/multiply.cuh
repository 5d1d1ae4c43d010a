// The math warpgroups: 64 rows x 256 columns each, added up in float32 registers; one product is on its way while the
// next is started.
#pragma once
#include "device/ptx/wgmma.cuh"
#include "kernels/gemm16/store.cuh"

// Rows of an expert end anywhere in the last stage of a product over rows. What lies behind them, the next expert's rows,
// must not count; it may be anything where no expert's rows are, so it is cleared on both sides.
template <class Shape>
__device__ __forceinline__ void clear_tail(Gemm16Shared<Shape>& shared, int stage, int rows, int group, int thread) {
    constexpr int kBoxes = 3;  // one of a, two of b, for each warpgroup
    const int first = rows * 8, units = kBoxBytes / 16 - first;
    for (int i = thread; i < units * kBoxes; i += 128) {
        const int box = i / units, unit = first + i % units;
        unsigned char* to = box == 0 ? shared.a[stage] + group * kBoxBytes
                                     : shared.b[stage] + (2 * group + box - 1) * kBoxBytes;
        *reinterpret_cast<Vec16*>(to + unit * 16) = Vec16{{0, 0, 0, 0}};
    }
    fence_shared_to_bulk();
    sync_threads(1, 128 * kGroups);
}

template <class Shape>
__device__ __forceinline__ void multiply_tiles(const Gemm16Args& args, Gemm16Shared<Shape>& shared, int32 block,
                                               int group, int thread) {
    using Shared = Gemm16Shared<Shape>;
    constexpr bool kAAcross = Shape::of_weights != 0, kBAcross = Shape::b_across != 0;
    constexpr uint32 kStepA = kAAcross ? 128 : 2, kStepB = kBAcross ? 128 : 2;  // in descriptors
    const int warp = thread / 32, lane = thread % 32;
    const uint32 a_address = shared_address(shared.a[0]) + group * kBoxBytes, b_address = shared_address(shared.b[0]);
    const uint32 a = kAAcross ? wgmma_tile_across(a_address) : wgmma_tile(a_address);
    const uint32 b = kBAcross ? wgmma_tile_across(b_address) : wgmma_tile(b_address);
    // A stage is free when the warps of both blocks have read it: lane 0 tells this block, lane 1 the other.
    const uint32 empty = map_to_block(shared_address(shared.empty), block ^ (lane & 1));
    const auto release = [&](uint32 use) {
        if (lane < 2) mbarrier_arrive_there(empty + use % Shape::stages * 8);
    };
    ClaimedTiles<Shape> tiles(shared, block);
    Tile tile;
    for (uint32 use = 0; tiles.next(tile, ~0u, lane == 0);) {
        int32 blocks = (tile.depth + kDepth - 1) / kDepth;
        asm volatile("" : "+r"(blocks));  // a loop of one round that is optimised away leaves wgmma unordered (C7519)
        if (tile.rows <= 0) {
            for (const uint32 end = use + blocks; use != end; ++use) {
                const RingUse<Shape::stages> at(use);
                mbarrier_wait(&shared.full[at.place], at.parity);
                release(use);
            }
            continue;
        }
        float sums[128];
#pragma unroll
        for (float& sum : sums) sum = 0.0f;
        for (int32 i = 0; i < blocks; ++i) {
            const RingUse<Shape::stages> at(use + i);
            mbarrier_wait(&shared.full[at.place], at.parity);
            if constexpr (Shape::of_weights != 0)
                if (const int32 left = tile.depth - i * kDepth; left < kDepth)
                    clear_tail<Shape>(shared, at.place, left, group, thread);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < kDepth / 16; ++step)
                wgmma_bf16<kAAcross, kBAcross>(sums, a + at.place * (Shared::kStageA >> 4) + step * kStepA,
                                               b + at.place * (Shared::kStageB >> 4) + step * kStepB);
            wgmma_commit();
            wgmma_wait<1>();
            if (i > 0) release(use + i - 1);
        }
        wgmma_wait<0>();
        if (blocks > 0) release(use + blocks - 1);
        use += blocks;
        store_tile<Shape>(args, shared.out[group * 4 + warp], sums, tile, group * 4 + warp, lane);
    }
}
