// The sending warps: token after token to all of its destinations. And what the notify warp says of them.
#pragma once
#include "device/tile/fp8.cuh"
#include "kernels/dispatch/scales.cuh"

// The routes of one token: lane k has the k-th.
struct TokenRoutes {
    int32 expert;      // -1: none
    int32 rank;        // that holds it
    int32 row;         // the token's row among those that the rank receives
    int32 place;       // of the route there
    float weight;
    uint32 same_rank;  // lanes with routes to that rank
    bool is_target;    // the sending warp puts the row in this place
};

// How what goes to other ranks is stored.
template <class Shape>
using RowStores = typename IfArrives<Places<Shape>::kArrives, ArrivingStores, PlainStores>::Type;

// Tokens come with scales; else there are none, or they are made on the way.
template <class Shape>
constexpr bool kBringsScales = Shape::scales_per_row > 0 && Shape::quantize == kAsIs;

// What is read of a token before its row is sent. No load waits for another, so they are issued a row ahead.
template <class Shape>
struct TokenLoads {
    int32 expert;  // of lane k's route
    float weight;
    int32 place;
    int32 slot, far_slot;  // among the rows for ranks `lane` and lane + 32
    RowScales<Shape> scales;

    __device__ __forceinline__ void begin(const DispatchArgs& args, const int32* places, int64 token, int lane) {
        const int64 index = token * Shape::top_k + lane;
        expert = -1, weight = 0.0f, place = -1, slot = -1, far_slot = -1;
        if (lane < Shape::top_k) {
            expert = expert_of<Shape>(args, index);
            if (args.topk_weights != nullptr) weight = args.topk_weights[index];
            if constexpr (Places<Shape>::kOfRoutes) place = places[index];
        }
        if (lane < Shape::num_ranks) slot = args.slots[token * Shape::num_ranks + lane];
        if (lane + 32 < Shape::num_ranks) far_slot = args.slots[token * Shape::num_ranks + lane + 32];
        if constexpr (kBringsScales<Shape>) scales.load(args.scales + token * Shape::scales_per_row, lane);
    }
};

// Where the row goes that a lane with a route is the target of.
template <class Shape>
__device__ __forceinline__ int32 target_of(const TokenRoutes& routes) {
    return Places<Shape>::kDirect ? routes.place : routes.row;
}

template <class Shape>
__device__ __forceinline__ TokenRoutes routes_of(const DispatchArgs& args, const RouteShared<Shape>& route,
                                                 const TokenLoads<Shape>& loads, Turn turn, int lane) {
    TokenRoutes routes{loads.expert, -1, 0, -1, loads.weight, 0, false};
    if (routes.expert >= 0 && turn.leaves_out<Shape::num_ranks>(routes.expert / Shape::experts_per_rank))
        routes.expert = -1;
    if (routes.expert >= 0) routes.rank = routes.expert / Shape::experts_per_rank;
    int32 slot = __shfl_sync(~0u, loads.slot, max(routes.rank, 0));
    if constexpr (Shape::num_ranks > 32) {
        const int32 far_slot = __shfl_sync(~0u, loads.far_slot, max(routes.rank - 32, 0));
        if (routes.rank >= 32) slot = far_slot;
    }
    if (routes.rank >= 0) {
        routes.row = route.row_base[routes.rank] + slot;
        routes.place = Places<Shape>::kOfRoutes ? loads.place : routes.row;
        if constexpr (Places<Shape>::kDirect) {
            routes.place += route.place_base[routes.expert];
            if constexpr (Shape::layout == kLayoutSlots)
                routes.place = Places<Shape>::slot(args, routes.expert % Shape::experts_per_rank, routes.place);
        }
    }
    routes.same_rank = __match_any_sync(~0u, routes.rank);
    const bool fits = routes.place >= 0 && (Places<Shape>::kFixed || routes.place < Places<Shape>::end(args));
    const bool first = (routes.same_rank & __ballot_sync(~0u, fits) & ((1u << lane) - 1)) == 0;
    const bool is_own = Places<Shape>::kDirect && routes.rank == args.call.rank;  // goes to all of its places
    routes.is_target = fits && (is_own || Shape::strategy == kAllToAll || (Shape::strategy == kDedup && first));
    return routes;
}

