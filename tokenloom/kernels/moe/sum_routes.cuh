// The end of a MegaMoE call. Each token's rows have come home; they are added in ascending k, shared experts' rows
// last, in float32, and rounded once.
//
// NaN takes the place of all sums if the ranks have not met. If the dispatch was refused, so is the barrier. A rank in
// which a wait has expired does not announce the barrier, so the others' waits for it expire. Routes to masked ranks are
// none.
#pragma once
#include "device/ptx/grid.cuh"
#include "device/roles/trace.cuh"
#include "device/tile/routes.cuh"
#include "device/tile/rows.cuh"

struct SumRoutesArgs {
    const void* topk_ids;      // [T][K] as given to the dispatch
    void* out;                 // [T] rows of bfloat16
    int32 num_tokens;
    int32 ids_are_int64;
    const int32* met;          // [1] of the barrier after the GEMMs: whether all ranks came
    const uint32* masked;      // [1] bit r: rank r takes no part
    const void* combine_recv;  // [M][K + S] rows of bfloat16, S of shared experts
    uint64* trace;             // see mark_block
};

template <class Shape>
__device__ void sum_routes(const SumRoutesArgs& args) {
    constexpr int kRowBytes = Shape::hidden * 2, kWarps = Shape::threads / 32;
    constexpr int kTerms = Shape::top_k + Shape::shared_experts;
    wait_for_earlier_kernels();
    using Sum = RowSum<kBfloat16, kBfloat16, Shape::hidden, 8, Shape::terms_at_once, kTerms>;
    if (args.num_tokens == 0) return;
    if (threadIdx.x == 0) mark_block(args.trace, kBegins);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 * gridDim.x + blockIdx.x;
    const int32 num_warps = kWarps * gridDim.x;
    const int32 parts = Sum::Row::parts(args.num_tokens, num_warps);
    const auto rows = reinterpret_cast<uint64>(args.combine_recv);
    auto* out = static_cast<unsigned char*>(args.out);
    const bool trusted = *args.met != 0;
    const uint32 masked = *args.masked;
    for (int32 item = warp; item < args.num_tokens * parts; item += num_warps) {
        const int64 token = item / parts;
        int32 expert = -1;
        if (lane < Shape::top_k)
            expert = expert_of<Shape::num_experts>(args.topk_ids, args.ids_are_int64, token * Shape::top_k + lane);
        if (expert >= 0 && (masked >> (expert / (Shape::num_experts / Shape::num_ranks)) & 1) != 0) expert = -1;
        if (!trusted) fill_row<kRowBytes>(out + token * kRowBytes, kNanWord<kBfloat16>, lane);
        else
            Sum::add(out + token * kRowBytes, rows + (token * kTerms + lane) * kRowBytes,
                     __ballot_sync(~0u, expert >= 0 || (lane >= Shape::top_k && lane < kTerms)), item % parts, parts,
                     lane);
    }
    if (lane == 0) mark_block(args.trace, kEnds);
}
