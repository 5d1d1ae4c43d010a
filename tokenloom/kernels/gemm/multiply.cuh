// The math warpgroups, 64 rows x 256 columns each: multiply half of a stage's columns into a temporary; add it, scaled,
// to float32 registers (the tensor core adds FP8 products with about 14 bits, and scales change every 128 values of K
// anyway). While one warpgroup adds, the other has the tensor cores.
#pragma once
#include "device/ptx/cluster.cuh"
#include "device/ptx/wgmma.cuh"
#include "kernels/gemm/store.cuh"
#include "kernels/gemm/swiglu.cuh"

__device__ __forceinline__ void start_product(float (&product)[64], uint32 a, uint32 b) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) wgmma_e4m3(product, a + 2 * step, b + 2 * step, step);
    wgmma_commit();
}

// Of one block of K: of this thread's two rows, times those of the columns' halves, or of gates and ups.
struct Scales {
    float low[2], high[2];

    template <class Shape>
    __device__ __forceinline__ void load(const GemmShared<Shape>& shared, const ScalePlace<Shape>& place, int row) {
        const float low_row = shared.a_scales[place.buffer][row][place.slot];
        const float high_row = shared.a_scales[place.buffer][row + 8][place.slot];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float columns = shared.b_scales[place.buffer][i][place.slot];
            low[i] = low_row * columns;
            high[i] = high_row * columns;
        }
    }
};

// Registers 4j + {0, 1} are row lane / 4, columns 8j + 2 * (lane % 4) + {0, 1}; 4j + {2, 3} are 8 rows below. With
// SwiGLU even j are gates, odd j ups.
template <class Shape>
__device__ __forceinline__ void add_scaled(float (&sums)[64], const float (&product)[64], const Scales& scales,
                                           int half) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        const int columns = Shape::swiglu ? i / 4 % 2 : half;
        sums[i] = __fmaf_rn(product[i], i & 2 ? scales.high[columns] : scales.low[columns], sums[i]);
    }
}

template <class Shape>
__device__ __forceinline__ void multiply_tiles(const GroupedGemmArgs& args, GemmShared<Shape>& shared, int32 block,
                                               int group, int thread) {
    constexpr uint32 kStageA = kTileRows * kBlock >> 4, kStageB = kTileColumns * kBlock >> 4;  // in descriptors
    constexpr uint32 kHalfB = kStageB / kHalves;
    constexpr int kUnrolled = Shape::swiglu ? 4 : 8;  // twice as many spill
    const int lane = thread % 32, row = group * kGroupRows + thread / 32 * 16 + lane / 4;
    const uint32 a_tiles = wgmma_tile(shared_address(shared.a[0]) + group * kGroupRows * kBlock);
    const uint32 b_tiles = wgmma_tile(shared_address(shared.b[0]));
    // A stage is free when the warps of both blocks have read it: lane 0 tells this block, lane 1 the other.
    const uint32 empty = map_to_block(shared_address(shared.empty), block ^ (lane & 1));
    constexpr uint32 kBlocks = Shape::k / kBlock;
    int blocks = kBlocks;
    asm volatile("" : "+r"(blocks));  // a loop of one round that is optimised away leaves wgmma unordered (C7519)

    TileSource<Shape> tiles(shared.offsets);
    uint32 uses = 0;
    for (; tiles.next(); uses += kBlocks) {
        if (group >= tiles.tile(block).groups()) {  // no rows for this warpgroup
            for (int k = 0; k < blocks; ++k) {
                const RingUse<Shape::stages> at(uses + k);
                mbarrier_wait(&shared.full[at.stage], at.parity);
                if (lane < 2) mbarrier_arrive_there(empty + at.stage * 8);
            }
            wait_for_room(shared, uses / kBlocks, group);
            tell_storing_warps(shared, group, lane);
            continue;
        }
        float sums[kHalves][64];
#pragma unroll
        for (int half = 0; half < kHalves; ++half)
#pragma unroll
            for (int i = 0; i < 64; ++i) sums[half][i] = 0.0f;
#pragma unroll(kUnrolled)
        for (int k = 0; k < blocks; ++k) {
            const RingUse<Shape::stages> at(uses + k);
            const uint32 a = a_tiles + at.stage * kStageA, b = b_tiles + at.stage * kStageB;
            mbarrier_wait(&shared.full[at.stage], at.parity);
            if constexpr (Shape::gathers != 0) fence_shared_to_bulk();  // copies that are ordinary stores
            Scales scales;
#pragma unroll
            for (int half = 0; half < kHalves; ++half) {
                float product[64];
                start_product(product, a, b + half * kHalfB);
                if (half == 0) scales.load(shared, ScalePlace<Shape>(uses, k), row);  // while they multiply
                wgmma_wait<0>();
                if (half == kHalves - 1 && lane < 2) mbarrier_arrive_there(empty + at.stage * 8);
                add_scaled<Shape>(sums[half], product, scales, half);
            }
        }
        asm volatile("" : "+r"(tiles.pair));  // so that the tile is found again: registers are short in the loop
        const Tile tile = tiles.tile(block);
        if constexpr (Shape::swiglu) leave_activations<Shape>(args, shared, sums, tile, uses / kBlocks, group, thread);
        else leave_rows<Shape>(shared, sums, uses / kBlocks, group, thread);
    }
}