// Which of a token's rows a warp sends: all of them, those to other ranks, or those that stay.
enum class Sent { kAll, kToPeers, kOwn };

// Routes without those whose rows are not among them.
template <Sent kSent>
__device__ __forceinline__ TokenRoutes only(TokenRoutes routes, int32 own_rank) {
    if (kSent == Sent::kAll || (routes.rank == own_rank) == (kSent == Sent::kOwn)) return routes;
    routes.rank = -1;
    routes.is_target = false;
    return routes;
}

// Ids, weights (if there are some) and places of a token's rows. The lanes share the work.
template <class Shape>
__device__ __forceinline__ void send_metadata(const DispatchArgs& args, const DispatchShared<Shape>& shared,
                                              const TokenRoutes& routes, int32 token, bool weighted, int lane) {
    const auto& data = shared.data;
    const bool leads = routes.rank >= 0 && (routes.same_rank & ((1u << lane) - 1)) == 0;
    for (uint32 rest = __ballot_sync(~0u, leads); rest != 0; rest &= rest - 1) {
        const int32 rank = of_lane(routes.rank, rest), row = of_lane(routes.row, rest);
        if (Shape::layout == kLayoutToken && !Places<Shape>::kStaged && row >= args.capacity) continue;
        if (lane >= Shape::top_k) continue;
        const bool here = routes.rank == rank;
        const int64 to = static_cast<int64>(row) * Shape::top_k + lane;
        const auto put = [&](uint64 offset, int64 index, uint32 word) {
            RowStores<Shape>::store(data.template staging<uint32>(rank, offset) + index, word);
        };
        constexpr int32 kShift = Places<Shape>::kShift;
        put(args.row_ids, to, (here ? routes.expert % Shape::experts_per_rank : -1) + kShift);
        if (weighted) put(args.row_weights, to, __float_as_uint(here ? routes.weight : 0.0f));
        if constexpr (Places<Shape>::kOfRoutes) put(args.row_places, to, (here ? routes.place : -1) + kShift);
        if (Shape::layout != kLayoutRank && lane == 0) put(args.row_tokens, row, token);
    }
}

// A row's scales, to where the row goes.
template <class Shape>
__device__ __forceinline__ void send_scales(const DispatchArgs& args, const DispatchShared<Shape>& shared,
                                            const TokenRoutes& routes, const RowScales<Shape>& scales, int lane) {
    for (uint32 rest = __ballot_sync(~0u, routes.is_target); rest != 0; rest &= rest - 1) {
        float* to = shared.data.template staging<float>(of_lane(routes.rank, rest), args.row_scales);
        scales.template store<RowStores<Shape>>(
            to + static_cast<int64>(of_lane(target_of<Shape>(routes), rest)) * Shape::scales_per_row, lane);
    }
}

// The tokens that a sending warp takes: first one of its block's chunk, whose slots this block has found, then whatever
// is left of all chunks, once all blocks have found theirs. Of rows that stay, blocks begin with none of their own.
template <class Shape, Sent kSent>
struct TokenSource {
    const DispatchArgs& args;
    Claims claims;
    int32 own;  // the first token, or -1
    uint32 epoch;
    bool slots_are_found = false;
    bool expired = false;  // a block has left without finding its slots

    __device__ TokenSource(const DispatchArgs& args_, Chunk chunk, uint32 epoch_, int warp, int lane)
        : args(args_), claims(args_.call.claimed + (kSent == Sent::kOwn ? kOwnRows : 0), lane), own(chunk.begin + warp),
          epoch(epoch_) {
        if (kSent == Sent::kOwn || own >= chunk.end) own = -1;
    }

