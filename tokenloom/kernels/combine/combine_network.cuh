// Combine between nodes in the order of mode per_node. The protocol is docs/explanation/between-nodes.md.
//
//   all blocks      the last one announces the call to neighbours; all push partial sums, of whichever home, to the rank
//                   of this node on the home's rail, as eager calls do, and say so to all neighbours       (push.cuh)
//   all blocks      wait for all neighbours, then add for the homes on this rail: a row for each (token, node)
//   block 0         puts the rows of all nodes when all blocks have added
//
//   all blocks      wait for the rows of all nodes, then add what has come home
//   last block out  advances the epoch; if the call was refused or a wait has expired, it makes all results NaN
//
// A rank hears from its neighbours and its rail alone. So what is wrong with a call goes along with the rows: then
// there are none, but the chunks are put, so that nobody waits in vain.
//
// Halves are two kernels: the upper part, and the lower. The first waits for neighbours, so that the network carries rows
// between them.
#pragma once
#include "device/transport/collective.cuh"
#include "device/transport/gin.cuh"
#include "kernels/combine/push.cuh"

struct CombineNetworkArgs : CombineArgs {
    Rail rail;
    uint64 partials_bytes;         // from what comes for the home on one node to the next, in the data buffer
    const int32* node_rows;        // as a dispatch between nodes has left them
    const int32* forwarded_slots;
    const int32* forwarded_rows;
};

// Before the rows of a node.
struct NodeHeader {
    int32 status;          // 0, what a rank there says is wrong, or kDiffers
    int32 faulty_rank;     // 1 + the lowest rank that says so, or means another call than others there
    uint32 hash[2];        // of the options, the same on all ranks
};
constexpr int32 kDiffers = 3;  // behind the statuses of outcomes.py: ranks of a node mean different calls
constexpr int kNodeHeaderBytes = sizeof(NodeHeader);
static_assert(kNodeHeaderBytes == 16, "launch_network.py sizes regions by it, and rows begin at whole units");

template <class Shape>
struct SumsOfNodes {
    static constexpr int kNodes = Shape::num_ranks / Shape::node_ranks;
    using Rows = CombineRows<Shape>;
    using NodeSum = RowSum<Shape::wire_dtype, Shape::wire_dtype, Shape::hidden, Shape::group, Shape::sum_terms,
                           Rows::kMostTerms, Shape::sum_registers>;
    using HomeSum = RowSum<Shape::wire_dtype, Shape::out_dtype, Shape::hidden, Shape::group, Shape::sum_terms,
                           Rows::kMostTerms, Shape::sum_registers>;
};

template <class Shape>
struct CombineNetworkShared {
    CombineShared<Shape> combine;
    int32 first_slot[SumsOfNodes<Shape>::kNodes][Shape::node_ranks];  // where a neighbour's rows begin, by home's node
    NodeHeader header;
    alignas(64) unsigned char descriptors[SumsOfNodes<Shape>::kNodes][kDescriptorBytes];
};

// As find_bases, where the partial sums of a node meet on the rank with the rail of their home.
template <class Shape>
__device__ void find_node_bases(const CombineNetworkArgs& args, CombineNetworkShared<Shape>& memory, Turn turn) {
    constexpr int kCounts = Shape::num_ranks + Shape::num_experts;
    auto& shared = memory.combine;
    const int rank = args.call.rank, rail = rank % Shape::node_ranks, first = rank - rail;
    if (threadIdx.x == 0) shared.combine_recv = args.combine_recv + (turn.epoch & (args.combine_turns - 1)) * args.turn_bytes;
    if (threadIdx.x < Shape::num_ranks) {
        const int i = threadIdx.x;
        int32 received = 0, home = 0;
        for (int r = 0; r < Shape::num_ranks; ++r) {
            if (r < i) received += args.all_counts[r * kCounts + rank];
            if (r >= first && r < rank) home += args.all_counts[i * kCounts + r];
        }
        shared.control.bases[i] = args.call.peers[i];
        shared.data.bases[i] =
            args.peers[first + i % Shape::node_ranks] + i / Shape::node_ranks * args.partials_bytes;
        shared.received_base[i] = received;
        shared.received[i] = args.all_counts[i * kCounts + rank];
        shared.home_base[i] = home;
    }
    for (int i = threadIdx.x; i < Shape::num_ranks; i += Shape::threads) {
        const int node = i / Shape::node_ranks, neighbour = i % Shape::node_ranks;
        const int32* counts = args.all_counts + (node * Shape::node_ranks + rail) * kCounts + first;
        int32 slot = 0;
        for (int r = 0; r < neighbour; ++r) slot += counts[r];
        memory.first_slot[node][neighbour] = slot;
    }
    __syncthreads();
}

