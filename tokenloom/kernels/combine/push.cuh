// The pushing warps: rows of this rank go home. And what the notify warp says of them.
#pragma once
#include "kernels/combine/args.cuh"

// The routes of one received row: lane k has the k-th. Rows that were not dispatched by expert have one, in lane 0.
struct RowRoutes {
    int32 place;  // -1: no route
    float weight;
    int32 token;
    int begin, end;  // slices of the row, where warps share it
};

template <class Shape>
__device__ __forceinline__ RowRoutes routes_of(const CombineArgs& args, int64 row, int lane) {
    using Rows = CombineRows<Shape>;
    RowRoutes routes{-1, 1.0f, 0, 0, 0};
    if constexpr (Rows::kByExpert) {
        if constexpr (Shape::per_route != 0 || Rows::kWeightsFromHome) routes.token = args.row_tokens[row];
        if (lane < Shape::top_k) {
            routes.place = args.row_places[row * Shape::top_k + lane];
            if constexpr (Shape::weights == kReceivedWeights) routes.weight = args.weights[row * Shape::top_k + lane];
        }
    } else if (lane == 0) {
        routes.place = static_cast<int32>(row);
    }
    return routes;
}

// The same of a row for `home`, with the weights that its rank has sent.
template <class Shape>
__device__ __forceinline__ RowRoutes routes_for(const CombineArgs& args, const CombineShared<Shape>& shared, int32 home,
                                                int64 row, int lane) {
    RowRoutes routes = routes_of<Shape>(args, row, lane);
    if constexpr (CombineRows<Shape>::kWeightsFromHome) {
        if (lane < Shape::top_k)
            routes.weight = shared.data.template local<const float>(
                args.call.rank, weights_from<Shape>(args, shared.combine_recv, home))[routes.token * Shape::top_k + lane];
    }
    return routes;
}

// What is added for a row, or (per route) sent home route by route.
template <class Shape>
__device__ __forceinline__ Terms terms_of(const CombineArgs& args, const RowRoutes& routes) {
    const uint32 kept = __ballot_sync(~0u, routes.place >= 0 && routes.place < args.capacity);
    const uint32 dropped = __ballot_sync(~0u, routes.place >= args.capacity);
    const uint64 address =
        reinterpret_cast<uint64>(args.y) + static_cast<int64>(routes.place) * CombineRows<Shape>::kYBytes;
    return {address, routes.weight, Shape::per_route == 0 && dropped != 0 ? 0 : kept, routes.begin, routes.end};
}