    __device__ bool next(int32& token) {
        token = own;
        own = -1;
        if (token >= 0) return true;
        const int32 size = chunk_size(args.num_tokens), rest = size - Shape::send_warps;
        // Chunks whose first tokens are taken, and what is left of them.
        const int32 begun = kSent == Sent::kOwn ? 0 : Places<Shape>::kDirect ? args.peer_blocks : gridDim.x;
        const int32 of_begun = begun * max(rest, 0);
        if (of_begun == 0 && begun * size >= args.num_tokens) return false;
        if (!slots_are_found && !await_slots()) return false;
        do {
            const int32 item = claims.take();
            token = item < of_begun ? item / rest * size + Shape::send_warps + item % rest
                                    : begun * size + item - of_begun;
            if (token >= args.num_tokens) return false;
        } while (kSent == Sent::kOwn && args.slots[static_cast<int64>(token) * Shape::num_ranks + args.call.rank] < 0);
        return true;
    }

   private:
    __device__ bool await_slots() {
        const uint32* found = slots_found(args);
        bool here = true;
        for (uint32 block = claims.lane; block < gridDim.x; block += 32)
            here = here && wait_for_block(found + block, epoch, deadline_of(args.call), args.call.rank);
        slots_are_found = __all_sync(~0u, here);
        expired = !slots_are_found;
        __syncwarp();
        return slots_are_found;
    }
};

// Layouts expert and slots: the other destinations of a token hear that its rows are here.
template <class Shape>
__device__ void notify_row(const DispatchArgs& args, const DispatchShared<Shape>& shared, uint32 epoch,
                                int64 token) {
    for (int r = 0; r < Shape::num_ranks; ++r) {
        const int32 slot = args.slots[token * Shape::num_ranks + r];
        if (slot >= 0 && r != args.call.rank)
            shared.control
                .signals(r, args.row_flags)
                .from(shared.route.row_base[r])
                .raise_relaxed(slot, epoch);
    }
}

// Where the rows of a token go: straight to the ranks that hold its experts. Between nodes they also go elsewhere
// (nodes.cuh).
template <class Shape, Sent kRows = Sent::kAll>
struct ToRanks {
    static constexpr Sent kSent = kRows;
    const DispatchArgs& args;
    const DispatchShared<Shape>& shared;
    const int32* places;
    Turn turn;
    TokenLoads<Shape> loads{};
    TokenRoutes routes{};

    // For the token that send_rest comes to next.
    __device__ __forceinline__ void load(int32 token, int lane) { loads.begin(args, places, token, lane); }

    __device__ __forceinline__ void find_routes(int lane) {
        routes = only<kSent>(routes_of<Shape>(args, shared.route, loads, turn, lane), args.call.rank);
    }

    // All but the row itself.
    __device__ __forceinline__ void send_rest(int32 token, int lane) {
        find_routes(lane);
        send_metadata<Shape>(args, shared, routes, token, args.topk_weights != nullptr, lane);
        if constexpr (kBringsScales<Shape> && kLaysScales<Shape> && kSent == Sent::kOwn)
            spread_scales<Shape>(args, loads.scales, routes.place, __ballot_sync(~0u, routes.is_target), lane);
        else if constexpr (kBringsScales<Shape>) send_scales<Shape>(args, shared, routes, loads.scales, lane);
    }

    // Scales that do not lie beside rows, of a row that stays and that this warp has quantised: it has written them beside
    // each place of the row.
    __device__ __forceinline__ void lay_own_scales(int lane) const {
        const uint32 own = __ballot_sync(~0u, routes.is_target && routes.rank == args.call.rank);
        if (own == 0) return;
        __syncwarp();  // other lanes have written them
        const auto* scales = shared.data.template local<const float>(args.call.rank, args.row_scales);
        RowScales<Shape> laid;
        laid.load(scales + static_cast<int64>(of_lane(routes.place, own)) * Shape::scales_per_row, lane);
        spread_scales<Shape>(args, laid, routes.place, own, lane);
    }

    __device__ __forceinline__ bool is_target() const { return routes.is_target; }

    // This lane's address for the row, if it is a target,
    __device__ __forceinline__ int64 row() const {
        return static_cast<int64>(shared.data.staging_address(routes.rank, args.rows)) +
               static_cast<int64>(target_of<Shape>(routes)) * Shape::row_bytes;
    }