// All warps: the sums of this node's ranks, for the rank of each node on this rail, to where they are put from. Those
// for this rank stay there.
template <class Shape>
__device__ void sum_for_nodes(const CombineNetworkArgs& args, const CombineNetworkShared<Shape>& memory, int turn,
                              int warp, int lane) {
    using Sums = SumsOfNodes<Shape>;
    const auto& shared = memory.combine;
    const int rank = args.call.rank, own = rank / Shape::node_ranks, first = own * Shape::node_ranks;
    for (int step = 1; step <= Sums::kNodes; ++step) {  // what travels comes first
        const int node = (own + step) % Sums::kNodes;
        const uint64 partials = args.peers[rank] + node * args.partials_bytes + shared.combine_recv;
        const uint64 sums =
            args.rail.base + args.rail.region(args.rail.put_from, turn, node) + kNodeHeaderBytes;
        const int32 items = node == own ? args.num_tokens : args.forwarded_rows[node];
        for (int32 item = warp * gridDim.x + blockIdx.x; item < items; item += gridDim.x * (Shape::threads / 32)) {
            int32 row = item, slot = -1;
            if (node == own) row = args.node_rows[static_cast<int64>(item) * Sums::kNodes + own];
            if (row < 0) continue;
            if (lane < Shape::node_ranks) {
                slot = node == own
                           ? args.slots[static_cast<int64>(item) * Shape::num_ranks + first + lane]
                           : args.forwarded_slots[(static_cast<int64>(node) * args.max_tokens + row) * Shape::node_ranks +
                                                  lane];
            }
            const int64 place = slot < 0 ? 0 : memory.first_slot[node][lane] + slot;
            Sums::NodeSum::add(
                reinterpret_cast<unsigned char*>(sums + static_cast<int64>(row) * Sums::Rows::kWireBytes),
                partials + place * Sums::Rows::kWireBytes, __ballot_sync(~0u, slot >= 0), 0, 1, lane);
        }
    }
}

// Block 0: rows for each other node, or what is wrong.
template <class Shape>
__device__ void put_sums(const CombineNetworkArgs& args, CombineNetworkShared<Shape>& memory, int turn) {
    constexpr int kNodes = SumsOfNodes<Shape>::kNodes;
    constexpr int64 kRowBytes = CombineRows<Shape>::kWireBytes;
    const Rail& rail = args.rail;
    const int own = args.call.rank / Shape::node_ranks, node = threadIdx.x;
    if (node >= kNodes || node == own) return;
    const int peer = node * Shape::node_ranks + args.call.rank % Shape::node_ranks;
    const uint64 from = rail.region(rail.put_from, turn, node), to = rail.region(rail.put_to, turn, own);
    *reinterpret_cast<NodeHeader*>(rail.base + from) = memory.header;
    const int32 rows = memory.header.status == 0 ? args.forwarded_rows[node] : 0;
    for (int c = 0; c < rail.chunks; ++c) {
        const int64 first = min(c * rail.chunk_rows, rows), last = min((c + 1) * rail.chunk_rows, rows);
        const uint64 begin = c == 0 ? 0 : kNodeHeaderBytes + first * kRowBytes;
        transport_of<Shape>(rail).put(kCombines, peer, to + begin, from + begin,
                                      kNodeHeaderBytes + last * kRowBytes - begin, own, memory.descriptors[node]);
    }
}

// Thread n: the rows of node n are here, and it says that nothing is wrong there. Block 0 records what is, unless this
// node has refused the call.
template <class Shape>
__device__ bool await_home(const CombineNetworkArgs& args, Opened opened, int turn, uint64 before, uint32 epoch) {
    constexpr int kNodes = SumsOfNodes<Shape>::kNodes;
    const Rail& rail = args.rail;
    const int own = args.call.rank / Shape::node_ranks, node = threadIdx.x;
    bool here = true, same = true;
    int32 status = 0, rank = 0;  // what is wrong there, and 1 + who says so
    if (node < kNodes && node != own) {
        const int peer = node * Shape::node_ranks + args.call.rank % Shape::node_ranks;
        // Nobody else says that a rank of another node has begun the call.
        here = transport_of<Shape>(rail).wait(kCombines, node, before + rail.chunks, opening_deadline_of(args.call),
                                              peer, kPhaseHome, epoch);
        if (here) {
            const auto& header =
                *reinterpret_cast<const NodeHeader*>(rail.base + rail.region(rail.put_to, turn, node));
            status = header.status;
            same = header.hash[0] == static_cast<uint32>(args.call.options_hash) &&
                   header.hash[1] == static_cast<uint32>(args.call.options_hash >> 32);
            rank = status != 0 ? header.faulty_rank : peer + 1;
        }
    }
    if (blockIdx.x == 0 && threadIdx.x < 32 && opened == Opened::kGo) {
        const uint32 own_fault = __ballot_sync(~0u, status == kOwnFault);
        const uint32 faulty = own_fault != 0 ? own_fault : __ballot_sync(~0u, status != 0 && status != kDiffers);
        const uint32 differing = __ballot_sync(~0u, !same || status == kDiffers);
        if (faulty != 0 && threadIdx.x == __ffs(faulty) - 1) {
            args.call.record->status = status;
            store_release_sys(&args.call.record->faulty_rank, rank);
        }
        if (differing != 0 && threadIdx.x == __ffs(differing) - 1)
            store_release_sys(&args.call.record->differing_rank, rank);
    }
    return __syncthreads_and(here && same && status == 0) && opened == Opened::kGo;
}

