// A barrier of all ranks: opens a call and does nothing else. Whoever leaves it with `opened` set sees what every other
// rank wrote before its own barrier, on its stream and in this GPU's memory too.
//
//   the one block   tells all ranks that this one is here, waits for all of them        (device/transport/call.cuh)
//                   writes down whether all are here and mean the same call, advances the epoch
//
// One block, so that nobody who waits keeps an SM from work that others wait for. README.md says who uses it.
#pragma once
#include "device/transport/call.cuh"

struct BarrierArgs {
    Call call;
    int32* opened;     // [1] whether all ranks are here and mean the same call
    int32* cleared;    // words that become 0, before this rank is announced
    int32 num_cleared;
    int32 padding;
};

template <class Shape>
__device__ void barrier(const BarrierArgs& args) {
    static_assert(Shape::num_ranks <= kMostRanks, "a lane and a bit of every mask for each rank");
    __shared__ alignas(16) int32 header[kHeaderWords];
    constexpr int kCounts = Shape::num_ranks + Shape::num_experts;
    for (int i = threadIdx.x; i < args.num_cleared; i += Shape::threads) args.cleared[i] = 0;
    const uint32 epoch = epoch_of(args.call);
    Opened opened = Opened::kExpired;
    if (!__syncthreads_or(has_expired(deadline_of(args.call)))) {
        announce_call<Shape::num_ranks, kCounts, Shape::threads>(args.call, epoch, 0, header);
        opened = await_call<Shape::num_ranks, kCounts>(args.call, epoch);
    }
    if (threadIdx.x == 0) *args.opened = opened == Opened::kGo;
    close_call(args.call, epoch, true);
}
