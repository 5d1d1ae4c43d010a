// The summing warps: rows that came home are added, token by token, and those that never left among them.
#pragma once
#include "device/tile/routes.cuh"
#include "kernels/combine/args.cuh"

// What one lane waits for and adds: the row that a rank (or, per route, an expert) sends home for a token.
struct Term {
    int32 slot;  // among the rows that went to the rank; -1: none
    int32 rank;
};

template <class Shape>
__device__ __forceinline__ Term term_of(const CombineArgs& args, const CombineShared<Shape>& shared, int64 token,
                                        int lane) {
    Term term{-1, lane};
    if constexpr (Shape::per_route != 0) {
        if (lane >= Shape::top_k) return term;
        const int32 expert =
            expert_of<Shape::num_experts>(args.topk_ids, args.ids_are_int64, token * Shape::top_k + lane);
        if (expert < 0) return term;
        term.rank = expert / (Shape::num_experts / Shape::num_ranks);
    } else if constexpr (Shape::num_ranks > 32) {
        // More ranks than lanes, but a token has no more rows than experts: lane i has the i-th.
        int found = 0;
        for (int first = 0; first < Shape::num_ranks; first += 32) {
            const int rank = first + lane;
            const bool has_row = rank < Shape::num_ranks && shared.own[rank] != kNoRows &&
                                 args.slots[token * Shape::num_ranks + rank] >= 0;
            for (uint32 rest = __ballot_sync(~0u, has_row); rest != 0; rest &= rest - 1, ++found)
                if (found == lane) term.rank = first + __ffs(rest) - 1;
        }
        if (lane >= found) return term;
    } else if (lane >= Shape::num_ranks) {
        return term;
    }
    if (shared.own[term.rank] != kNoRows) term.slot = args.slots[token * Shape::num_ranks + term.rank];
    return term;
}

// The sums that a warp makes: of token after token, or of parts where tokens are few. Warps of blocks that only sum begin
// with one of their own; those that have pushed take what is left.
template <class Shape>
struct SumSource {
    using Rows = CombineRows<Shape>;

    const CombineArgs& args;
    const CombineShared<Shape>& shared;
    Turn turn;
    PeerSignals flags;
    uint64 received, first_own;  // the address of rows that came home, and the number of the first that never left
    int32 num_warps, parts, num_items;
    Claims claims;
    int32 item;
    Term term{-1, 0};  // of this lane

    __device__ SumSource(const CombineArgs& args_, const CombineShared<Shape>& shared_, Turn turn_, int warp, int lane)
        : args(args_), shared(shared_), turn(turn_),
          flags(shared.control.signals(args.call.rank, args.chunk_flags)),
          received(shared.data.staging_address(args.call.rank, shared.combine_recv)),
          first_own(first_row<Shape>(args, shared, args.call.rank)), claims(args.call.claimed + 1, lane) {
        const int32 first = CombineRoles<Shape>::first_sum_block(args), blocks = gridDim.x - first;
        num_warps = blocks * CombineRoles<Shape>::kWarps;
        parts = Rows::Sum::Row::parts(max(args.num_tokens, 1), max(num_warps, 1));
        num_items = args.num_tokens * parts;
        const int32 block = blockIdx.x - first;
        item = block < 0 ? num_warps + claims.take() : warp * blocks + block;
        load();
    }

    __device__ __forceinline__ bool more() const { return item < num_items; }
    __device__ __forceinline__ int64 token() const { return item / parts; }

    __device__ __forceinline__ void load() {
        if (more()) term = term_of<Shape>(args, shared, token(), claims.lane);
    }

    __device__ __forceinline__ void advance() {
        item = Rows::kArrives ? item + num_warps : num_warps + claims.take();
        load();
    }

    // This lane's row stays at home, or has come with all others, or there is none.
    __device__ __forceinline__ bool needs_no_flag() const {
        return Shape::dense != 0 || term.slot < 0 || stays();
    }

    // This lane's row stays at home.
    __device__ __forceinline__ bool stays() const { return Rows::kOwnStay && term.rank == args.call.rank; }

    __device__ __forceinline__ PeerSignals flag() const {
        return flags.from(term.rank * args.max_chunks + Chunks<Shape>(shared.own[term.rank]).of_row(term.slot));
    }

    // All rows of the sum are here.
    __device__ __forceinline__ bool is_here() const {
        const bool here = __all_sync(~0u, needs_no_flag() || flag().is_raised(0, turn.epoch));
        __syncwarp();
        return here;
    }