// One received row, home: its sum to `to`, or (per route) its routes to where those of its token lie, from `to` on.
// Rows that the dispatch dropped come home as NaN, once: of warps that share one, the first sends it.
template <class Shape, class Next>
__device__ __forceinline__ void push_row(const CombineArgs& args, const RowRoutes& routes, const Terms& terms,
                                         typename CombineRows<Shape>::Push& stream, unsigned char* to, int lane,
                                         Next next) {
    using Rows = CombineRows<Shape>;
    const uint32 dropped = __ballot_sync(~0u, routes.place >= args.capacity);
    if constexpr (Shape::per_route != 0) {
        const uint64 target = reinterpret_cast<uint64>(to) +
                              (static_cast<int64>(routes.token) * Shape::top_k + lane) * Rows::kWireBytes;
        stream.each_alone(
            terms, [&](uint32 lanes) { return reinterpret_cast<unsigned char*>(of_lane(target, lanes)); }, next);
        for (uint32 rest = routes.begin == 0 ? dropped : 0; rest != 0; rest &= rest - 1)
            fill_row<Rows::kWireBytes, typename Rows::Stores>(reinterpret_cast<unsigned char*>(of_lane(target, rest)),
                                                              Rows::kNan, lane);
    } else if (dropped != 0) {
        if (routes.begin == 0) fill_row<Rows::kWireBytes, typename Rows::Stores>(to, Rows::kNan, lane);
    } else {
        stream.add(terms, to, next);
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

// Home ranks that rows travel to.
template <class Shape>
constexpr int kHomes = Shape::num_ranks - (CombineRows<Shape>::kOwnStay && Shape::num_ranks > 1 ? 1 : 0);

// As many for each home rank as the one has that receives most.
template <class Shape>
__device__ int32 num_chunks(const CombineShared<Shape>& shared) {
    int32 most = 0;
    for (int s = 0; s < Shape::num_ranks; ++s)
        most = max(most, Chunks<Shape>(shared.received[s]).count());
    return most * kHomes<Shape>;
}

// Home ranks take turns, so that all links are busy; this rank begins with its neighbour.
template <class Shape>
__device__ PushChunk chunk_of(const CombineArgs& args, const CombineShared<Shape>& shared, int32 item) {
    const int32 index = item / kHomes<Shape>;
    const int32 home = (item % kHomes<Shape> + 1 + args.call.rank) % Shape::num_ranks;
    const Chunks<Shape> chunks(shared.received[home]);
    const int32 begin = chunks.begin(index);
    return {home, index, first_row<Shape>(args, shared, home) + begin, chunks.num_rows(index),
            shared.home_base[home] + begin};
}

// The chunks that a pushing warp takes: one of its own, then whatever is left.
template <class Shape>
struct ChunkSource {
    Claims claims;
    int32 blocks, next_item, total;

    __device__ ChunkSource(const CombineArgs& args, const CombineShared<Shape>& shared, int warp, int lane)
        : claims(args.call.claimed, lane), blocks(CombineRoles<Shape>::push_blocks(args)),
          next_item(warp * blocks + blockIdx.x), total(num_chunks<Shape>(shared)) {}

    __device__ bool next(const CombineArgs& args, const CombineShared<Shape>& shared, int32& item, PushChunk& chunk) {
        while (next_item < total) {
            item = next_item;
            chunk = chunk_of<Shape>(args, shared, item);
            next_item = blocks * Shape::push_warps + claims.take();
            if (chunk.num_rows > 0) return true;
        }
        return false;
    }
};

// The signals of this rank's chunks for a home rank.
template <class Shape>
__device__ __forceinline__ PeerSignals chunk_signals(const CombineArgs& args, const CombineShared<Shape>& shared,
                                                     int home) {
    return shared.control.signals(home, args.chunk_flags).from(args.call.rank * args.max_chunks);
}

// One pushing warp: rows as they are, through its ring. A chunk is reported when a row of a later one is on its way.
template <class Shape>
__device__ void push_copies(const CombineArgs& args, CombineShared<Shape>& shared, uint32 epoch, int warp, int lane) {
    constexpr int64 kRowBytes = CombineRows<Shape>::kWireBytes;
    using Copy = typename CombineRows<Shape>::Copy;
    static_assert(Copy::kAhead + 2 < Progress<Shape::push_warps>::kRecent, "chunks begun and not yet reported");
    Copy stream(shared.push[warp], shared.control_of_push[warp], lane);
    ChunkSource<Shape> chunks(args, shared, warp, lane);
    PushChunk chunk{};
    int32 in_chunk = 0, kept = 0;
    uint32 begun = 0, issued = 0;
    const auto begin_chunk = [&]() {  // false: there are no more
        int32 item;
        if (!chunks.next(args, shared, item, chunk)) return false;
        in_chunk = 0;
        kept = static_cast<int32>(max(0ll, min(static_cast<int64>(chunk.num_rows), args.capacity - chunk.row)));
        auto* to = shared.data.staging(chunk.home, shared.combine_recv) + chunk.home_row * kRowBytes;
        for (int32 i = kept; i < chunk.num_rows; ++i)  // dropped by the dispatch
            fill_row<kRowBytes>(to + i * kRowBytes, CombineRows<Shape>::kNan, lane);
        if (kept > 0) {
            shared.progress.begin(warp, begun++, item, lane);
        } else {
            __syncwarp();
            if (lane == 0) chunk_signals<Shape>(args, shared, chunk.home).raise(chunk.index, epoch);
        }
        return true;
    };
    stream.run(
        [&](const unsigned char*& from, uint64& tag) {
            while (in_chunk == kept)
                if (!begin_chunk()) return false;
            from = static_cast<const unsigned char*>(args.y) + (chunk.row + in_chunk) * kRowBytes;
            auto* to = shared.data.staging(chunk.home, shared.combine_recv) + (chunk.home_row + in_chunk) * kRowBytes;
            tag = reinterpret_cast<uint64>(to) | (in_chunk == 0);  // addresses are multiples of 16: a chunk begins here
            ++in_chunk;
            return true;
        },
        [](uint64) {},
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

// A warp makes all rows of a source, and stores them where they go. While one is added, the terms of the next are
// loaded, and the routes of the one after that. `rows.next(args, row, lane)` finds the next row: false if there is none;
// `rows.address(row)` is where it goes.
template <class Shape, class Rows, class Begin, class End>
__device__ __forceinline__ void push_all(const CombineArgs& args, Rows& rows, typename CombineRows<Shape>::Push& stream,
                                         int lane, Begin begin, End end) {
    typename Rows::Row row, upcoming, following;
    bool has_upcoming = rows.next(args, upcoming, lane);
    bool has_following = has_upcoming && rows.next(args, following, lane);
    bool is_loading = false;  // the upcoming row
    Terms terms{}, loading{};
    const auto next = [&](Terms& found) {
        if (!has_upcoming || is_loading) return false;
        is_loading = true;
        found = loading = terms_of<Shape>(args, upcoming.routes);
        return true;
    };
    while (has_upcoming) {
        stream.load_ahead(next);  // where the row before had no terms, nothing has called it
        row = upcoming;
        terms = loading;
        upcoming = following;
        has_upcoming = has_following;
        is_loading = false;
        has_following = has_upcoming && rows.next(args, following, lane);
        begin(row);
        push_row<Shape>(args, row.routes, terms, stream, rows.address(row), lane, next);
        end(row);
    }
}

// Where a row goes that is made on the way; per route: where the rows of its home rank go.
template <class Shape>
__device__ __forceinline__ unsigned char* target_of(const CombineShared<Shape>& shared, int32 home, int32 home_row) {
    auto* to = shared.data.staging(home, shared.combine_recv);
    if constexpr (Shape::per_route == 0) to += static_cast<int64>(home_row) * CombineRows<Shape>::kWireBytes;
    return to;
}

// The rows that a pushing warp takes, chunk by chunk.
template <class Shape>
struct ChunkRows {
    struct Row {
        RowRoutes routes;
        int32 home, home_row;  // where it goes
        int32 item;            // its chunk
        uint32 bounds;         // bit 0: it begins the chunk; bit 1: it ends it

        __device__ bool begins() const { return (bounds & 1) != 0; }
        __device__ bool ends() const { return (bounds & 2) != 0; }
    };

    const CombineShared<Shape>& shared;
    ChunkSource<Shape> chunks;
    PushChunk chunk{};
    int32 item = 0, in_chunk = 0;

    __device__ __forceinline__ bool next(const CombineArgs& args, Row& row, int lane) {
        if (in_chunk == chunk.num_rows) {
            if (!chunks.next(args, shared, item, chunk)) return false;
            in_chunk = 0;
        }
        row.routes = routes_for<Shape>(args, shared, chunk.home, chunk.row + in_chunk, lane);
        row.home = chunk.home;
        row.home_row = static_cast<int32>(chunk.home_row) + in_chunk;
        row.item = item;
        row.bounds = in_chunk == 0 ? 1 : 0;
        if (++in_chunk == chunk.num_rows) row.bounds |= 2;
        return true;
    }

    __device__ __forceinline__ unsigned char* address(const Row& row) const {
        return target_of<Shape>(shared, row.home, row.home_row);
    }
};

// One pushing warp: rows that are made on the way.
template <class Shape>
__device__ void push_sums(const CombineArgs& args, CombineShared<Shape>& shared, int warp, int lane) {
    typename CombineRows<Shape>::Push stream(shared.push[warp], lane);
    ChunkRows<Shape> rows{shared, ChunkSource<Shape>(args, shared, warp, lane)};
    using Row = typename ChunkRows<Shape>::Row;
    uint32 begun = 0;
    push_all<Shape>(
        args, rows, stream, lane,
        [&](const Row& row) {
            if (row.begins()) shared.progress.begin(warp, begun++, row.item, lane);
        },
        [&](const Row& row) {
            if (row.ends()) shared.progress.report(warp, begun, lane);
        });
    shared.progress.close(warp, lane);
}

// Eager: the rows that a warp takes of its block's, which are every so many of all that travel, home after home from the
// one behind this rank on. Between nodes, where rows go to the ranks of this node by the rails of their homes, node comes
// after node, this one last; in each the first rail is the one behind this rank's. So no two neighbours send to the same
// rank at a time. Where rows are few, warps share them, so that all of them have work: a row may have many terms or one.
template <class Shape>
struct BlockRows {
    static constexpr int kSlices = CombineRows<Shape>::Push::Row::kCount;

    struct Row {
        RowRoutes routes;
        int32 home, home_row;
    };

    const CombineShared<Shape>& shared;
    int32 num_blocks, next_part, parts, total = 0;
    int32 home, first = 0;  // the home rank of the last row, and the rows for those before it

    __device__ BlockRows(const CombineArgs& args, const CombineShared<Shape>& shared_, int warp)
        : shared(shared_), num_blocks(CombineRoles<Shape>::push_blocks(args)), next_part(warp),
          home(first_home(args.call.rank)) {
        for (int s = 0; s < Shape::num_ranks; ++s) total += shared.received[s];
        const int32 rows_of_block = (total + num_blocks - 1) / max(num_blocks, 1);
        parts = min(max(2 * Shape::push_warps / max(rows_of_block, 1), 1), kSlices);
    }

    static constexpr int kNodeRanks = Shape::node_ranks;
    static constexpr bool kOneNode = kNodeRanks == Shape::num_ranks;

    static __device__ __forceinline__ int32 first_home(int32 rank) {
        if constexpr (kOneNode) return after(rank, rank);
        return (rank / kNodeRanks + 1) * kNodeRanks % Shape::num_ranks + (rank + 1) % kNodeRanks;
    }

    static __device__ __forceinline__ int32 after(int32 home, int32 own) {
        if constexpr (kOneNode) return home + 1 == Shape::num_ranks ? 0 : home + 1;
        const int32 node = home - home % kNodeRanks, rail = (home + 1) % kNodeRanks;
        return (rail == (own + 1) % kNodeRanks ? (node + kNodeRanks) % Shape::num_ranks : node) + rail;
    }

    __device__ __forceinline__ bool next(const CombineArgs& args, Row& row, int lane) {
        const int32 item = next_part / parts * num_blocks + blockIdx.x, part = next_part % parts;
        if (item >= total) return false;
        next_part += Shape::push_warps;
        while (item >= first + shared.received[home]) {
            first += shared.received[home];
            home = after(home, args.call.rank);
        }
        row.routes = routes_for<Shape>(args, shared, home, first_row<Shape>(args, shared, home) + item - first, lane);
        row.routes.begin = part * kSlices / parts;
        row.routes.end = (part + 1) * kSlices / parts;
        row.home = home;
        row.home_row = shared.home_base[home] + item - first;
        return true;
    }

    __device__ __forceinline__ unsigned char* address(const Row& row) const {
        return target_of<Shape>(shared, row.home, row.home_row);
    }
};

// Eager: what a block sends. Between nodes then one signal to each rank, since a release takes as long as a few rows.
template <class Shape>
__device__ void push_eagerly(const CombineArgs& args, CombineShared<Shape>& shared, Turn turn, int warp, int lane) {
    if (blockIdx.x >= CombineRoles<Shape>::push_blocks(args)) return;
    typename CombineRows<Shape>::Push stream(shared.push[warp], lane);
    BlockRows<Shape> rows(args, shared, warp);
    push_all<Shape>(args, rows, stream, lane, [](const auto&) {}, [](const auto&) {});
    if (lane == 0) mark(args.call, kSent);
    if constexpr (CombineRoles<Shape>::kArrives) return;
    __syncthreads();
    if (threadIdx.x < Shape::num_ranks && !turn.leaves_out<Shape::num_ranks>(threadIdx.x))
        chunk_signals<Shape>(args, shared, threadIdx.x).raise(blockIdx.x, turn.epoch);
}

// The notify warp: signals of the chunks that are home.
template <class Shape>
__device__ void notify_chunks(const CombineArgs& args, CombineShared<Shape>& shared, uint32 epoch, int lane) {
    shared.progress.watch(lane, [&](int32 item) {
        const PushChunk chunk = chunk_of<Shape>(args, shared, item);
        chunk_signals<Shape>(args, shared, chunk.home).raise_relaxed(chunk.index, epoch);
    });
}
