// Work that the warps of all blocks of a kernel share.
#pragma once
#include "device/ptx/memory.cuh"

// Each warp begins with an item of its own, then takes what nobody has: SMs send at very different rates when the
// links are full. The next claim is on its way while an item is worked on.
struct Claims {
    uint32* counter;
    uint32 own;
    int lane;

    __device__ Claims(uint32* counter_, int lane_) : counter(counter_), lane(lane_) { advance(); }
    __device__ void advance() { own = lane == 0 ? add_relaxed_gpu(counter, 1) : 0; }
    __device__ uint32 take() {
        const uint32 item = __shfl_sync(~0u, own, 0);
        advance();
        return item;
    }
};
