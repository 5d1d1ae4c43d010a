// What a dispatch between nodes adds: rows are packed, one for each (token, node), and on the other side forwarded.
#pragma once
#include "device/transport/collective.cuh"
#include "device/transport/gin.cuh"
#include "kernels/dispatch/send.cuh"

struct DispatchNetworkArgs : DispatchArgs {
    Rail rail;
    // What the combine needs, N nodes of G ranks:
    int32* node_rows;        // [T][N]: which of this rank's rows for node n the token is, or -1
    int32* forwarded_slots;  // [N][M][G]: of each row that came from node n, its number at each neighbour, or -1
    int32* forwarded_rows;   // [N]: how many came
};

// A record of a packed region: the row, its scales, and what the ranks of the node are told of its routes.
template <class Shape>
struct Packed {
    static constexpr int kNodes = Shape::num_ranks / Shape::node_ranks;
    static constexpr int kScales = Shape::row_bytes;                      // float [scales_per_row]
    static constexpr int kExperts = kScales + 4 * Shape::scales_per_row;  // int32 [K]: -1 where it is on another node
    static constexpr int kWeights = kExperts + 4 * Shape::top_k;          // float [K]
    static constexpr int kNumbers = kWeights + 4 * Shape::top_k;          // int32 [K]: among its source's of the expert
    static constexpr int kSlots = kNumbers + 4 * Shape::top_k;            // int32 [G]: among its source's for each rank
    static constexpr int kToken = kSlots + 4 * Shape::node_ranks;         // int32: at home
    static constexpr int kBytes = (kToken + 4 + 15) / 16 * 16;
    // Before the records lies the header of the call, as ranks of one node tell it each other, and their number.
    static constexpr int kCountWord = header_words<RouteShared<Shape>::kCounts>;
    static constexpr int kHeaderBytes = 4 * kCountWord + 16;

    static __device__ __forceinline__ int node_of(int rank) { return rank / Shape::node_ranks; }
};

template <class Shape>
struct NodesShared {
    int32 in_warp[Shape::threads / 32][Packed<Shape>::kNodes];
    int32 rows[Packed<Shape>::kNodes];  // for each node, of the tokens so far
    alignas(64) unsigned char descriptors[Packed<Shape>::kNodes][kDescriptorBytes];
};

// node_rows of this block's chunk, and in shared memory the rows for each node up to its end. Tokens before it are
// counted again by every block, as many at once as it has threads.
template <class Shape>
__device__ void find_node_rows(const DispatchNetworkArgs& args, NodesShared<Shape>& nodes, Chunk chunk, Turn turn) {
    constexpr int kNodes = Packed<Shape>::kNodes;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x < kNodes) nodes.rows[threadIdx.x] = 0;
    __syncthreads();
    for (int32 first = 0; first < chunk.end; first += Shape::threads) {
        const int32 token = first + threadIdx.x;
        const uint32 ranks = token < chunk.end ? ranks_of<Shape>(args, turn, token) : 0;
        int32 before[kNodes];
        uint32 goes = 0;
#pragma unroll
        for (int n = 0; n < kNodes; ++n) {
            const bool there = (ranks >> (n * Shape::node_ranks) & ((1ull << Shape::node_ranks) - 1)) != 0;
            const uint32 going = __ballot_sync(~0u, there);
            before[n] = __popc(going & ((1u << lane) - 1));
            goes |= static_cast<uint32>(there) << n;
            if (lane == 0) nodes.in_warp[warp][n] = __popc(going);
        }
        __syncthreads();
        if (threadIdx.x < kNodes) {
            int32 row = nodes.rows[threadIdx.x];
            for (int w = 0; w < Shape::threads / 32; ++w) {
                const int32 rows = nodes.in_warp[w][threadIdx.x];
                nodes.in_warp[w][threadIdx.x] = row;
                row += rows;
            }
            nodes.rows[threadIdx.x] = row;
        }
        __syncthreads();
        if (token >= chunk.begin && token < chunk.end) {
#pragma unroll
            for (int n = 0; n < kNodes; ++n)
                args.node_rows[static_cast<int64>(token) * kNodes + n] =
                    (goes >> n & 1) != 0 ? nodes.in_warp[warp][n] + before[n] : -1;
        }
        __syncthreads();
    }
}

