// Combine: rows go home as partial sums, one per (token, rank), and are added there in ascending rank. Or, per route:
// every weighted row goes home by itself, and they are added there in ascending k.
//
//   all blocks      wait until all ranks have begun this combine, so that their buffers are free
//   pushing warps   write chunks of rows into their home ranks' buffers                                     (push.cuh)
//   telling warp    raises the flags of chunks that are there
//   summing warps   take this rank's tokens in order, wait for the chunks that hold their rows, add them    (home.cuh)
//   last block out  advances the epoch
//
// Dense (strategy reduce_scatter): presum.cuh has made the partial sums, copy engines have brought them; all warps sum.
//
// A chunk is a few consecutive rows of one (expert rank, home rank) pair, so home starts long before the last row is
// sent. Every block has warps of both roles: while some wait, the others have the SM. README.md has the protocol.
#pragma once
#include "kernels/combine/home.cuh"
#include "kernels/combine/push.cuh"

template <class Shape>
__device__ void find_bases(const CombineArgs& args, CombineShared<Shape>& shared) {
    constexpr int kCounts = Shape::num_ranks + Shape::num_experts;
    if (threadIdx.x < Shape::num_ranks) {
        const int i = threadIdx.x;
        int32 received = 0, home = 0, own = 0;
        for (int s = 0; s < i; ++s) {
            received += args.all_counts[s * kCounts + args.call.rank];
            own += args.all_counts[args.call.rank * kCounts + s];
        }
        for (int r = 0; r < args.call.rank; ++r) home += args.all_counts[i * kCounts + r];
        shared.control[i] = args.call.peers[i];
        shared.data[i] = args.peers[i];
        shared.received_base[i] = received;
        shared.received[i] = args.all_counts[i * kCounts + args.call.rank];
        shared.home_base[i] = home;
        shared.own_base[i] = own;
        shared.own[i] = args.all_counts[args.call.rank * kCounts + i];
    }
    __syncthreads();
}

// The result of a combine that does not take place: NaN, so that nobody takes what lay there for a result.
template <class Shape>
__device__ void publish_nan(const CombineArgs& args) {
    constexpr int kRowUnits = CombineRows<Shape>::kOutBytes / 16;
    constexpr uint32 kNan = kNanWord<Shape::out_dtype>;
    auto* out = static_cast<unsigned char*>(args.out);
    const int64 first = blockIdx.x * Shape::threads + threadIdx.x;
    for (int64 i = first; i < static_cast<int64>(args.num_tokens) * kRowUnits; i += gridDim.x * Shape::threads)
        store_16(out + i * 16, Vec16{{kNan, kNan, kNan, kNan}});
}

template <class Shape>
__device__ void combine(const CombineArgs& args) {
    extern __shared__ __align__(128) unsigned char memory[];
    static_assert(sizeof(CombineShared<Shape>) <= Shape::shared_bytes, "launch.py asks for what this needs");
    auto& shared = *reinterpret_cast<CombineShared<Shape>*>(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32 epoch = epoch_of(args.call);
    if (threadIdx.x == 0) mark(args.call, kBegun);
    if (__syncthreads_or(has_expired(deadline_of(args.call)))) return publish_nan<Shape>(args);
    constexpr int kCounts = Shape::num_ranks + Shape::num_experts;
    if (blockIdx.x == 0)
        announce_call<Shape::num_ranks, kCounts, Shape::threads>(args.call, epoch, 0, shared.row);
    if (warp == 0) shared.progress.clear(lane);
    if (warp < shared.kRings) CombineShared<Shape>::Copy::init(shared.control_of_stream[warp], lane);
    mbarrier_init_fence();
    find_bases<Shape>(args, shared);
    const Opened opened = await_call<Shape::num_ranks, kCounts>(args.call, epoch);
    if (threadIdx.x == 0) mark(args.call, kHeard);
    if (opened != Opened::kGo) publish_nan<Shape>(args);
    if (opened == Opened::kExpired) return;
    if (opened == Opened::kGo) {
        if constexpr (Shape::dense != 0) sum_rows_at_home<Shape>(args, shared, epoch, warp, lane);
        else if (warp == Shape::push_warps) raise_chunk_flags<Shape>(args, shared, epoch, lane);
        else if (warp > Shape::push_warps)
            sum_rows_at_home<Shape>(args, shared, epoch, warp - Shape::push_warps - 1, lane);
        else if constexpr (CombineRows<Shape>::kCopies) push_copies<Shape>(args, shared, epoch, warp, lane);
        else push_sums<Shape>(args, shared, warp, lane);
        if (lane == 0)
            mark(args.call, Shape::dense != 0 || warp > Shape::push_warps ? kSummed
                            : warp == Shape::push_warps                   ? kTold
                                                                          : kSent);
    }
    if (threadIdx.x == 0) mark(args.call, kDone);
    close_call(args.call, epoch);
}
