// The end of a call: when all ranks' rows have come home, each token's routes are added in ascending k, in float32, and
// rounded once.
//
// The opening of the call (device/sync/call.cuh) is the barrier: a rank announces it after its GEMMs, and whoever has
// heard of it sees what they wrote here.
#pragma once
#include "device/sync/call.cuh"
#include "device/tile/routes.cuh"
#include "device/tile/rows.cuh"

struct SumRoutesArgs {
    Call call;
    const void* topk_ids;  // [T][K] as given to the dispatch
    const uint64* peers;   // [W] device memory: every rank's buffer
    uint64 home;           // in it: [M][K] rows of bfloat16
    void* out;             // [T] rows of bfloat16
    int32 num_tokens;
    int32 ids_are_int64;
};

template <class Shape>
__device__ void add_routes(const SumRoutesArgs& args) {
    constexpr int kRowBytes = Shape::hidden * 2, kWarps = Shape::threads / 32;
    using Sum = RowSum<kBfloat16, kBfloat16, Shape::hidden, 8, Shape::terms, false>;
    if (args.num_tokens == 0) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 * gridDim.x + blockIdx.x;
    const int32 num_warps = kWarps * gridDim.x;
    const int32 parts = min(max(4 * num_warps / args.num_tokens, 1), Sum::Row::kCount);  // of a token, where few are
    const auto home = reinterpret_cast<uint64>(at_peer<unsigned char>(args.peers, args.call.rank, args.home));
    auto* out = static_cast<unsigned char*>(args.out);
    for (int32 item = warp; item < args.num_tokens * parts; item += num_warps) {
        const int64 token = item / parts, route = token * Shape::top_k + lane;
        const bool used = lane < Shape::top_k &&
                          expert_of<Shape::num_experts>(args.topk_ids, args.ids_are_int64, route) >= 0;
        Sum::add(out + token * kRowBytes, home + route * kRowBytes, 1.0f, __ballot_sync(~0u, used), item % parts,
                 parts, lane);
    }
}

template <class Shape>
__device__ void sum_routes(const SumRoutesArgs& args) {
    __shared__ alignas(16) int32 row[kHeaderWords];
    constexpr int kCounts = Shape::num_ranks + Shape::num_experts;
    const uint32 epoch = epoch_of(args.call);
    if (__syncthreads_or(has_expired(deadline_of(args.call)))) return;
    if (blockIdx.x == 0) announce_call<Shape::num_ranks, kCounts, Shape::threads>(args.call, epoch, 0, row);
    const Opened opened = await_call<Shape::num_ranks, kCounts>(args.call, epoch);
    if (opened == Opened::kExpired) return;
    if (opened == Opened::kGo) add_routes<Shape>(args);
    close_call(args.call, epoch);
}
