// Shares of a batch's split: which routes of a slot are computed in another one.
#pragma once
#include "device/ptx/types.cuh"

struct alignas(16) Share {  // routes of `slot` from number `first` up to the next share of it, or to its last one
    int32 slot;
    int32 first;
    int32 target;  // slot that computes them
    int32 next;    // share of the slot that begins next, or -1
};

// The slot that computes a route, which is number `place` of all ranks' routes to its slot by the placement.
__device__ __forceinline__ int32 target_of_route(const Share* shares, int32 head, int32 slot, int32 place) {
    int32 target = slot;
    while (head >= 0) {
        const Share share = shares[head];
        if (share.first > place) break;
        target = share.target, head = share.next;
    }
    return target;
}