// Where the rows of a token go: to the ranks of this node, and once for each other node to where they are put from.
template <class Shape>
struct ToNodes {
    static constexpr Sent kSent = Sent::kAll;
    const DispatchNetworkArgs& args;
    ToRanks<Shape> here;
    uint64 packed;      // where the regions of this turn begin
    uint64 record = 0;  // of the node that this lane is the first with a route to; 0: none

    __device__ __forceinline__ void load(int32 token, int lane) { here.load(token, lane); }

    __device__ __forceinline__ void send_rest(int32 token, int lane) {
        using Rows = Packed<Shape>;
        auto& routes = here.routes;
        routes = routes_of<Shape>(args, here.shared.route, here.loads, here.turn, lane);
        const int own = Rows::node_of(args.call.rank), node = routes.rank >= 0 ? Rows::node_of(routes.rank) : own;
        const uint32 same_node = __match_any_sync(~0u, node);
        const bool is_far = node != own;
        record = 0;
        if (is_far && (same_node & ((1u << lane) - 1)) == 0) {
            const int64 row = args.node_rows[static_cast<int64>(token) * Rows::kNodes + node];
            record = packed + node * args.rail.region_bytes + Rows::kHeaderBytes + row * Rows::kBytes;
        }
        const TokenRoutes all = routes;
        if (is_far) {
            routes.rank = -1;
            routes.is_target = false;
        }
        send_metadata<Shape>(args, here.shared, routes, token, args.topk_weights != nullptr, lane);
        if constexpr (kBringsScales<Shape>) send_scales<Shape>(args, here.shared, routes, here.loads.scales, lane);
        for (uint32 rest = __ballot_sync(~0u, record != 0); rest != 0; rest &= rest - 1)
            pack_metadata(all, of_lane(record, rest), of_lane(node, rest), node, token, lane);
    }

    __device__ __forceinline__ void pack_metadata(const TokenRoutes& routes, uint64 to, int node, int own_node,
                                                  int32 token, int lane) {
        using Rows = Packed<Shape>;
        const auto ints = [&](int offset) { return reinterpret_cast<int32*>(to + offset); };
        if (lane < Shape::top_k) {
            const bool there = routes.rank >= 0 && own_node == node;
            ints(Rows::kExperts)[lane] = there ? routes.expert : -1;
            if (args.topk_weights != nullptr)
                reinterpret_cast<float*>(to + Rows::kWeights)[lane] = there ? routes.weight : 0.0f;
            ints(Rows::kNumbers)[lane] = there ? routes.place : -1;
        }
        if (lane < Shape::node_ranks)
            ints(Rows::kSlots)[lane] =
                args.slots[static_cast<int64>(token) * Shape::num_ranks + node * Shape::node_ranks + lane];
        if (lane == 0) *ints(Rows::kToken) = token;
        if constexpr (kBringsScales<Shape>)
            here.loads.scales.store(reinterpret_cast<float*>(to + Rows::kScales), lane);
    }

    __device__ __forceinline__ bool is_target() const { return record != 0 || here.is_target(); }
    __device__ __forceinline__ int64 row() const { return record != 0 ? static_cast<int64>(record) : here.row(); }
    __device__ __forceinline__ uint64 scales() const {
        return record != 0 ? record + Packed<Shape>::kScales : here.scales();
    }
};

// The last block, which knows the totals: what goes before the rows of each other node.
template <class Shape>
__device__ void pack_headers(const DispatchNetworkArgs& args, const int32* header, const NodesShared<Shape>& nodes,
                             uint64 packed) {
    using Rows = Packed<Shape>;
    for (int i = threadIdx.x; i < Rows::kNodes * Rows::kCountWord; i += Shape::threads)
        reinterpret_cast<int32*>(packed + i / Rows::kCountWord * args.rail.region_bytes)[i % Rows::kCountWord] =
            header[i % Rows::kCountWord];
    if (threadIdx.x < Rows::kNodes)
        reinterpret_cast<int32*>(packed + threadIdx.x * args.rail.region_bytes)[Rows::kCountWord] =
            nodes.rows[threadIdx.x];
}

