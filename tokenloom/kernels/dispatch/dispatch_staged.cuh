// Staged dispatch: every row goes to a region of its source on the ranks that hold its experts, and from there, on that
// rank, to its places. No count has to be known before rows leave.
//
//   last block      tells all ranks that this one has begun the call, and then its counts         (transport/call.cuh)
//   all blocks      count the routes of their chunk, and find which of its rows, and of its routes, each one is
//                                                                                      (count_routes.cuh, route.cuh)
//   sending blocks  take the tokens of their chunk: store their rows, or quantise them, at each rank, with ids, weights,
//                   scales, and their numbers among the routes of each expert from here. Regions take turns by four, so
//                   nobody waits                                                                       (arriving.cuh)
//   all blocks      wait until all ranks have begun, and for all counts
//   block 0         writes down the counts of this rank's output                                         (results.cuh)
//   other blocks    copy every row to the places of its routes, as its words come                       (arriving.cuh)
//   last block out  advances the epoch; if the call was refused or a wait has expired, it makes the results say so
//
// For layouts of routes: a row is copied to several places anyhow. Halves are two kernels: the upper part, and the lower.
// Between nodes, rows wait for flags (dispatch_network.cuh, spread.cuh).
#pragma once
#include "kernels/dispatch/arriving.cuh"
#include "kernels/dispatch/padding.cuh"

template <class Shape>
struct StagedShared {
    DispatchShared<Shape> send;
    SpreadShared<Shape> spread;
};

__device__ __forceinline__ uint64 turn_offset(const DispatchArgs& args, uint32 epoch) {
    return epoch % kTurns * args.turn_bytes;
}

// False, in any thread: the dispatch does not take place, or not all of it.
template <class Shape>
__device__ bool send_staged(const DispatchArgs& args, DispatchShared<Shape>& shared, Turn turn) {
    constexpr int kCounts = RouteShared<Shape>::kCounts;
    auto& route = shared.route;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32 send_blocks = StagedRoles<Shape>::send_blocks(args);
    const Chunk chunk = chunk_of(args.num_tokens, blockIdx.x, send_blocks);
    if (threadIdx.x < Shape::num_ranks) {
        shared.data.bases[threadIdx.x] = args.peers[threadIdx.x] + turn_offset(args, turn.epoch);
        route.row_base[threadIdx.x] = args.call.rank * args.max_tokens;
    }
    if (blockIdx.x == gridDim.x - 1)  // blocks start in order: when it runs, none of this rank lacks an SM
        announce_call<Shape::num_ranks, kCounts, Shape::threads>(args.call, turn, route.header);
    if (!count_all_routes<Shape>(args, route, chunk, turn)) return false;
    if (threadIdx.x == 0) mark(args.call, kCounted);
    if (blockIdx.x == gridDim.x - 1) {
        for (int i = threadIdx.x; i < kCounts; i += Shape::threads)
            route.header[kHeaderWords + i] = route.before[i] + route.chunk[i];
        __syncthreads();
        tell_counts<Shape::num_ranks, kCounts, Shape::threads>(args.call, turn, route.header);
    }
    find_slots<Shape>(args, route, shared.running, chunk, turn);
    int32* places = args.slots + static_cast<int64>(args.num_tokens) * Shape::num_ranks;
    find_places<Shape>(args, route, shared.running, chunk, places);
    __syncthreads();
    if (threadIdx.x == 0) mark(args.call, kPlaced);
    if (blockIdx.x < send_blocks) send_arriving_rows<Shape>(args, shared, places, chunk, turn, warp, lane);
    if (lane == 0) mark(args.call, kSent);
    return true;
}

// False as above.
template <class Shape>
__device__ bool receive_staged(const DispatchArgs& args, StagedShared<Shape>& shared, Turn turn) {
    const uint32 epoch = turn.epoch;
    constexpr int kCounts = RouteShared<Shape>::kCounts;
    auto& route = shared.send.route;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (await_call<Shape::num_ranks, kCounts, Shape::threads, true, Shape::node_ranks>(args.call, turn) != Opened::kGo) return false;
    if (threadIdx.x == 0) mark(args.call, kHeard);
    if (!await_counts<Shape::num_ranks, kCounts, Shape::threads, Shape::node_ranks>(args.call, turn)) return false;
    const AllCounts<Shape> counts{headers_of<Shape::num_ranks, kCounts>(args.call, epoch), turn};
    find_bases<Shape>(args, route, counts);
    find_source_bases<Shape>(args, shared.spread, counts);
    if (blockIdx.x == 0) publish_counts<Shape>(args, route, counts);
    if constexpr (Shape::layout == kLayoutExpert)
        clear_padding<Shape>(args, route, static_cast<unsigned char*>(args.out_rows),
                             static_cast<float*>(args.out_scales), blockIdx.x * (Shape::threads / 32) + warp,
                             gridDim.x * (Shape::threads / 32), lane);
    const uint64 staging = args.peers[args.call.rank] + turn_offset(args, epoch);
    if constexpr (Places<Shape>::kArrives) {
        if (!spread_arriving_rows<Shape>(args, route, shared.spread, staging, epoch, warp, lane)) return false;
        if (lane == 0) mark(args.call, kFilled);
        return true;
    }
    if (!wait_for_sources<Shape>(args, turn, args.send_blocks)) return false;
    if constexpr (Places<Shape>::kOfRoutes) spread_rows<Shape>(args, route, shared.spread, staging, warp, lane);
    else spread_places<Shape>(args, route, staging, warp, lane);
    if (lane == 0) mark(args.call, kFilled);
    return true;
}

template <class Shape>
__device__ bool dispatch_staged_rows(const DispatchArgs& args, Turn turn) {
    extern __shared__ __align__(128) unsigned char memory[];
    static_assert(Places<Shape>::kOfRoutes, "rows that are tokens go straight to their places");
    static_assert(sizeof(StagedShared<Shape>) <= Shape::shared_bytes, "launch.py asks for what this needs");
    auto& shared = *reinterpret_cast<StagedShared<Shape>*>(memory);
    if (threadIdx.x == 0) mark(args.call, kBegun);
    if (__syncthreads_or(has_expired(deadline_of(args.call)))) return false;
    bool done = true;
    if constexpr (Shape::part != kReceive) done = send_staged<Shape>(args, shared.send, turn);
    if constexpr (Shape::part != kSend) done = done && receive_staged<Shape>(args, shared, turn);
    if (threadIdx.x == 0) mark(args.call, kDone);
    return done;
}

template <class Shape>
__device__ void dispatch_staged(const DispatchArgs& args) {
    wait_for_earlier_kernels();
    const Turn turn = turn_of<Shape::part>(args.call);
    const bool done = dispatch_staged_rows<Shape>(args, turn);
    close_call<Shape::num_ranks, Shape::part>(args.call, turn, done, [&] {
        if constexpr (Shape::part != kSend) publish_nothing<Shape>(args);
    });
}
