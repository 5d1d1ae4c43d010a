// What strategy reduce_scatter sends: this rank's partial sum for every token of every rank that has rows here, by home
// rank and token, [W][M]. Other rows of that are unspecified, and never read.
//
// No call: nobody is notified, nobody is waited for. `out` of the args is where these rows go; those of this rank's own
// tokens, which are home, go to `own_sums`.
#pragma once
#include "kernels/combine/push.cuh"

// The received rows that a warp takes, home rank after home rank.
template <class Shape>
struct StridedRows {
    struct Row {
        RowRoutes routes;
        unsigned char* to;
    };

    int64 row, end = 0;
    int home = -1;

    __device__ bool next(const CombineArgs& args, Row& found, int lane) {
        constexpr int kCounts = Shape::num_ranks + Shape::num_experts;
        while (row >= end) {
            if (++home == Shape::num_ranks) return false;
            end += args.all_counts[home * kCounts + args.call.rank];
        }
        constexpr int64 kRowBytes = CombineRows<Shape>::kWireBytes;
        const uint64 first = home == args.call.rank
                                 ? args.own_sums
                                 : reinterpret_cast<uint64>(args.out) + home * args.max_tokens * kRowBytes;
        found.routes = routes_of<Shape>(args, row, lane);
        found.to = reinterpret_cast<unsigned char*>(first + args.row_tokens[row] * kRowBytes);
        row += gridDim.x * Shape::push_warps;
        return true;
    }

    __device__ __forceinline__ unsigned char* address(const Row& found) const { return found.to; }
};

template <class Shape>
__device__ void pre_reduce(const CombineArgs& args) {
    extern __shared__ __align__(128) unsigned char memory[];
    using Stream = typename CombineRows<Shape>::Push;
    static_assert(sizeof(typename Stream::Shared) * Shape::push_warps <= Shape::shared_bytes, "launch.py gives this");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    wait_for_earlier_kernels();
    Stream stream(reinterpret_cast<typename Stream::Shared*>(memory)[warp], lane);
    StridedRows<Shape> rows{static_cast<int64>(warp) * gridDim.x + blockIdx.x};
    push_all<Shape>(args, rows, stream, lane, [](const auto&) {}, [](const auto&) {});
}
