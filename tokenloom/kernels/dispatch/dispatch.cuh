// Dispatch: every row goes straight to its final place on the ranks that hold its experts.
//
//   last block      tells all ranks that this one has begun the call, and then its counts         (transport/call.cuh)
//   all blocks      count the routes of their chunk, and find which of its rows, and of its routes, each one is
//                                                                                      (count_routes.cuh, route.cuh)
//   all blocks      wait until all ranks have begun; go on only if they mean the same call
//   all blocks      wait for all ranks' counts. In layout rank only block 0 does, and where the host does not wait for
//                   counts it comes behind the rows: these have fixed places
//   block 0         writes down the counts of this rank's output, for the host too if it waits           (results.cuh)
//   layouts token, rank
//     sending warps take token after token: stream its row, or quantise it, to all of its destinations,     (send.cuh)
//                   with ids, weights and scales
//     all blocks    say so to all ranks; block 0 waits for all ranks' blocks
//   layouts expert, slots: peer blocks
//     sending warps the same, to other ranks only; of rows that are quantised, also what stays
//     notify warp   raises a flag per row that has been sent
//     all warps     do as other blocks do, once all that this block has sent is there
//   layouts expert, slots: other blocks
//     sending warps put this rank's own rows in their places, if no other block has; then fill
//     other warps   clear the padding of layout expert, then fill: copy each row that arrives to its further places
//                                                                                              (padding.cuh, fill.cuh)
//   last block out  advances the epoch; if the call was refused or a wait has expired, it makes the results say so
//
// Halves are two kernels: one that sends and places own rows, and one that waits for rows or fills.
//
// README.md has the protocol and why it is safe to reuse the region.
#pragma once
#include "kernels/dispatch/fill.cuh"
#include "kernels/dispatch/padding.cuh"
#include "kernels/dispatch/results.cuh"
#include "kernels/dispatch/send.cuh"

// A warp with others, so many in all, that clear the padding of layout expert.
template <class Shape>
__device__ __forceinline__ void clear(const DispatchArgs& args, const DispatchShared<Shape>& shared, int warp,
                                      int num_warps, int lane) {
    if constexpr (Shape::layout == kLayoutSlots) return;  // places beyond the count are unspecified
    clear_padding<Shape>(args, shared.route, shared.data.template local<unsigned char>(args.call.rank, args.rows),
                         shared.data.template local<float>(args.call.rank, args.row_scales), warp, num_warps, lane);
}

// Layouts expert and slots: what this block has to do for other ranks and for this one. An SM that sends into a full link has
// little of its path to memory left for anything else, so blocks do one or the other. False in warps that saw a wait
// expire.
template <class Shape>
__device__ bool send_and_fill(const DispatchArgs& args, DispatchShared<Shape>& shared, const int32* places, Turn turn,
                              Chunk chunk, int warp, int lane) {
    constexpr int kWarps = Shape::threads / 32;
    constexpr bool kFills = Shape::part == kWhole;
    constexpr bool kOnce = Shape::quantize != kAsIs;  // it costs more to quantise a row again than to store it
    const int32 peer_blocks = args.peer_blocks, block = blockIdx.x;
    bool done = true;
    if (block < peer_blocks) {
        if (warp < Shape::send_warps) {
            const ToRanks<Shape, kOnce ? Sent::kAll : Sent::kToPeers> way{args, shared, places, turn};
            done = send_rows<Shape>(args, shared, way, chunk, turn.epoch, warp, lane);
            if (lane == 0) mark(args.call, kSent);
        } else if (warp == Shape::send_warps) {
            shared.progress.watch(lane, [&](int32 token) { notify_row<Shape>(args, shared, turn.epoch, token); });
            if (lane == 0) mark(args.call, kNotified);
        }
        if (!__syncthreads_and(done)) return false;
    }
    if (!kOnce && warp < Shape::send_warps) {
        const ToRanks<Shape, Sent::kOwn> way{args, shared, places, turn};
        done = send_rows<Shape>(args, shared, way, chunk, turn.epoch, warp, lane);
    }
    if constexpr (kFills) {
        const int32 first = peer_blocks < gridDim.x ? peer_blocks : 0;  // a block by itself is both
        if (block >= first)
            clear<Shape>(args, shared, (block - first) * kWarps + warp, (gridDim.x - first) * kWarps, lane);
        done = done && fill_further_places<Shape>(args, shared, turn.epoch, lane);
        if (lane == 0) mark(args.call, kFilled);
    }
    return done;
}

