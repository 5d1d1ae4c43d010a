// A barrier of all ranks: opens a call and does nothing else. What comes behind it on this rank's stream sees what all
// other ranks' streams wrote before their barriers, in this GPU's memory too.
//
//   the one block   tells all ranks that this one is here, and waits for all of them; then it writes down whether they
//                   mean the same call, and advances the epoch                                  (transport/call.cuh)
//
// One block, so that nobody who waits keeps an SM from work that others wait for. README.md says who uses it.
#pragma once
#include "device/transport/call.cuh"

struct BarrierArgs {
    Call call;
};

template <class Shape>
__device__ void barrier(const BarrierArgs& args) {
    static_assert(Shape::num_ranks <= kMostRanks, "a lane and a bit of every mask for each rank");
    __shared__ alignas(16) int32 header[kHeaderWords];
    constexpr int kCounts = Shape::num_ranks + Shape::num_experts;
    const Turn turn = turn_of(args.call);
    if (!__syncthreads_or(has_expired(deadline_of(args.call)))) {
        announce_call<Shape::num_ranks, kCounts, Shape::threads>(args.call, turn, 0, header);
        await_call<Shape::num_ranks, kCounts>(args.call, turn);
    }
    close_call(args.call, turn, true, [] {});
}
