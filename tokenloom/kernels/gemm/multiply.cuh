// The math warpgroups, 64 rows x 256 columns each, or half of the columns of an expert's only 64 rows: multiply 128 of a
// stage's columns into a temporary; add it, scaled, to float32 registers (the tensor core adds FP8 products with about
// 14 bits, and scales change every 128 values of K anyway). While one warpgroup adds, the other has the tensor cores.
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
    // What is known when this is compiled stays so; where it is not, one select instead of 64.
    const float low[2] = {Shape::swiglu || half == 0 ? scales.low[0] : scales.low[1], scales.low[1]};
    const float high[2] = {Shape::swiglu || half == 0 ? scales.high[0] : scales.high[1], scales.high[1]};
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        const int columns = Shape::swiglu ? i / 4 % 2 : 0;
        sums[i] = __fmaf_rn(product[i], i & 2 ? high[columns] : low[columns], sums[i]);
    }
}

// The tile is found again, and addresses are computed again: so they take no registers while it is multiplied.
template <class Shape, int kChunks>
__device__ __forceinline__ void leave_sums(const GroupedGemmArgs& args, GemmShared<Shape>& shared,
                                           float (&sums)[kChunks][64], TileSource<Shape>& tiles, int32 block,
                                           uint32 use, int group, int thread) {
    asm volatile("" : "+r"(tiles.pair), "+r"(thread));
    if (thread == 0) trace<Shape>(args, kMultiplies + group, use, 1);
    if (thread == 0) trace<Shape>(args, kLeaves + group, use, 0);
    const Tile tile = tiles.tile(block);
    if constexpr (Shape::swiglu) leave_activations<Shape>(args, shared, sums, tile, use, group, thread);
    else leave_rows<Shape>(shared, sums, use, group, thread);
    if (thread == 0) trace<Shape>(args, kLeaves + group, use, 1);
}

// Where the operands are in shared memory, and what frees a stage, for one thread of a math warpgroup.
struct Operands {
    uint32 a, b;   // descriptors of the first stage: this warpgroup's rows, and its columns
    uint32 empty;  // of the block that this thread tells: lane 0 its own, lane 1 the other
    int row;       // of the tile: this thread's first
    int lane;
};

// All blocks of K of a tile, kChunks times 128 of its columns.
template <class Shape, int kChunks>
__device__ __forceinline__ void multiply_tile(GemmShared<Shape>& shared, const Operands& at, uint32 uses, int first_half,
                                              float (&sums)[kChunks][64]) {
    constexpr uint32 kStageA = kTileRows * kBlock >> 4, kStageB = kTileColumns * kBlock >> 4;  // in descriptors
    constexpr int kUnrolled = Shape::swiglu ? 4 : 8;  // twice as many spill
    int blocks = Shape::k / kBlock;
    asm volatile("" : "+r"(blocks));  // a loop of one round that is optimised away leaves wgmma unordered (C7519)
#pragma unroll
    for (auto& chunk : sums)
#pragma unroll
        for (float& sum : chunk) sum = 0.0f;
#pragma unroll(kUnrolled)
    for (int k = 0; k < blocks; ++k) {
        const RingUse<Shape::stages> use(uses + k);
        mbarrier_wait(&shared.full[use.stage], use.parity);
        if constexpr (Shape::gathers != 0) fence_shared_to_bulk();  // copies that are ordinary stores
        Scales scales;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            float product[64];
            start_product(product, at.a + use.stage * kStageA,
                          at.b + use.stage * kStageB + chunk * (kStageB / kHalves));
            if (chunk == 0) scales.load(shared, ScalePlace<Shape>(uses, k), at.row);  // while they multiply
            wgmma_wait<0>();
            if (chunk == kChunks - 1 && at.lane < 2) mbarrier_arrive_there(at.empty + use.stage * 8);
            add_scaled<Shape>(sums[chunk], product, scales, first_half + chunk);
        }
    }
}

// Its stages are free for all that this warpgroup wants of them.
template <class Shape>
__device__ __forceinline__ void skip_tile(GemmShared<Shape>& shared, uint32 uses, uint32 empty, int lane) {
    for (int k = 0; k < Shape::k / kBlock; ++k) {
        const RingUse<Shape::stages> use(uses + k);
        mbarrier_wait(&shared.full[use.stage], use.parity);
        if (lane < 2) mbarrier_arrive_there(empty + use.stage * 8);
    }
}

template <class Shape>
__device__ __forceinline__ void multiply_tiles(const GroupedGemmArgs& args, GemmShared<Shape>& shared, int32 block,
                                               int group, int thread) {
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
    const uint32 a = shared_address(shared.a[0]), b = shared_address(shared.b[0]);
    // A stage is free when the warps of both blocks have read it.
    const uint32 empty = map_to_block(shared_address(shared.empty), block ^ (lane & 1));
    TileSource<Shape> tiles(shared);
    constexpr uint32 kBlocks = Shape::k / kBlock;
    for (uint32 uses = 0; tiles.next(); uses += kBlocks) {
        const Tile tile = tiles.tile(block);
        if (thread == 0) trace<Shape>(args, kMultiplies + group, uses / kBlocks, 0);
        if (group >= tile.groups() && !tile.halves) {  // no rows for this warpgroup
            skip_tile<Shape>(shared, uses, empty, lane);
            wait_for_room(shared, uses / kBlocks, group);
            tell_storing_warps(shared, group, lane);
        } else if (!tile.halves) {
            float sums[kHalves][64];
            const uint32 own_a = wgmma_tile(a + group * kGroupRows * kBlock);
            multiply_tile<Shape>(shared, {own_a, wgmma_tile(b), empty, group * kGroupRows + row, lane}, uses, 0, sums);
            leave_sums<Shape>(args, shared, sums, tiles, block, uses / kBlocks, group, thread);
        } else {
            float sums[1][64];
            const uint32 own_b = wgmma_tile(b + group * kBlock * kBlock);
            multiply_tile<Shape>(shared, {wgmma_tile(a), own_b, empty, row, lane}, uses, group, sums);
            leave_sums<Shape>(args, shared, sums, tiles, block, uses / kBlocks, group, thread);
        }
    }
}
