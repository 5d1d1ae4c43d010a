// Grouped FP8 GEMM: rows that are grouped by expert times each expert's weights, with block scales.
//
//   out[row, n] = sum over blocks k of a_scale[row, k] * b_scale[e, n / 128, k] * (a[row, k:] . b[e, n, k:])
//
// With SwiGLU, b has 8 rows of gates and 8 rows of ups in turn, and the output is quantised (swiglu.cuh).
//
// Persistent; blocks work in clusters of two. Roles of a block: two math warpgroups (multiply.cuh), two loading warps
// (load.cuh, gather.cuh), two storing warps (store.cuh). tiles.cuh says who computes what.
#pragma once
#include "kernels/gemm/gather.cuh"
#include "kernels/gemm/multiply.cuh"

template <class Shape>
__device__ void grouped_gemm(const GroupedGemmArgs& args) {
    extern __shared__ __align__(1024) unsigned char memory[];
    static_assert(sizeof(GemmShared<Shape>) <= Shape::shared_bytes, "launch.py asks for what this needs");
    static_assert(Shape::k % kBlock == 0 && Shape::n % kBlock == 0, "whole scale blocks");
    static_assert(!Shape::swiglu || Shape::n % kTileColumns == 0, "whole scale blocks of the output");
    auto& shared = *reinterpret_cast<GemmShared<Shape>*>(memory);
    constexpr bool kScalesByTma = GemmShared<Shape>::kScalesByTma, kScaleWarp = GemmShared<Shape>::kScaleWarp;
    constexpr int kThreads = 128 * (kGroups + 1);
    constexpr int kLoadRegisters = 72, kMathRegisters = 216;
    static_assert(kLoadRegisters + kGroups * kMathRegisters <= 504, "what the launch allots to three warpgroups");
    const int32 block = cluster_rank();

    for (int i = threadIdx.x; i <= Shape::num_experts; i += kThreads) shared.offsets[i] = args.offsets[i];
    if (threadIdx.x == 0) {
        shared.first_expert = args.first_expert;
        shared.end_expert = args.end_expert;
        for (int i = 0; i < Shape::stages; ++i) {
            mbarrier_init(&shared.full[i], kScaleWarp || Shape::gathers ? 1 + 32 : 1);  // who loads tiles, that warp
            mbarrier_init(&shared.empty[i], 2 * kMathWarps);  // of both blocks
        }
        for (int i = 0; i < kGroups; ++i) {
            mbarrier_init(&shared.out_full[i], kMathWarps / kGroups);
            mbarrier_init(&shared.out_empty[i], kStoreWarps);
        }
        mbarrier_init_fence();
        if (!Shape::gathers) tensor_prefetch(&args.a);
        tensor_prefetch(&args.b);
        if (kScalesByTma) tensor_prefetch(&args.a_scale_map);
    }
    cluster_sync();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // so that the compiler knows that it is uniform
    if (group == kGroups) {
        keep_registers<kLoadRegisters>();
        const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
        if (warp == 0 && lane == 0) load_tiles<Shape>(args, shared, block);
        if constexpr (kScaleWarp)
            if (warp == 1) load_scales<Shape>(args, shared, block, lane);
        if constexpr (Shape::gathers != 0)
            if (warp == 1) gather_rows<Shape>(args, shared, block, lane);
        if (warp >= 4 - kStoreWarps) store_tiles<Shape>(args, shared, block, threadIdx.x % (32 * kStoreWarps));
        __syncwarp();
    } else {
        take_registers<kMathRegisters>();
        multiply_tiles<Shape>(args, shared, block, group, threadIdx.x % 128);
    }
    cluster_sync();  // no block leaves while the other arrives on its barriers
}