    // The same, once they are. False: a wait has expired.
    __device__ __forceinline__ bool await() const {
        const bool here = __all_sync(~0u, needs_no_flag() || flag().wait(0, turn.epoch, deadline_of(args.call), term.rank,
                                                                         kPhasePartials));
        __syncwarp();
        return here;
    }

    // A row that never left lies beyond what the dispatch has kept.
    __device__ __forceinline__ bool is_dropped() const {
        return __any_sync(~0u, stays() && term.slot >= 0 &&
                                   static_cast<int64>(first_own) + term.slot >= args.capacity);
    }

    __device__ __forceinline__ Terms terms() const {
        int64 row = 0;
        uint64 rows = received;
        if (Shape::dense != 0) {  // copy engines brought all rows before their ranks opened this call
            row = static_cast<int64>(term.rank) * args.max_tokens + token();
        } else if (stays()) {
            rows = reinterpret_cast<uint64>(args.y);
            row = static_cast<int64>(first_own) + term.slot;
        } else if (term.slot >= 0) {
            row = Shape::per_route ? token() * Shape::top_k + claims.lane : shared.own_base[term.rank] + term.slot;
        }
        // Rows that arrive are read in any case, or they would count as others later.
        const bool dropped = is_dropped(), all_are_left = dropped && !Rows::kArrives;
        const uint32 lanes = __ballot_sync(~0u, term.slot >= 0 && !all_are_left && !(dropped && stays()));
        constexpr int kSlices = Rows::Sum::Row::kCount;
        const int part = item % parts;
        return {rows + row * Rows::kWireBytes, 1.0f, lanes, part * kSlices / parts, (part + 1) * kSlices / parts};
    }
};

// Eager: a warp adds rows of which each word says that it is here. False: a wait has expired.
template <class Shape>
__device__ bool sum_arriving_rows(const CombineArgs& args, const CombineShared<Shape>& shared, Turn turn, int warp,
                                  int lane) {
    using Rows = CombineRows<Shape>;
    if (blockIdx.x < CombineRoles<Shape>::first_sum_block(args)) return true;
    for (SumSource<Shape> sums(args, shared, turn, warp, lane); sums.more(); sums.advance()) {
        const Terms terms = sums.terms();
        auto* to = static_cast<unsigned char*>(args.out) + sums.token() * Rows::kOutBytes;
        const uint32 arriving = __ballot_sync(~0u, !sums.stays());
        const auto await = [&](const unsigned char* from, uint32 peer) {
            return wait_for_16(from, turn.epoch, deadline_of(args.call), peer, kPhasePartials);
        };
        const bool dropped = sums.is_dropped();
        if (terms.lanes != 0 && !Rows::Sum::add(to, terms, arriving, sums.term.rank, lane, await)) return false;
        __syncwarp();  // in which other lanes have stored what becomes NaN
        if (terms.lanes == 0 || dropped) fill_row<Rows::kOutBytes>(to, dropped ? kNanWord<Shape::out_dtype> : 0, lane);
    }
    return true;
}

// A warp adds what comes home, and rounds each sum once. False: a wait has expired.
template <class Shape>
__device__ bool sum_rows(const CombineArgs& args, CombineShared<Shape>& shared, Turn turn, int warp, int lane) {
    using Rows = CombineRows<Shape>;
    SumSource<Shape> sums(args, shared, turn, warp, lane);
    typename Rows::Sum stream(shared.sum[warp], lane);
    Terms loading{};
    bool is_loading = false, is_here = false;  // the sum that `sums` is at
    const auto next = [&](Terms& found) {
        if (is_loading || !sums.more() || !(is_here || sums.is_here())) return false;
        is_loading = true;
        found = loading = sums.terms();
        return true;
    };
    while (sums.more()) {
        is_here = is_loading || sums.await();
        if (!is_here) return false;
        stream.load_ahead(next);
        const Terms terms = loading;
        const bool dropped = sums.is_dropped();
        auto* to = static_cast<unsigned char*>(args.out) + sums.token() * Rows::kOutBytes;
        is_loading = is_here = false;
        sums.advance();
        if (terms.lanes == 0) fill_row<Rows::kOutBytes>(to, dropped ? kNanWord<Shape::out_dtype> : 0, lane);
        else stream.add(terms, to, next);
    }
    return true;
}
