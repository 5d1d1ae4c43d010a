// Combine: rows go home as partial sums, one per (token, rank), and are added there in ascending rank. Or, per route:
// every weighted row goes home by itself, and they are added there in ascending k.
//
//   all blocks      wait until all ranks have begun this combine, so that their buffers are free
//   pushing warps   write chunks of rows into their home ranks' buffers
//   telling warp    raises the flags of chunks that are there
//   summing warps   take this rank's tokens in order, wait for the chunks that hold their rows, add them
//   last block out  advances the epoch
//
// A chunk is a few consecutive rows of one (expert rank, home rank) pair, so home starts long before the last row is
// sent. Every block has warps of both roles: while some wait, the others have the SM. README.md has the protocol.
#pragma once
#include "device/pipe/row_stream.cuh"
#include "device/sync/call.cuh"
#include "device/sync/progress.cuh"
#include "device/tile/rows.cuh"

struct CombineArgs {
    Call call;
    const void* y;             // rows in the dispatch's layout
    const int32* row_places;   // [R][K] place of each route of a received row (layout expert)
    const float* row_weights;  // [R][K], or null: unweighted (layout expert)
    const int32* row_tokens;   // [R] the token at home that a received row is (layout expert)
    const int32* slots;        // [T][W], from the dispatch: which of the rows that went to rank r, or -1
    const int32* all_counts;   // [W][W + E], from the dispatch
    const void* topk_ids;      // [T][K] as given to the dispatch (per route)
    void* out;                 // [T] rows of Shape::out_dtype
    uint64 chunk_flags;        // in the control buffer: uint32 [W][Shape::max_chunks]: this chunk of rank r is here
    const uint64* peers;       // the data buffers
    uint64 home;               // rows of Shape::wire_dtype: per rank [M * min(W, K)], sorted by expert rank, then token;
                               // per route [M * K], by token and k
    int32 num_tokens;
    int32 max_tokens;  // M
    int32 capacity;    // rows of y; what lies beyond was dropped
    int32 ids_are_int64;
};

// Rows of a chunk are a power of two, and few where few rows come, so that many warps share them. launch.py mirrors it.
template <class Shape>
__device__ __forceinline__ int chunk_shift(int32 num_rows) {
    return num_rows < 128 ? 0 : min(25 - __clz(num_rows), Shape::most_chunk_shift);
}

template <class Shape>
struct CombineRows {
    static constexpr bool kByExpert = Shape::layout == kLayoutExpert;
    static constexpr bool kCopies = !kByExpert && Shape::y_dtype == Shape::wire_dtype;
    static constexpr int kYBytes = Shape::hidden * kValueBytes<Shape::y_dtype>;
    static constexpr int kWireBytes = Shape::hidden * kValueBytes<Shape::wire_dtype>;
    static constexpr int kOutBytes = Shape::hidden * kValueBytes<Shape::out_dtype>;
    using Push = RowSum<Shape::y_dtype, Shape::wire_dtype, Shape::hidden, Shape::group, Shape::push_terms, kByExpert>;
    using Home = RowSum<Shape::wire_dtype, Shape::out_dtype, Shape::hidden, Shape::group, Shape::home_terms, false>;
    // All bits but the sign set is NaN in every dtype.
    static constexpr uint32 kNan = Shape::wire_dtype == kFloat32 ? 0x7fffffffu : 0x7fff7fffu;
};

template <class Shape>
struct CombineShared {
    using Copy = RowStream<CombineRows<Shape>::kWireBytes, Shape::stage_bytes, Shape::stages>;
    static constexpr int kRings = CombineRows<Shape>::kCopies ? Shape::push_warps : 1;
    typename Copy::Shared ring[kRings];
    typename Copy::Control control_of_stream[kRings];
    uint64 control[Shape::num_ranks];  // addresses of all ranks' buffers, as in the args: here they are read fast
    uint64 data[Shape::num_ranks];
    alignas(16) int32 row[kHeaderWords];
    Progress<Shape::push_warps> progress;
    int32 received_base[Shape::num_ranks];  // first received row that came from rank s
    int32 received[Shape::num_ranks];       // how many did
    int32 home_base[Shape::num_ranks];      // where this rank's rows begin in the buffer of home rank s
    int32 own_base[Shape::num_ranks];       // where rank r's rows begin in this rank's buffer
    int32 own[Shape::num_ranks];            // how many there are
};

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

// The routes of one received row: lane k has the k-th. Rows that were not dispatched by expert have one, in lane 0.
struct RowRoutes {
    int64 place;  // -1: no route
    float weight;
    int32 token;
};

