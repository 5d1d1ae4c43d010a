// What the dispatch kernel tells this rank's host and its next kernels about the output.
#pragma once
#include "kernels/dispatch/route.cuh"

// Block 0: the counts of this rank's output, clamped to the capacity so that they are safe to address it with.
template <class Shape>
__device__ void publish_counts(const DispatchArgs& args, const RouteShared<Shape>& route,
                               const AllCounts<Shape>& counts) {
    constexpr int kCounts = RouteShared<Shape>::kCounts;
    const int32 clamp = Shape::layout == kLayoutToken ? args.capacity : 0x7fffffff;
    for (int i = threadIdx.x; i < Shape::num_ranks * kCounts; i += Shape::threads)
        args.all_counts[i] = counts.count(i / kCounts, i % kCounts);
    for (int s = threadIdx.x; s < Shape::num_ranks; s += Shape::threads)
        args.source_counts[s] =
            min(route.received_base[s] + route.received[s], clamp) - min(route.received_base[s], clamp);
    const int32* routes = route.expert_total + args.call.rank * Shape::experts_per_rank;
    for (int l = threadIdx.x; l < Shape::experts_per_rank; l += Shape::threads) {
        int32 kept = routes[l];
        if constexpr (Shape::layout == kLayoutSlots) {
            kept = min(kept, args.capacity);
        } else if constexpr (Shape::layout == kLayoutExpert) {
            const int32 begin = min(route.own_start[l], args.capacity), end = min(route.own_start[l + 1], args.capacity);
            kept = min(kept, end - begin);
            args.expert_offsets[l] = begin;
            if (l + 1 == Shape::experts_per_rank) args.expert_offsets[l + 1] = end;
        }
        args.expert_counts[l] = kept;
    }
    if (threadIdx.x >= 32) return;
    int32 in_slots = 0;
    if constexpr (Shape::layout == kLayoutSlots) {
        for (int l = threadIdx.x; l < Shape::experts_per_rank; l += 32) in_slots += min(routes[l], args.capacity);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) in_slots += __shfl_xor_sync(~0u, in_slots, step);
    }
    if (threadIdx.x == 0) {
        int32 needed = 0;
        for (int r = 0; r < Shape::num_ranks; ++r) needed = max(needed, route.needed[r]);
        if (needed > args.capacity) {
            args.call.record->capacity = args.capacity;
            store_release_sys(&args.call.record->needed_rows, needed);
        }
        *args.num_rows =
            Shape::layout == kLayoutSlots ? in_slots : min(route.needed[args.call.rank], args.capacity);
    }
}

// Block 0, behind what is wrong with the call and behind its counts: the host need not wait for the rows.
template <class Shape>
__device__ void notify_host(const DispatchArgs& args) {
    constexpr int kWords = 1 + Shape::num_ranks + 2 * Shape::experts_per_rank + 1;
    if (args.host_counts == nullptr) return;
    __syncthreads();
    for (int i = threadIdx.x; i < kWords; i += Shape::threads) args.host_counts[1 + i] = args.num_rows[i];
    __syncthreads();
    if (threadIdx.x == 0) store_release_sys(reinterpret_cast<uint32*>(args.host_counts), args.host_sequence);
}

// All rows of all sources are in this rank's region; `blocks` of each source have sent them.
template <class Shape>
__device__ bool wait_for_sources(const DispatchArgs& args, Turn turn, int32 blocks) {
    const uint64 flags =
        flags_of<Shape::num_ranks, Shape::node_ranks>(args.done_flags, turn.epoch, Shape::max_blocks);
    const PeerSignals done = window_of<Shape::num_ranks>(args.call.peers).signals(args.call.rank, flags);
    return wait_for_blocks<Shape::num_ranks, Shape::threads, Shape::node_ranks>(args.call, done, Shape::max_blocks,
                                                                                blocks, turn, kPhaseRows);
}

// One warp: the results of a dispatch that did not take place. No rows, here or elsewhere, so that nobody who goes on
// with them addresses anything.
template <class Shape>
__device__ void publish_nothing(const DispatchArgs& args) {
    constexpr int stride = 32;
    const int64 thread = threadIdx.x;
    for (int64 i = thread; i < static_cast<int64>(args.num_tokens) * (Shape::num_ranks + Shape::top_k); i += stride)
        args.slots[i] = -1;
    for (int64 i = thread; i < Shape::num_ranks * RouteShared<Shape>::kCounts; i += stride) args.all_counts[i] = 0;
    for (int64 i = thread; i < Shape::num_ranks; i += stride) args.source_counts[i] = 0;
    for (int64 i = thread; i <= Shape::experts_per_rank; i += stride) {
        if (i < Shape::experts_per_rank) args.expert_counts[i] = 0;
        if (Shape::layout == kLayoutExpert) args.expert_offsets[i] = 0;
    }
    if constexpr (Shape::layout == kLayoutSlots)
        for (int64 i = thread; i < 2 * Shape::num_experts; i += stride) args.slot_ranges[i] = 0;
    if (thread == 0) *args.num_rows = 0;
}
