// A barrier of all ranks behind their GEMMs, by the opening of a call (device/sync/call.cuh): a rank announces it when
// its rows have gone home, and whoever has heard of it sees them. One block, so that nobody who waits keeps an SM from
// work that others wait for.
#pragma once
#include "device/sync/call.cuh"

struct MeetRanksArgs {
    Call call;
    int32* met;    // [1] whether all ranks are here and mean the same call
    int32* taken;  // [L] of route_lists.cuh, which finds zeros in the next call
};

template <class Shape>
__device__ void meet_ranks(const MeetRanksArgs& args) {
    __shared__ alignas(16) int32 row[kHeaderWords];
    constexpr int kCounts = Shape::num_ranks + Shape::num_experts;
    for (int e = threadIdx.x; e < Shape::experts_per_rank; e += Shape::threads) args.taken[e] = 0;
    const uint32 epoch = epoch_of(args.call);
    Opened opened = Opened::kExpired;
    if (!__syncthreads_or(has_expired(deadline_of(args.call)))) {
        announce_call<Shape::num_ranks, kCounts, Shape::threads>(args.call, epoch, 0, row);
        opened = await_call<Shape::num_ranks, kCounts>(args.call, epoch);
    }
    if (threadIdx.x == 0) *args.met = opened == Opened::kGo;
    if (opened != Opened::kExpired) close_call(args.call, epoch);
}