    // and for its scales.
    __device__ __forceinline__ uint64 scales() const {
        return shared.data.staging_address(routes.rank, args.row_scales) +
               static_cast<int64>(target_of<Shape>(routes)) * Shape::scales_per_row * sizeof(float);
    }
};

// A row of values becomes FP8 on its way to each lane's target.
template <class Shape, class Way>
__device__ __forceinline__ void quantize_token(const Way& way, const unsigned char* from, int64 target, int lane) {
    constexpr bool kPowerOfTwo = Shape::quantize == kToFp8PowerOfTwo;
    const uint32 targets = __ballot_sync(~0u, way.is_target());
    const uint64 scales = way.is_target() ? way.scales() : 0;
    if constexpr (Shape::scales_per_row * kFp8Block == Shape::hidden)
        quantize_row<Shape::x_dtype, Shape::hidden, kPowerOfTwo, RowStores<Shape>>(from, target, scales, targets, lane);
    else
        quantize_whole_row<Shape::x_dtype, Shape::hidden, kPowerOfTwo, RowStores<Shape>>(from, target, scales, targets,
                                                                                        lane);
}

// One sending warp. False: not all rows could be sent.
template <class Shape, class Way>
__device__ bool send_rows(const DispatchArgs& args, DispatchShared<Shape>& shared, Way way, Chunk chunk, uint32 epoch,
                          int warp, int lane) {
    using Stream = typename DispatchShared<Shape>::Stream;
    static_assert(Stream::kAhead + 5 < Progress<Shape::send_warps>::kRecent, "rows begun and not yet notified");
    constexpr int kUnreported = 2;  // rows that are on their way when the one before them is reported
    constexpr bool kReports = Places<Shape>::kDirect && Way::kSent != Sent::kOwn;
    constexpr bool kRowsFollow = Shape::strategy == kAllGather && Way::kSent == Sent::kToPeers;  // by copy engines
    TokenSource<Shape, Way::kSent> tokens(args, chunk, epoch, warp, lane);
    uint32 begun = 0;
    const auto row_of = [&](int64 token) {
        const int64 bytes = Shape::quantize == kAsIs ? Shape::row_bytes : Shape::hidden * kValueBytes<Shape::x_dtype>;
        return static_cast<const unsigned char*>(args.x) + token * bytes;
    };
    const auto begin = [&](int32& token) {
        if (!tokens.next(token)) return false;
        if (kReports) shared.progress.begin(warp, begun++, token, lane);
        return true;
    };
    const auto target = [&]() { return way.is_target() ? way.row() : Stream::kNowhere; };
    if constexpr (Shape::quantize == kAsIs && !kRowsFollow) {
        Stream stream(shared.stream[warp], shared.control_of_stream[warp], lane);
        stream.run(
            [&](const unsigned char*& from, uint64& tag) {
                int32 token;
                if (!begin(token)) return false;
                tag = token;
                from = row_of(token);
                return true;
            },
            [&](uint64 token) { way.load(token, lane); },
            [&](uint64 token) {
                way.send_rest(token, lane);
                return target();
            },
            [&](uint32 row, uint64) {
                if (!kReports || row < kUnreported) return;
                stream.template wait_for_all_but<kUnreported>();
                shared.progress.report(warp, row + 1 - kUnreported, lane);
            });
        stream.finish();
    } else {
        int32 token, following;
        bool more = begin(token);
        if (more) way.load(token, lane);
        for (uint32 row = 0; more; ++row, token = following) {
            way.send_rest(token, lane);
            more = begin(following);
            if (more) way.load(following, lane);
            if constexpr (!kRowsFollow) quantize_token<Shape>(way, row_of(token), target(), lane);
            if constexpr (kLaysScales<Shape>) way.lay_own_scales(lane);
            if (kReports) shared.progress.report(warp, row + 1, lane);
        }
    }
    if (kReports) {
        shared.progress.report(warp, begun, lane);
        shared.progress.close(warp, lane);
    }
    return !tokens.expired;
}