// Block 0, when all blocks have packed: every chunk to the rank of each other node on this rail. A thread puts the
// chunks of a node, so they and their signals are in order.
template <class Shape>
__device__ void put_chunks(const DispatchNetworkArgs& args, NodesShared<Shape>& nodes, Turn turn) {
    using Rows = Packed<Shape>;
    const Rail& rail = args.rail;
    const int own = Rows::node_of(args.call.rank), node = threadIdx.x;
    if (node >= Rows::kNodes || node == own) return;
    const int part = turn.epoch % kTurns, peer = node * Shape::node_ranks + args.call.rank % Shape::node_ranks;
    const uint64 from = rail.region(rail.put_from, part, node);
    const uint64 to = rail.region(rail.put_to, part, own);
    const int32 rows = reinterpret_cast<const int32*>(rail.base + from)[Rows::kCountWord];
    for (int c = 0; c < rail.chunks; ++c) {
        const int64 first = min(c * rail.chunk_rows, rows), last = min((c + 1) * rail.chunk_rows, rows);
        const uint64 begin = c == 0 ? 0 : Rows::kHeaderBytes + first * Rows::kBytes;
        const uint64 end = Rows::kHeaderBytes + last * Rows::kBytes;
        transport_of<Shape>(rail).put(kDispatches, peer, to + begin, from + begin, end - begin, own,
                                      nodes.descriptors[node]);
    }
}

// Each neighbour hears that this block has stored all rows of a source there.
template <class Shape>
__device__ __forceinline__ void raise_done(const DispatchNetworkArgs& args, const DispatchShared<Shape>& shared,
                                           Turn neighbours, int source) {
    if (threadIdx.x >= Shape::num_ranks || neighbours.leaves_out<Shape::num_ranks>(threadIdx.x)) return;
    const uint64 flags =
        flags_of<Shape::num_ranks, Shape::node_ranks>(args.done_flags, neighbours.epoch, Shape::max_blocks);
    shared.control.signals(threadIdx.x, flags).from(source * Shape::max_blocks).raise(blockIdx.x, neighbours.epoch);
}

// One warp: a row from another node, to the ranks of this one.
template <class Shape>
__device__ void forward_row(const DispatchNetworkArgs& args, const DispatchShared<Shape>& shared, int source,
                            const unsigned char* record, int32* slots_kept, int lane) {
    using Rows = Packed<Shape>;
    const auto ints = [&](int offset) { return reinterpret_cast<const int32*>(record + offset); };
    // Whoever forwards may have no tokens, and so no weights of its own.
    const bool weighted = args.out_weights != nullptr;
    TokenRoutes routes{-1, -1, 0, -1, 0.0f, 0, false};
    if (lane < Shape::top_k) {
        routes.expert = ints(Rows::kExperts)[lane];
        if (weighted) routes.weight = reinterpret_cast<const float*>(record + Rows::kWeights)[lane];
        if (routes.expert >= 0) {
            routes.rank = routes.expert / Shape::experts_per_rank;
            routes.place = ints(Rows::kNumbers)[lane];
            routes.row = source * args.max_tokens + ints(Rows::kSlots)[routes.rank % Shape::node_ranks];
        }
    }
    routes.same_rank = __match_any_sync(~0u, routes.rank);
    routes.is_target = routes.rank >= 0 && (routes.same_rank & ((1u << lane) - 1)) == 0;
    if (lane < Shape::node_ranks) slots_kept[lane] = ints(Rows::kSlots)[lane];
    send_metadata<Shape>(args, shared, routes, *ints(Rows::kToken), weighted, lane);
    if constexpr (Shape::scales_per_row > 0) {
        RowScales<Shape> scales;
        scales.load(reinterpret_cast<const float*>(record + Rows::kScales), lane);
        send_scales<Shape>(args, shared, routes, scales, lane);
    }
    const uint64 to = routes.is_target ? shared.data.staging_address(routes.rank, args.rows) +
                                             static_cast<int64>(routes.row) * Shape::row_bytes
                                       : 0;
    copy_row<Shape::row_bytes, 8>(record, to, __ballot_sync(~0u, routes.is_target), lane);
}

