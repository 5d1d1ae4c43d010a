// The end of a MegaMoE call. Each token's rows have come home; they are added in ascending k, shared experts' rows last,
// in float32, and rounded once.
//
//   all blocks      set the counts of the GEMMs back to 0
//   block 0         tells all ranks that this one is here: its results are at home
//   all blocks      wait for all ranks; go on only if all mean the same call                        (transport/call.cuh)
//   all warps       add the rows of one token after the other, or of parts of them                           (sum_rows)
//   last block out  advances the epoch; NaN takes the place of all sums if the call was refused or a wait has expired
//
// It is a call of its own behind the dispatch. Whoever refuses that one, or waits for it in vain, refuses this one too.
// Routes to masked ranks are none.
#pragma once
#include "device/ptx/grid.cuh"
#include "device/roles/trace.cuh"
#include "device/tile/routes.cuh"
#include "device/tile/rows.cuh"
#include "device/transport/call.cuh"

struct SumRoutesArgs {
    Call call;
    // What every call is told anew lies side by side, so that the host writes it at once.
    const void* topk_ids;  // [T][K] as given to the dispatch
    void* out;             // [T] rows of bfloat16
    int32 num_tokens;
    int32 ids_are_int64;
    const void* combine_recv;  // [M][K + S] rows of bfloat16, S of shared experts
    uint32* counted;           // [num_counted] what the next call finds at 0
    int32 num_counted;
    int32 padding;
    uint64* trace;  // see mark_block
};

template <class Shape>
__device__ void sum_rows(const SumRoutesArgs& args, uint32 masked) {
    constexpr int kRowBytes = Shape::hidden * 2, kWarps = Shape::threads / 32;
    constexpr int kTerms = Shape::top_k + Shape::shared_experts;
    using Sum = RowSum<kBfloat16, kBfloat16, Shape::hidden, 8, Shape::terms>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 * gridDim.x + blockIdx.x;
    const int32 num_warps = kWarps * gridDim.x;
    const int32 parts = Sum::parts(max(args.num_tokens, 1), num_warps);
    const auto rows = reinterpret_cast<uint64>(args.combine_recv);
    auto* out = static_cast<unsigned char*>(args.out);
    for (int32 item = warp; item < args.num_tokens * parts; item += num_warps) {
        const int64 token = item / parts;
        int32 expert = -1;
        if (lane < Shape::top_k)
            expert = expert_of<Shape::num_experts>(args.topk_ids, args.ids_are_int64, token * Shape::top_k + lane);
        if (expert >= 0 && (masked >> (expert / (Shape::num_experts / Shape::num_ranks)) & 1) != 0) expert = -1;
        Sum::add(out + token * kRowBytes, rows + (token * kTerms + lane) * kRowBytes,
                 __ballot_sync(~0u, expert >= 0 || (lane >= Shape::top_k && lane < kTerms)), item % parts, parts, lane);
    }
}

// All that a block does before it leaves. False: there are no sums.
template <class Shape>
__device__ bool sum_all_routes(const SumRoutesArgs& args, Turn turn) {
    static_assert(Shape::num_ranks <= kMostRanks, "a lane and a bit of every mask for each rank");
    __shared__ alignas(16) int32 header[kHeaderWords];
    constexpr int kCounts = Shape::num_ranks + Shape::num_experts;
    if (__syncthreads_or(has_expired(deadline_of(args.call)))) return false;
    if (blockIdx.x == 0) announce_call<Shape::num_ranks, kCounts, Shape::threads>(args.call, turn, 0, header);
    if (await_call<Shape::num_ranks, kCounts>(args.call, turn) != Opened::kGo) return false;
    if (threadIdx.x == 0) mark_block(args.trace, kBegins);
    sum_rows<Shape>(args, turn.masked);
    if (threadIdx.x % 32 == 0) mark_block(args.trace, kEnds);
    return true;
}

template <class Shape>
__device__ void sum_routes(const SumRoutesArgs& args) {
    wait_for_earlier_kernels();
    for (int32 i = blockIdx.x * Shape::threads + threadIdx.x; i < args.num_counted; i += gridDim.x * Shape::threads)
        args.counted[i] = 0;
    const Turn turn = turn_of(args.call);
    const bool done = sum_all_routes<Shape>(args, turn);
    close_call(args.call, turn, done, [&] {
        constexpr int64 kRowBytes = Shape::hidden * 2;
        auto* out = static_cast<unsigned char*>(args.out);
        for (int64 token = 0; token < args.num_tokens; ++token)
            fill_row<kRowBytes>(out + token * kRowBytes, kNanWord<kBfloat16>, threadIdx.x);
    });
}