// What follows from all ranks' counts, once they are here: where this block's rows go, and, in block 0, what this rank
// receives. False: a wait has expired.
template <class Shape>
__device__ bool publish(const DispatchArgs& args, RouteShared<Shape>& route, const AllCounts<Shape>& counts) {
    if (!await_counts<Shape::num_ranks, RouteShared<Shape>::kCounts, Shape::threads>(args.call, counts.turn)) return false;
    find_bases<Shape>(args, route, counts);
    if (blockIdx.x != 0) return true;
    publish_counts<Shape>(args, route, counts);
    notify_host<Shape>(args);
    return true;
}

// All that a block does before it leaves. False, in any thread: the dispatch does not take place, or not all of it.
template <class Shape>
__device__ bool dispatch_rows(const DispatchArgs& args, Turn turn) {
    const uint32 epoch = turn.epoch;
    extern __shared__ __align__(128) unsigned char memory[];
    static_assert(sizeof(DispatchShared<Shape>) <= Shape::shared_bytes, "launch.py asks for what this needs");
    auto& shared = *reinterpret_cast<DispatchShared<Shape>*>(memory);
    auto& route = shared.route;
    constexpr int kCounts = RouteShared<Shape>::kCounts;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32 block = blockIdx.x, blocks = gridDim.x;
    if (threadIdx.x == 0) mark(args.call, kBegun);
    if (__syncthreads_or(has_expired(deadline_of(args.call)))) return false;
    const Chunk chunk = chunk_of(args.num_tokens, block);

    if (warp == 0) shared.progress.clear(lane);
    if (warp < shared.kRings) DispatchShared<Shape>::Stream::init(shared.control_of_stream[warp], lane);
    if (threadIdx.x < Shape::num_ranks) shared.control.bases[threadIdx.x] = args.call.peers[threadIdx.x];
    mbarrier_init_fence();
    if (block == blocks - 1)  // blocks start in order: when it runs, none of this rank lacks an SM
        announce_call<Shape::num_ranks, kCounts, Shape::threads>(args.call, turn, route.header);
    if (!count_all_routes<Shape>(args, route, chunk, turn)) return false;
    if (threadIdx.x == 0) mark(args.call, kCounted);
    if (block == blocks - 1) {
        for (int i = threadIdx.x; i < kCounts; i += Shape::threads)
            route.header[kHeaderWords + i] = route.before[i] + route.chunk[i];
        __syncthreads();
        tell_counts<Shape::num_ranks, kCounts, Shape::threads>(args.call, turn, route.header);
    }
    find_slots<Shape>(args, route, shared.running, chunk, turn);  // while counts of other ranks are on their way
    int32* places = args.slots + static_cast<int64>(args.num_tokens) * Shape::num_ranks;
    if constexpr (Places<Shape>::kDirect) find_places<Shape>(args, route, shared.running, chunk, places);
    fence_shared_to_bulk();  // the rings take over the memory of the running counts
    __syncthreads();
    if (threadIdx.x == 0) {
        store_release_gpu(slots_found(args) + block, epoch);
        mark(args.call, kPlaced);
    }
    const Opened opened = await_call<Shape::num_ranks, kCounts, Shape::threads>(args.call, turn);
    if (opened != Opened::kGo) {
        if (opened == Opened::kRefused && block == 0) notify_host<Shape>(args);  // which reads the record first
        return false;
    }
    const AllCounts<Shape> counts{headers_of<Shape::num_ranks, kCounts>(args.call, epoch), turn};
    if (threadIdx.x < Shape::num_ranks) {
        shared.data.bases[threadIdx.x] = args.peers[threadIdx.x] + counts.region(threadIdx.x) * args.region_bytes;
        if constexpr (Places<Shape>::kFixed) route.row_base[threadIdx.x] = args.call.rank * args.max_tokens;
    }
    // Rows whose places are fixed leave before counts are here. Where the host waits for these, block 0 publishes them first.
    const bool hosts_wait = args.host_counts != nullptr;
    const bool needs_counts = !Places<Shape>::kFixed || (block == 0 && hosts_wait);
    if (needs_counts && !publish<Shape>(args, route, counts)) return false;
    if (!needs_counts) __syncthreads();
    if (threadIdx.x == 0) mark(args.call, kHeard);
    if constexpr (!Places<Shape>::kFixed) {
        bool all_fit = true;
        for (int r = 0; r < Shape::num_ranks; ++r) all_fit = all_fit && route.needed[r] <= args.capacity;
        if (!all_fit && args.stop_on_overflow) return true;
    }

    bool done = true;  // what this thread's warp had to do
    if constexpr (Places<Shape>::kDirect) {
        done = send_and_fill<Shape>(args, shared, places, turn, chunk, warp, lane);
    } else {
        done = send_rows<Shape>(args, shared, ToRanks<Shape>{args, shared, places, turn}, chunk, epoch, warp, lane);
        if (lane == 0) mark(args.call, kSent);
        if (!__syncthreads_and(done)) return false;
        if (threadIdx.x < Shape::num_ranks && !turn.leaves_out<Shape::num_ranks>(threadIdx.x))
            window_of<Shape::num_ranks>(args.call.peers)
                .signals(threadIdx.x, args.done_flags)
                .from(args.call.rank * Shape::max_blocks)
                .raise(block, epoch);
        if (threadIdx.x == 0) mark(args.call, kNotified);
        if (!needs_counts && block == 0 && !publish<Shape>(args, route, counts)) return false;
        if (Shape::part == kWhole && block == 0) done = wait_for_sources<Shape>(args, turn, blocks);
    }
    if (threadIdx.x == 0) mark(args.call, kDone);
    return done;
}

