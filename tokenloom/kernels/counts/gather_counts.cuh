// Counts of all ranks, on all ranks: opens a call whose headers carry them, and does nothing else.
//
//   the one block   tells all ranks that this one has begun the call, and its counts; waits until all have, and mean the
//                   same, and for their counts; writes these down, or zeros                       (transport/call.cuh)
//
// A balanced dispatch begins so: every rank works out from the counts where its rows go (kernels/split_batch).
#pragma once
#include "device/ptx/grid.cuh"
#include "device/transport/call.cuh"

struct GatherCountsArgs {
    Call call;
    const int32* counts;  // [told], of this rank
    int32* all_counts;    // [W][told]; zeros where a rank is masked, and everywhere if the call does not take place
};

template <class Shape>
__device__ void gather_counts(const GatherCountsArgs& args) {
    // Headers lie where those of dispatches do, which tell more.
    constexpr int kCounts = Shape::num_ranks + Shape::num_experts, kTold = Shape::told;
    static_assert(kTold <= kCounts, "headers have room for what is told");
    __shared__ alignas(16) int32 header[kHeaderWords + kTold];
    wait_for_earlier_kernels();
    if (threadIdx.x == 0) mark(args.call, kBegun);
    const Turn turn = turn_of(args.call);
    bool done = false;
    if (!__syncthreads_or(has_expired(deadline_of(args.call)))) {
        announce_call<Shape::num_ranks, kCounts, Shape::threads>(args.call, turn, header);
        for (int i = threadIdx.x; i < kTold; i += Shape::threads) header[kHeaderWords + i] = args.counts[i];
        __syncthreads();
        tell_ranks<Shape::num_ranks, kCounts, Shape::threads, kHeaderWords, kHeaderWords + kTold>(args.call, turn,
                                                                                                args.call.rank, header);
        if (threadIdx.x == 0) mark(args.call, kSent);
        done = await_call<Shape::num_ranks, kCounts, Shape::threads>(args.call, turn) == Opened::kGo &&
               await_counts<Shape::num_ranks, kCounts, Shape::threads, Shape::num_ranks, kTold>(args.call, turn);
    }
    if (threadIdx.x == 0) mark(args.call, kHeard);
    const StampedWord* all = headers_of<Shape::num_ranks, kCounts>(args.call, turn.epoch) + kHeaderWords;
    for (int i = threadIdx.x; i < Shape::num_ranks * kTold; i += Shape::threads) {
        const int rank = i / kTold;
        const bool counts = done && !turn.leaves_out<Shape::num_ranks>(rank);
        args.all_counts[i] = counts ? all[rank * header_words<kCounts> + i % kTold].value : 0;
    }
    let_next_kernel_begin();  // the split, which takes one SM and waits for this one
    close_call<Shape::num_ranks>(args.call, turn, done, [] {});
}
