// Grouped GEMM of bfloat16, for training: rows that are grouped by expert times each expert's weights, or, of weights,
// the sum of outer products of each expert's rows.
//
//   out[row, n] = sum over k of a[row, k] * b[e, n, k]        across: b[e, k, n]
//   out[e, m, n] = sum over rows of a[row, m] * b[row, n]     of weights; with `adds` on top of what is there
//
// With SwiGLU b has n / 2 rows of gates, then as many of ups, and the kernel writes activations beside the products.
//
// Blocks work in clusters of two and claim items of work (tiles.cuh). Roles of a block: two math warpgroups
// (multiply.cuh), which also store (store.cuh), a loading thread (load.cuh), and in one of the two a claiming thread.
#pragma once
#include "kernels/gemm16/load.cuh"
#include "kernels/gemm16/multiply.cuh"

template <class Shape>
__device__ void grouped_gemm16(const Gemm16Args& args) {
    extern __shared__ __align__(1024) unsigned char memory[];
    static_assert(sizeof(Gemm16Shared<Shape>) <= Shape::shared_bytes, "launch.py asks for what this needs");
    static_assert(!Shape::of_weights || Shape::b_across, "rows lie along m and n");
    static_assert(!Shape::swiglu || !Shape::b_across, "gates and ups are two boxes of rows");
    auto& shared = *reinterpret_cast<Gemm16Shared<Shape>*>(memory);
    constexpr int kThreads = 128 * (kGroups + 1);
    constexpr int kLoadRegisters = 40, kMathRegisters = 232;
    static_assert(kLoadRegisters + kGroups * kMathRegisters <= 504, "what the launch allots to three warpgroups");
    const int32 block = cluster_rank();

    for (int i = threadIdx.x; i <= Shape::num_experts; i += kThreads) shared.offsets[i] = args.offsets[i];
    if (threadIdx.x == 0) {
        for (int i = 0; i < Shape::stages; ++i) {
            mbarrier_init(&shared.full[i], 1);
            mbarrier_init(&shared.empty[i], 2 * kMathWarps);  // of both blocks
        }
        for (int i = 0; i < kItems; ++i) {
            mbarrier_init(&shared.item_full[i], 1);
            mbarrier_init(&shared.item_empty[i], 2 * (kMathWarps + 1));
        }
        mbarrier_init_fence();
        tensor_prefetch(&args.a);
        tensor_prefetch(&args.b);
    }
    cluster_sync();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // so that the compiler knows that it is uniform
    if (group == kGroups) {
        keep_registers<kLoadRegisters>();
        if (threadIdx.x % 128 == 0) load_tiles<Shape>(args, shared, block);
        if (threadIdx.x % 128 == 32 && block == 0) claim_items<Shape>(args, shared);
        __syncwarp();
    } else {
        take_registers<kMathRegisters>();
        multiply_tiles<Shape>(args, shared, block, group, threadIdx.x % 128);
    }
    cluster_sync();  // no block leaves while the other arrives on its barriers
}