template <class Shape>
__device__ __forceinline__ RowRoutes routes_of(const CombineArgs& args, int64 row, int lane) {
    RowRoutes routes{-1, 1.0f, 0};
    if constexpr (CombineRows<Shape>::kByExpert) {
        if (lane < Shape::top_k) {
            routes.place = args.row_places[row * Shape::top_k + lane];
            if (args.row_weights != nullptr) routes.weight = args.row_weights[row * Shape::top_k + lane];
        }
        if constexpr (Shape::per_route != 0) routes.token = args.row_tokens[row];
    } else if (lane == 0) {
        routes.place = row;
    }
    return routes;
}

// One received row, home: its sum to `to`, or (per route) its routes to where those of its token lie in `home`. Rows
// that the dispatch dropped come home as NaN.
template <class Shape>
__device__ __forceinline__ void push_row(const CombineArgs& args, const RowRoutes& routes, unsigned char* home,
                                         unsigned char* to, int lane) {
    using Rows = CombineRows<Shape>;
    const uint64 term = reinterpret_cast<uint64>(args.y) + routes.place * Rows::kYBytes;
    const uint32 kept = __ballot_sync(~0u, routes.place >= 0 && routes.place < args.capacity);
    const uint32 dropped = __ballot_sync(~0u, routes.place >= args.capacity);
    if constexpr (Shape::per_route != 0) {
        const uint64 target = reinterpret_cast<uint64>(home) +
                              (static_cast<int64>(routes.token) * Shape::top_k + lane) * Rows::kWireBytes;
        Rows::Push::scale(target, term, routes.weight, kept, lane);
        for (uint32 rest = dropped; rest != 0; rest &= rest - 1)
            fill_row<Rows::kWireBytes>(reinterpret_cast<unsigned char*>(of_lane(target, rest)), Rows::kNan, lane);
    } else if (dropped != 0) {
        fill_row<Rows::kWireBytes>(to, Rows::kNan, lane);
    } else {
        Rows::Push::add(to, term, routes.weight, kept, 0, 1, lane);
    }
}

// Consecutive rows of this rank for one home rank.
struct PushChunk {
    int32 home;
    int32 index;     // among those for this home rank
    int64 row;       // the first, among the received rows (layout rank: among the places)
    int32 num_rows;  // none at the end of home ranks that receive less than others
    int64 home_row;  // where the first goes, in the order of the home buffer
};

template <class Shape>
__device__ int32 num_chunks(const CombineShared<Shape>& shared) {
    int32 most = 0;
    for (int s = 0; s < Shape::num_ranks; ++s)
        most = max(most, ((shared.received[s] - 1) >> chunk_shift<Shape>(shared.received[s])) + 1);
    return most * Shape::num_ranks;
}

// Home ranks take turns, so that all links are busy; this rank begins with its neighbour.
template <class Shape>
__device__ PushChunk chunk_of(const CombineArgs& args, const CombineShared<Shape>& shared, int32 item) {
    const int32 index = item / Shape::num_ranks, home = (item + 1 + args.call.rank) % Shape::num_ranks;
    const int shift = chunk_shift<Shape>(shared.received[home]);
    const int32 begin = index << shift, end = min((index + 1) << shift, shared.received[home]);
    const int64 first = Shape::layout == kLayoutRank ? static_cast<int64>(home) * args.max_tokens
                                                     : shared.received_base[home];
    return {home, index, first + begin, max(0, end - begin), shared.home_base[home] + begin};
}

// The chunks that a pushing warp takes: one of its own, then whatever is left.
template <class Shape>
struct ChunkSource {
    Claims claims;
    int32 next_item, total;

    __device__ ChunkSource(const CombineArgs& args, const CombineShared<Shape>& shared, int warp, int lane)
        : claims(args.call.claimed, lane), next_item(warp * gridDim.x + blockIdx.x), total(num_chunks<Shape>(shared)) {}

    __device__ bool next(const CombineArgs& args, const CombineShared<Shape>& shared, int32& item, PushChunk& chunk) {
        while (next_item < total) {
            item = next_item;
            chunk = chunk_of<Shape>(args, shared, item);
            next_item = gridDim.x * Shape::push_warps + claims.take();
            if (chunk.num_rows > 0) return true;
        }
        return false;
    }
};

template <class Shape>
__device__ __forceinline__ uint32* chunk_flag(const CombineArgs& args, const CombineShared<Shape>& shared,
                                                const PushChunk& chunk) {
    return at_peer<uint32>(shared.control, chunk.home, args.chunk_flags) + args.call.rank * Shape::max_chunks +
           chunk.index;
}