// All warps: what has come home, and what was added here.
template <class Shape>
__device__ void sum_home(const CombineNetworkArgs& args, int turn, int warp, int lane) {
    using Sums = SumsOfNodes<Shape>;
    using Rows = typename Sums::Rows;
    const Rail& rail = args.rail;
    const int own = args.call.rank / Shape::node_ranks;
    auto* out = static_cast<unsigned char*>(args.out);
    uint64 rows = rail.base + kNodeHeaderBytes;
    if (lane < Sums::kNodes) rows += rail.region(lane == own ? rail.put_from : rail.put_to, turn, lane);
    const int32 num_warps = gridDim.x * (Shape::threads / 32);
    const int32 parts = Sums::HomeSum::Row::parts(max(args.num_tokens, 1), num_warps);
    for (int32 item = warp * gridDim.x + blockIdx.x; item < args.num_tokens * parts; item += num_warps) {
        const int64 token = item / parts;
        const int32 row = lane < Sums::kNodes ? args.node_rows[token * Sums::kNodes + lane] : -1;
        Sums::HomeSum::add(out + token * Rows::kOutBytes, rows + static_cast<int64>(max(row, 0)) * Rows::kWireBytes,
                       __ballot_sync(~0u, row >= 0), item % parts, parts, lane);
    }
}

// Thread 0 of a block: what is wrong with a call that neighbours have refused. Who has a fault of its own comes before
// who only follows one, and that before who means another call.
template <class Shape>
__device__ void find_fault(const CombineNetworkArgs& args, NodeHeader& found, uint32 epoch) {
    constexpr int kCounts = Shape::num_ranks + Shape::num_experts;
    const StampedWord* headers = headers_of<Shape::num_ranks, kCounts>(args.call, epoch);
    const int first = args.call.rank / Shape::node_ranks * Shape::node_ranks;
    found.status = kDiffers;
    found.faulty_rank = args.call.rank + 1;
    for (int r = first + Shape::node_ranks - 1; r >= first; --r) {
        const StampedWord *header = headers + r * header_words<kCounts>, *base = headers + first * header_words<kCounts>;
        const bool differs = header[kHashWord].value != base[kHashWord].value ||
                             header[kHashWord + 1].value != base[kHashWord + 1].value;
        const int32 status = header->value != 0 ? header->value : differs ? kDiffers : 0, before = found.status;
        const bool tells_more = before == kDiffers || status == kOwnFault;
        if (status != 0 && (tells_more || (status != kDiffers && before != kOwnFault))) {
            found.status = status;
            found.faulty_rank = r + 1;
        }
    }
}

// Neighbours have begun the call, and mean the same. Who sends and receives records what is wrong once.
template <class Shape, bool kRecords>
__device__ __forceinline__ Opened await_neighbours(const CombineNetworkArgs& args, Turn neighbours) {
    const Opened opened = await_call<Shape::num_ranks, Shape::num_ranks + Shape::num_experts, Shape::threads, kRecords,
                                     Shape::node_ranks>(args.call, neighbours);
    if (threadIdx.x == 0) mark(args.call, kHeard);
    return opened;
}

