// Dispatch between nodes: a staged dispatch whose rows for other nodes pass through one rank there. The
// protocol is docs/explanation/between-nodes.md.
//
//   all blocks      count, and number rows for each rank and each node; the last block announces the call to neighbours,
//                   and packs what goes before the rows of other nodes                     (route.cuh, nodes.cuh)
//   sending warps   take token after token: its row to the ranks of this node, and once for each other node into the
//                   region that is put                                                     (send.cuh, nodes.cuh)
//   block 0         puts the chunks of all nodes when all blocks have packed               (nodes.cuh)
//   all blocks      forward what comes over this rail to neighbours, with the announcement (nodes.cuh)
//   all blocks      receive as in any staged dispatch                                      (dispatch_staged.cuh)
//
// Nobody waits before the last two, and regions take turns, so a rank needs no credit to put. Halves are two kernels:
// what comes before the last two, and these.
#pragma once
#include "kernels/dispatch/dispatch_staged.cuh"
#include "kernels/dispatch/nodes.cuh"

template <class Shape>
struct NetworkShared {
    StagedShared<Shape> staged;
    NodesShared<Shape> nodes;
};

// False, in any thread: the dispatch does not take place, or not all of it.
template <class Shape>
__device__ bool send_to_nodes(const DispatchNetworkArgs& args, NetworkShared<Shape>& memory, Turn turn) {
    constexpr int kCounts = RouteShared<Shape>::kCounts;
    auto& shared = memory.staged.send;
    auto& route = shared.route;
    const Rail& rail = args.rail;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Chunk chunk = chunk_of(args.num_tokens, blockIdx.x);
    const Turn neighbours = near<Shape::node_ranks>(turn, args.call.rank);
    const uint64 packed =
        rail.base + rail.region(rail.put_from, turn.epoch % kTurns, 0);
    if (warp == 0) shared.progress.clear(lane);
    if (warp < shared.kRings) DispatchShared<Shape>::Stream::init(shared.control_of_stream[warp], lane);
    if (threadIdx.x < Shape::num_ranks) route.row_base[threadIdx.x] = args.call.rank * args.max_tokens;
    mbarrier_init_fence();
    if (blockIdx.x == gridDim.x - 1)  // blocks start in order: when it runs, none of this rank lacks an SM
        announce_call<Shape::num_ranks, kCounts, Shape::threads>(args.call, neighbours, route.header);
    if (!count_all_routes<Shape>(args, route, chunk, turn)) return false;
    if (threadIdx.x == 0) mark(args.call, kCounted);
    find_node_rows<Shape>(args, memory.nodes, chunk, turn);
    if (blockIdx.x == gridDim.x - 1) {
        for (int i = threadIdx.x; i < kCounts; i += Shape::threads)
            route.header[kHeaderWords + i] = route.before[i] + route.chunk[i];
        __syncthreads();
        tell_counts<Shape::num_ranks, kCounts, Shape::threads>(args.call, neighbours, route.header);
        pack_headers<Shape>(args, route.header, memory.nodes, packed);
    }
    find_slots<Shape>(args, route, shared.running, chunk, turn);
    int32* places = args.slots + static_cast<int64>(args.num_tokens) * Shape::num_ranks;
    if constexpr (Places<Shape>::kOfRoutes) find_places<Shape>(args, route, shared.running, chunk, places);
    fence_shared_to_bulk();  // the rings take over the memory of the running counts
    __syncthreads();
    if (threadIdx.x == 0) {
        store_release_gpu(slots_found(args) + blockIdx.x, turn.epoch);
        mark(args.call, kPlaced);
    }
    bool done = true;
    if (warp < Shape::send_warps) {
        const ToNodes<Shape> way{args, ToRanks<Shape>{args, shared, places, turn}, packed};
        done = send_rows<Shape>(args, shared, way, chunk, turn.epoch, warp, lane);
        if (lane == 0) mark(args.call, kSent);
    }
    if (!__syncthreads_and(done)) return false;
    if (threadIdx.x == 0) store_release_gpu(rail.blocks + blockIdx.x, turn.epoch);
    raise_done<Shape>(args, shared, neighbours, args.call.rank);
    if (blockIdx.x != 0) return true;
    const bool packed_all = threadIdx.x >= gridDim.x || wait_for_block(rail.blocks + threadIdx.x, turn.epoch,
                                                                       deadline_of(args.call), args.call.rank);
    if (!__syncthreads_and(packed_all)) return false;
    put_chunks<Shape>(args, memory.nodes, turn);
    // Every block has read the signals of calls before, ahead of its flag.
    if (threadIdx.x == 0) {
        transport_of<Shape>(rail).count_call(kDispatches, turn.epoch);
        mark(args.call, kNotified);
    }
    return true;
}