// One pushing warp: rows as they are, through its ring. A chunk is reported when a row of a later one is on its way.
template <class Shape>
__device__ void push_copies(const CombineArgs& args, CombineShared<Shape>& shared, uint32 epoch, int warp, int lane) {
    constexpr int64 kRowBytes = CombineRows<Shape>::kWireBytes;
    using Copy = typename CombineShared<Shape>::Copy;
    Copy stream(shared.ring[warp], shared.control_of_stream[warp], lane);
    ChunkSource<Shape> chunks(args, shared, warp, lane);
    PushChunk chunk{};
    int32 in_chunk = 0, kept = 0;
    uint32 begun = 0, issued = 0;
    const auto begin_chunk = [&]() {  // false: there are no more
        int32 item;
        if (!chunks.next(args, shared, item, chunk)) return false;
        in_chunk = 0;
        kept = static_cast<int32>(max(0ll, min(static_cast<int64>(chunk.num_rows), args.capacity - chunk.row)));
        auto* to = at_peer<unsigned char>(shared.data, chunk.home, args.home) + chunk.home_row * kRowBytes;
        for (int32 i = kept; i < chunk.num_rows; ++i)  // dropped by the dispatch
            fill_row<kRowBytes>(to + i * kRowBytes, CombineRows<Shape>::kNan, lane);
        if (kept > 0) {
            shared.progress.begin(warp, begun++, item, lane);
        } else {
            __syncwarp();
            if (lane == 0) store_release_sys(chunk_flag<Shape>(args, shared, chunk), epoch);
        }
        return true;
    };
    stream.run(
        [&](const unsigned char*& from, uint64& tag) {
            while (in_chunk == kept)
                if (!begin_chunk()) return false;
            from = static_cast<const unsigned char*>(args.y) + (chunk.row + in_chunk) * kRowBytes;
            auto* to = at_peer<unsigned char>(shared.data, chunk.home, args.home) + (chunk.home_row + in_chunk) * kRowBytes;
            tag = reinterpret_cast<uint64>(to) | (in_chunk == 0);  // addresses are multiples of 16: a chunk begins here
            ++in_chunk;
            return true;
        },
        [&](uint64 tag) { return lane == 0 ? static_cast<int64>(tag & ~1ull) : Copy::kNowhere; },
        [&](uint32, uint64 tag) {
            if ((tag & 1) == 0) return;
            stream.template wait_for_all_but<1>();
            shared.progress.report(warp, issued++, lane);
        });
    stream.finish();
    shared.progress.report(warp, begun, lane);
    shared.progress.close(warp, lane);
}

// One pushing warp: rows that are made on the way.
template <class Shape>
__device__ void push_sums(const CombineArgs& args, CombineShared<Shape>& shared, int warp, int lane) {
    ChunkSource<Shape> chunks(args, shared, warp, lane);
    PushChunk chunk;
    uint32 begun = 0;
    for (int32 item; chunks.next(args, shared, item, chunk);) {
        shared.progress.begin(warp, begun++, item, lane);
        auto* home = at_peer<unsigned char>(shared.data, chunk.home, args.home);
        auto* to = home + chunk.home_row * CombineRows<Shape>::kWireBytes;
        RowRoutes next = routes_of<Shape>(args, chunk.row, lane);
        for (int32 i = 0; i < chunk.num_rows; ++i) {
            const RowRoutes routes = next;
            if (i + 1 < chunk.num_rows) next = routes_of<Shape>(args, chunk.row + i + 1, lane);
            push_row<Shape>(args, routes, home, to + static_cast<int64>(i) * CombineRows<Shape>::kWireBytes, lane);
        }
        shared.progress.report(warp, begun, lane);
    }
    shared.progress.close(warp, lane);
}

// The telling warp: flags of the chunks that are home.
template <class Shape>
__device__ void raise_chunk_flags(const CombineArgs& args, CombineShared<Shape>& shared, uint32 epoch, int lane) {
    shared.progress.watch(lane, [&](int32 item) {
        store_relaxed_sys(chunk_flag<Shape>(args, shared, chunk_of<Shape>(args, shared, item)), epoch);
    });
}

// What one lane waits for and adds: the row that a rank (or, per route, an expert) sends home for a token.
struct HomeTerm {
    int32 slot;  // among the rows that went to the rank; -1: none
    int32 rank;
};