// One warp: what a dispatch that did not take place leaves for combines, beside publish_nothing. No rows.
template <class Shape>
__device__ void publish_no_nodes(const DispatchNetworkArgs& args) {
    constexpr int kNodes = Packed<Shape>::kNodes;
    for (int64 i = threadIdx.x; i < static_cast<int64>(args.num_tokens) * kNodes; i += 32) args.node_rows[i] = -1;
    if (threadIdx.x < kNodes) args.forwarded_rows[threadIdx.x] = 0;
}

// All blocks: what comes from the ranks of other nodes on this rail goes to the ranks of this one, chunk by chunk. They
// hear of a source as if it had written itself. `before`: signals of calls before. False: a wait has expired.
template <class Shape>
__device__ bool forward_rows(const DispatchNetworkArgs& args, const DispatchShared<Shape>& shared, Turn turn,
                             uint64 before) {
    using Rows = Packed<Shape>;
    const Rail& rail = args.rail;
    const auto network = transport_of<Shape>(rail);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int own = Rows::node_of(args.call.rank);
    const Turn neighbours = near<Shape::node_ranks>(turn, args.call.rank);
    for (int step = 1; step < Rows::kNodes; ++step) {
        const int node = (own + step) % Rows::kNodes;
        const int source = node * Shape::node_ranks + args.call.rank % Shape::node_ranks;
        const auto* region = reinterpret_cast<const unsigned char*>(
            rail.base + rail.region(rail.put_to, turn.epoch % kTurns, node));
        const auto* header = reinterpret_cast<const int32*>(region);
        int32* slots = args.forwarded_slots + static_cast<int64>(node) * args.max_tokens * Shape::node_ranks;
        for (int c = 0; c < rail.chunks; ++c) {
            // Nobody else says that a rank of another node has begun the call.
            const Deadline deadline = c == 0 ? opening_deadline_of(args.call) : deadline_of(args.call);
            const bool here = threadIdx.x != 0 || network.wait(kDispatches, node, before + c + 1, deadline, source,
                                                               kPhaseForward, turn.epoch);
            if (!__syncthreads_and(here)) return false;
            // Rows of another call may lie anywhere, with anything in the places of ids. It will be refused.
            const bool same = header[kHashWord] == static_cast<int32>(args.call.options_hash) &&
                              header[kHashWord + 1] == static_cast<int32>(args.call.options_hash >> 32);
            const int32 rows = same ? header[Rows::kCountWord] : 0, end = min((c + 1) * rail.chunk_rows, rows);
            if (c == 0 && blockIdx.x == 0) {
                if (threadIdx.x == 0) args.forwarded_rows[node] = rows;
                constexpr int kCounts = RouteShared<Shape>::kCounts;
                tell_ranks<Shape::num_ranks, kCounts, Shape::threads, 0, kHeaderWords + kCounts>(args.call, neighbours,
                                                                                                source, header);
            }
            for (int32 row = c * rail.chunk_rows + warp * gridDim.x + blockIdx.x; row < end;
                 row += gridDim.x * (Shape::threads / 32))
                forward_row<Shape>(args, shared, source,
                                   region + Rows::kHeaderBytes + static_cast<int64>(row) * Rows::kBytes,
                                   slots + static_cast<int64>(row) * Shape::node_ranks, lane);
        }
        __syncthreads();
        // A release of the system: the put that brought these rows released for the network alone.
        raise_done<Shape>(args, shared, neighbours, source);
    }
    return true;
}