// False as above.
template <class Shape>
__device__ bool receive_from_nodes(const DispatchNetworkArgs& args, NetworkShared<Shape>& memory, Turn turn,
                                   uint64 before) {
    if (!forward_rows<Shape>(args, memory.staged.send, turn, before)) return false;
    // Whoever has a fault receives nothing, and others may take long until they receive, and forward, what is theirs. So
    // it leaves when neighbours and its rail have begun the call.
    if (args.call.status != 0) {
        await_call<Shape::num_ranks, RouteShared<Shape>::kCounts, Shape::threads, false, Shape::node_ranks>(
            args.call, near<Shape::node_ranks>(turn, args.call.rank));
        return false;
    }
    return receive_staged<Shape>(args, memory.staged, turn);
}

template <class Shape>
__device__ bool dispatch_network_rows(const DispatchNetworkArgs& args, Turn turn) {
    extern __shared__ __align__(128) unsigned char memory[];
    static_assert(Shape::num_ranks <= kMostRanksOfNodes, "a lane and a bit of a word for each rank");
    static_assert(Shape::num_ranks % Shape::node_ranks == 0, "nodes are of one size");
    static_assert(Packed<Shape>::kBytes == Shape::record_bytes && Packed<Shape>::kHeaderBytes == Shape::header_bytes,
                  "launch_network.py sizes regions by them");
    static_assert(sizeof(NetworkShared<Shape>) <= Shape::shared_bytes, "launch.py asks for what this needs");
    auto& shared = *reinterpret_cast<NetworkShared<Shape>*>(memory);
    auto& windows = shared.staged.send;
    if (threadIdx.x == 0) mark(args.call, kBegun);
    if (threadIdx.x < Shape::num_ranks) {
        windows.control.bases[threadIdx.x] = args.call.peers[threadIdx.x];
        windows.data.bases[threadIdx.x] = args.peers[threadIdx.x] + turn_offset(args, turn.epoch);
    }
    const uint64 before = transport_of<Shape>(args.rail).template before<Shape::part>(kDispatches, turn.epoch);
    if (__syncthreads_or(has_expired(deadline_of(args.call)))) return false;
    bool done = true;
    if constexpr (Shape::part != kReceive) done = send_to_nodes<Shape>(args, shared, turn);
    if constexpr (Shape::part != kSend) done = done && receive_from_nodes<Shape>(args, shared, turn, before);
    if (threadIdx.x == 0) mark(args.call, kDone);
    return done;
}

template <class Shape>
__device__ void dispatch_network(const DispatchNetworkArgs& args) {
    wait_for_earlier_kernels();
    const Turn turn = turn_of<Shape::part>(args.call);
    const bool done = dispatch_network_rows<Shape>(args, turn);
    close_call<Shape::num_ranks, Shape::part>(args.call, turn, done, [&] {
        if constexpr (Shape::part != kSend) {
            publish_nothing<Shape>(args);
            publish_no_nodes<Shape>(args);
        } else {
            transport_of<Shape>(args.rail).give_up(args.call, Packed<Shape>::kNodes, threadIdx.x);
        }
    });
}