// Up to the puts. A call that was refused has them too.
template <class Shape>
__device__ Opened send_sums(const CombineNetworkArgs& args, CombineNetworkShared<Shape>& memory, Turn turn,
                            Turn neighbours) {
    constexpr int kCounts = Shape::num_ranks + Shape::num_experts;
    auto& shared = memory.combine;
    const Rail& rail = args.rail;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = turn.epoch & (args.combine_turns - 1);
    if (blockIdx.x == gridDim.x - 1)  // blocks start in order: when it runs, none of this rank lacks an SM
        announce_call<Shape::num_ranks, kCounts, Shape::threads>(args.call, neighbours, shared.header);
    if (warp == 0) shared.progress.clear(lane);
    find_node_bases<Shape>(args, memory, turn);
    push_eagerly<Shape>(args, shared, neighbours, warp, lane);
    const Opened opened = await_neighbours<Shape, Shape::part == kWhole>(args, neighbours);
    if (opened == Opened::kExpired) return opened;
    if (opened == Opened::kGo) {
        const PeerSignals flags = shared.control.signals(args.call.rank, args.chunk_flags);
        if (!wait_for_blocks<Shape::num_ranks, Shape::threads>(args.call, flags, args.max_chunks, args.send_blocks,
                                                               neighbours, kPhasePartials))
            return Opened::kExpired;
        sum_for_nodes<Shape>(args, memory, part, warp, lane);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        store_release_gpu(rail.blocks + blockIdx.x, turn.epoch);
        memory.header = {0, 0, {static_cast<uint32>(args.call.options_hash),
                                static_cast<uint32>(args.call.options_hash >> 32)}};
        if (opened == Opened::kRefused) find_fault<Shape>(args, memory.header, turn.epoch);
    }
    const bool summed = threadIdx.x >= gridDim.x || wait_for_block(rail.blocks + threadIdx.x, turn.epoch,
                                                                   deadline_of(args.call), args.call.rank);
    if (!__syncthreads_and(summed)) return Opened::kExpired;
    if (blockIdx.x == 0) {
        put_sums<Shape>(args, memory, part);
        // Every block has read the signals of calls before, ahead of its flag.
        if (threadIdx.x == 0) {
            transport_of<Shape>(rail).count_call(kCombines, turn.epoch);
            mark(args.call, kNotified);
        }
    }
    return opened;
}

// All that a block does before it leaves. False, in any thread: the combine does not take place, or not all of it.
template <class Shape>
__device__ bool combine_network_rows(const CombineNetworkArgs& args, Turn turn) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    using Rows = CombineRows<Shape>;
    static_assert(Shape::num_ranks <= kMostRanksOfNodes, "a lane and a bit of a word for each rank");
    static_assert(Shape::eager != 0 && Shape::per_route == 0, "small calls, of sums");
    static_assert(Shape::num_ranks % Shape::node_ranks == 0, "nodes are of one size");
    static_assert(!Rows::kWeightsFromHome, "homes reach only ranks of their node");
    static_assert(sizeof(CombineNetworkShared<Shape>) <= Shape::shared_bytes, "launch.py asks for what this needs");
    auto& memory = *reinterpret_cast<CombineNetworkShared<Shape>*>(shared_memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = turn.epoch & (args.combine_turns - 1);
    const Turn neighbours = near<Shape::node_ranks>(turn, args.call.rank);
    const uint64 before = transport_of<Shape>(args.rail).template before<Shape::part>(kCombines, turn.epoch);
    if (threadIdx.x == 0) mark(args.call, kBegun);
    if (__syncthreads_or(has_expired(deadline_of(args.call)))) return false;
    Opened opened;
    if constexpr (Shape::part == kReceive) opened = await_neighbours<Shape, true>(args, neighbours);
    else opened = send_sums<Shape>(args, memory, turn, neighbours);
    if (opened == Opened::kExpired) return false;
    if constexpr (Shape::part != kSend) {
        // Refused or not: without these words the next calls could write to regions that other nodes still read.
        if (!await_home<Shape>(args, opened, part, before, turn.epoch)) return false;
        sum_home<Shape>(args, part, warp, lane);
    }
    if (threadIdx.x == 0) mark(args.call, kDone);
    return true;
}

template <class Shape>
__device__ void combine_network(const CombineNetworkArgs& args) {
    constexpr int64 kRowBytes = CombineRows<Shape>::kOutBytes;
    wait_for_earlier_kernels();
    const Turn turn = turn_of<Shape::part>(args.call);
    const bool done = combine_network_rows<Shape>(args, turn);
    close_call<Shape::num_ranks, Shape::part>(args.call, turn, done, [&] {
        if constexpr (Shape::part != kSend) {
            auto* out = static_cast<unsigned char*>(args.out);
            for (int64 token = 0; token < args.num_tokens; ++token)
                fill_row<kRowBytes>(out + token * kRowBytes, kNanWord<Shape::out_dtype>, threadIdx.x);
        } else {
            transport_of<Shape>(args.rail).give_up(args.call, SumsOfNodes<Shape>::kNodes, threadIdx.x);
        }
    });
}