template <class Shape>
__device__ __forceinline__ HomeTerm home_term(const CombineArgs& args, int64 token, int lane) {
    HomeTerm term{-1, lane};
    if constexpr (Shape::per_route != 0) {
        if (lane >= Shape::top_k) return term;
        const int64 index = token * Shape::top_k + lane;
        const int64 id = args.ids_are_int64 ? static_cast<const int64*>(args.topk_ids)[index]
                                            : static_cast<const int32*>(args.topk_ids)[index];
        if (id < 0 || id >= Shape::num_experts) return term;
        term.rank = static_cast<int32>(id) / (Shape::num_experts / Shape::num_ranks);
    } else if (lane >= Shape::num_ranks) {
        return term;
    }
    term.slot = args.slots[token * Shape::num_ranks + term.rank];
    return term;
}

// A warp takes token after token, or part of one where tokens are few: wait for its rows, add them, round once.
template <class Shape>
__device__ void sum_rows_at_home(const CombineArgs& args, const CombineShared<Shape>& shared, uint32 epoch, int warp,
                                 int lane) {
    using Rows = CombineRows<Shape>;
    constexpr int kSumWarps = Shape::threads / 32 - Shape::push_warps - 1;
    const Deadline deadline = deadline_of(args.call);
    const auto* flags = at_peer<const uint32>(shared.control, args.call.rank, args.chunk_flags);
    const auto home = reinterpret_cast<uint64>(at_peer<unsigned char>(shared.data, args.call.rank, args.home));
    auto* out = static_cast<unsigned char*>(args.out);
    if (args.num_tokens == 0) return;
    const int32 num_warps = gridDim.x * kSumWarps;
    const int32 parts = min(max(4 * num_warps / args.num_tokens, 1), Rows::Home::Row::kCount);
    const int32 num_items = args.num_tokens * parts;
    Claims claims(args.call.claimed + 1, lane);
    int32 item = warp * gridDim.x + blockIdx.x;
    if (item >= num_items) return;
    HomeTerm next = home_term<Shape>(args, item / parts, lane);
    for (int32 next_item; item < num_items; item = next_item) {
        const int64 token = item / parts;
        const HomeTerm term = next;
        next_item = num_warps + claims.take();
        if (next_item < num_items) next = home_term<Shape>(args, next_item / parts, lane);
        bool here = true;
        uint64 row = 0;
        if (term.slot >= 0) {
            const int32 chunk = term.slot >> chunk_shift<Shape>(shared.own[term.rank]);
            here = wait_for_flag(flags + term.rank * Shape::max_chunks + chunk, epoch, deadline, term.rank,
                                 kPhasePartials);
            row = Shape::per_route ? token * Shape::top_k + lane : shared.own_base[term.rank] + term.slot;
        }
        if (!__all_sync(~0u, here)) return;
        __syncwarp();
        const uint32 terms = __ballot_sync(~0u, term.slot >= 0);
        Rows::Home::add(out + token * Rows::kOutBytes, home + row * Rows::kWireBytes, 1.0f, terms, item % parts, parts,
                        lane);
    }
}

template <class Shape>
__device__ void combine(const CombineArgs& args) {
    extern __shared__ __align__(128) unsigned char memory[];
    static_assert(sizeof(CombineShared<Shape>) <= Shape::shared_bytes, "launch.py asks for the shared memory that this needs");
    auto& shared = *reinterpret_cast<CombineShared<Shape>*>(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32 epoch = *args.call.epoch + 1;
    if (threadIdx.x == 0) mark(args.call, kBegun);
    if (__syncthreads_or(has_expired(deadline_of(args.call)))) return;
    constexpr int kCounts = Shape::num_ranks + Shape::num_experts;
    if (blockIdx.x == 0)
        announce_call<Shape::num_ranks, kCounts, Shape::threads>(args.call, epoch, 0, shared.row);
    if (warp == 0) shared.progress.clear(lane);
    if (warp < shared.kRings) CombineShared<Shape>::Copy::init(shared.control_of_stream[warp], lane);
    mbarrier_init_fence();
    find_bases<Shape>(args, shared);
    const Opened opened = await_call<Shape::num_ranks, kCounts>(args.call, epoch);
    if (threadIdx.x == 0) mark(args.call, kHeard);
    if (opened == Opened::kExpired) return;
    if (opened == Opened::kGo) {
        if (warp == Shape::push_warps) raise_chunk_flags<Shape>(args, shared, epoch, lane);
        else if (warp > Shape::push_warps) sum_rows_at_home<Shape>(args, shared, epoch, warp - Shape::push_warps - 1, lane);
        else if constexpr (CombineRows<Shape>::kCopies) push_copies<Shape>(args, shared, epoch, warp, lane);
        else push_sums<Shape>(args, shared, warp, lane);
        if (lane == 0) mark(args.call, warp < Shape::push_warps ? kSent : warp == Shape::push_warps ? kTold : kSummed);
    }
    if (threadIdx.x == 0) mark(args.call, kDone);
    close_call(args.call, epoch);
}
