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
    } else if (lane >= Shape::num_ranks) {
        return term;
    }
    if (shared.own[term.rank] != kNoRows) term.slot = args.slots[token * Shape::num_ranks + term.rank];
    return term;
}

// A warp takes token after token, or part of one where tokens are few: wait for its rows, add them, round once. Warps of
// blocks that only sum begin with one of their own; those that have pushed take what is left. False: a wait has expired.
template <class Shape>
__device__ bool sum_rows(const CombineArgs& args, const CombineShared<Shape>& shared, Turn turn, int warp, int lane) {
    using Rows = CombineRows<Shape>;
    constexpr int kWarps = CombineRoles<Shape>::kWarps;
    const Deadline deadline = deadline_of(args.call);
    const PeerSignals flags = shared.control.signals(args.call.rank, args.chunk_flags);
    const auto received =
        reinterpret_cast<uint64>(shared.data.template local<unsigned char>(args.call.rank, shared.combine_recv));
    const int64 first_own = first_row<Shape>(args, shared, args.call.rank);
    auto* out = static_cast<unsigned char*>(args.out);
    if (Shape::eager == 0 && args.num_tokens == 0) return true;
    const int32 push_blocks = CombineRoles<Shape>::push_blocks(args), blocks = gridDim.x - push_blocks;
    const int32 num_warps = blocks * kWarps, block = blockIdx.x - push_blocks;
    const int32 parts = Rows::Sum::parts(max(args.num_tokens, 1), max(num_warps, 1));
    const int32 num_items = args.num_tokens * parts;
    Claims claims(args.call.claimed + 1, lane);
    int32 item = block < 0 ? num_warps + claims.take() : warp * blocks + block;
    if (Shape::eager == 0 && item >= num_items) return true;
    Term next{-1, 0};
    if (item < num_items) next = term_of<Shape>(args, shared, item / parts, lane);
    if constexpr (Shape::eager != 0) {
        if (!wait_for_blocks<Shape::num_ranks, Shape::threads>(args.call, flags, args.max_chunks, args.send_blocks, turn,
                                                               kPhasePartials))
            return false;
    }
    for (int32 next_item; item < num_items; item = next_item) {
        const int64 token = item / parts;
        const Term term = next;
        next_item = num_warps + claims.take();
        if (next_item < num_items) next = term_of<Shape>(args, shared, next_item / parts, lane);
        bool here = true, dropped = false;
        uint64 rows = received;
        int64 row = 0;
        if (Shape::dense != 0) {  // copy engines brought all rows before their ranks opened this call
            row = static_cast<int64>(term.rank) * args.max_tokens + token;
        } else if (Rows::kOwnStay && term.rank == args.call.rank) {
            rows = reinterpret_cast<uint64>(args.y);
            row = first_own + term.slot;
            dropped = term.slot >= 0 && row >= args.capacity;
        } else if (term.slot >= 0) {
            if constexpr (Shape::eager == 0) {
                const int32 chunk = Chunks<Shape>(shared.own[term.rank]).of_row(term.slot);
                here = flags.from(term.rank * args.max_chunks)
                           .wait(chunk, turn.epoch, deadline, term.rank, kPhasePartials);
            }
            row = Shape::per_route ? token * Shape::top_k + lane : shared.own_base[term.rank] + term.slot;
        }
        if (!__all_sync(~0u, here)) return false;
        __syncwarp();
        const uint32 terms = __ballot_sync(~0u, term.slot >= 0);
        auto* to = out + token * Rows::kOutBytes;
        if (Rows::kOwnStay && __any_sync(~0u, dropped))
            fill_row<Rows::kOutBytes>(to, kNanWord<Shape::out_dtype>, lane);
        else
            Rows::Sum::add(to, rows + row * Rows::kWireBytes, terms, item % parts, parts, lane);
    }
    return true;
}
