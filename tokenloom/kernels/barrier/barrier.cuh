// A barrier of all ranks: opens a call and does nothing else. What comes behind it on this rank's stream, with `opened`
// set, sees what all other ranks' streams wrote before their barriers, in this GPU's memory too.
//
//   the one block   clears what it is asked to, tells all ranks that this one is here, and waits for all of them; then
//                   it writes down whether they mean the same call, and advances the epoch       (transport/call.cuh)
//
// One block, so that nobody who waits keeps an SM from work that others wait for. README.md says who uses it.
#pragma once
#include "device/ptx/grid.cuh"
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
    __shared__ alignas(16) int32 header[kHeaderWords];
    constexpr int kCounts = Shape::num_ranks + Shape::num_experts;
    wait_for_earlier_kernels();
    if (threadIdx.x == 0) mark(args.call, kBegun);
    for (int i = threadIdx.x; i < args.num_cleared; i += Shape::threads) args.cleared[i] = 0;
    const Turn turn = turn_of(args.call);
    Opened opened = Opened::kExpired;
    if (!__syncthreads_or(has_expired(deadline_of(args.call)))) {
        announce_call<Shape::num_ranks, kCounts, Shape::threads>(args.call, turn, header);
        if (threadIdx.x == 0) mark(args.call, kSent);
        opened = await_call<Shape::num_ranks, kCounts, Shape::threads>(args.call, turn);
    }
    if (threadIdx.x == 0) mark(args.call, kHeard);
    let_next_kernel_begin();  // not before: it takes SMs from whoever computes while ranks wait for each other
    if (threadIdx.x == 0) *args.opened = opened == Opened::kGo;
    close_call<Shape::num_ranks>(args.call, turn, opened == Opened::kGo, [] {});
}
