// What strategy reduce_scatter sends: this rank's partial sum for every token of every rank that has rows here, by home
// rank and token, [W][M]. Other rows of that are unspecified, and never read.
//
// No call: nobody is notified, nobody is waited for. `out` of the args is where these rows go; those of this rank's own
// tokens, which are home, go to `own_sums`.
#pragma once
#include "kernels/combine/push.cuh"

template <class Shape>
struct PreReduceShared {
    using Stream = typename CombineRows<Shape>::Push;
    typename Stream::Shared ring[Shape::push_warps];
    typename Stream::Control control_of_stream[Shape::push_warps];
};

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
    static_assert(sizeof(PreReduceShared<Shape>) <= Shape::shared_bytes, "launch.py asks for what this needs");
    auto& shared = *reinterpret_cast<PreReduceShared<Shape>*>(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    PreReduceShared<Shape>::Stream::init(shared.control_of_stream[warp], lane);
    mbarrier_init_fence();
    __syncthreads();
    typename PreReduceShared<Shape>::Stream stream(shared.ring[warp], shared.control_of_stream[warp], lane);
    StridedRows<Shape> rows{static_cast<int64>(warp) * gridDim.x + blockIdx.x};
    push_all<Shape>(args, rows, stream, lane, [](const auto&) {}, [](const auto&) {});
}