// The receiving half: the rows that the sending half of this call left on their way.
template <class Shape>
__device__ bool receive_rows(const DispatchArgs& args, Turn turn) {
    const uint32 epoch = turn.epoch;
    extern __shared__ __align__(128) unsigned char memory[];
    static_assert(sizeof(DispatchShared<Shape>) <= Shape::shared_bytes, "launch.py asks for what this needs");
    auto& shared = *reinterpret_cast<DispatchShared<Shape>*>(memory);
    constexpr int kCounts = RouteShared<Shape>::kCounts;
    if (__syncthreads_or(has_expired(deadline_of(args.call)))) return false;
    // The sending half has said what is wrong with the call.
    if (await_call<Shape::num_ranks, kCounts, Shape::threads, false>(args.call, turn) != Opened::kGo) return false;
    if (!await_counts<Shape::num_ranks, kCounts, Shape::threads>(args.call, turn)) return false;
    const AllCounts<Shape> counts{headers_of<Shape::num_ranks, kCounts>(args.call, epoch), turn};
    if (threadIdx.x < Shape::num_ranks) {
        shared.control.bases[threadIdx.x] = args.call.peers[threadIdx.x];
        shared.data.bases[threadIdx.x] = args.peers[threadIdx.x] + counts.region(threadIdx.x) * args.region_bytes;
    }
    find_bases<Shape>(args, shared.route, counts);
    if constexpr (Places<Shape>::kDirect) {
        constexpr int kWarps = Shape::threads / 32;
        const int lane = threadIdx.x % 32;
        clear<Shape>(args, shared, blockIdx.x * kWarps + threadIdx.x / 32, gridDim.x * kWarps, lane);
        const bool done = fill_further_places<Shape>(args, shared, epoch, lane);
        if (lane == 0) mark(args.call, kFilled);
        return done;
    }
    return blockIdx.x != 0 || wait_for_sources<Shape>(args, turn, args.send_blocks);
}

template <class Shape>
__device__ void dispatch(const DispatchArgs& args) {
    wait_for_earlier_kernels();
    const Turn turn = turn_of<Shape::part>(args.call);
    bool done;
    if constexpr (Shape::part == kReceive) done = receive_rows<Shape>(args, turn);
    else done = dispatch_rows<Shape>(args, turn);
    close_call<Shape::num_ranks, Shape::part>(args.call, turn, done, [&] { publish_nothing<Shape>(args); });
}
