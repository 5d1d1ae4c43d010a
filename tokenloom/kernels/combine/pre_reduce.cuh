// What strategy reduce_scatter sends: this rank's partial sum for every token of every rank that has rows here, by home
// rank and token, [W][M]. Other rows of that are unspecified, and never read.
//
// No call: nobody is notified, nobody is waited for. `out` of the args is where these rows go; those of this rank's own
// tokens, which are home, go to `own_sums`.
#pragma once
#include "kernels/combine/push.cuh"

template <class Shape>
__device__ void pre_reduce(const CombineArgs& args) {
    constexpr int kCounts = Shape::num_ranks + Shape::num_experts;
    constexpr int64 kRowBytes = CombineRows<Shape>::kWireBytes;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64 stride = gridDim.x * (Shape::threads / 32);
    int64 row = static_cast<int64>(warp) * gridDim.x + blockIdx.x, end = 0;
    for (int home = 0; home < Shape::num_ranks; ++home) {
        end += args.all_counts[home * kCounts + args.call.rank];
        const uint64 first = home == args.call.rank
                                 ? args.own_sums
                                 : reinterpret_cast<uint64>(args.out) + home * args.max_tokens * kRowBytes;
        for (; row < end; row += stride) {
            auto* to = reinterpret_cast<unsigned char*>(first + args.row_tokens[row] * kRowBytes);
            push_row<Shape>(args, routes_of<Shape>(args, row, lane), nullptr, to, lane);
        }
    }
}
