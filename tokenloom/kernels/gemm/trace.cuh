// When each role of a block works on which tile, for people to look at; in variants that are made for it.
#pragma once
#include "device/ptx/memory.cuh"
#include "kernels/gemm/args.cuh"

enum TraceRole : int { kLoads = 0, kGathers = 1, kMultiplies = 2, kLeaves = 4, kStores = 6, kTraceRoles = 7 };
constexpr uint32 kTracedTiles = 128;  // of a block; later ones are left out

// `end` 0 or 1; one thread of a role calls it. Of math warpgroups, `role` is the first one's.
template <class Shape>
__device__ __forceinline__ void trace(const GroupedGemmArgs& args, int role, uint32 tile, int end) {
    if constexpr (Shape::traced != 0)
        if (tile < kTracedTiles)
            args.trace[((blockIdx.x * kTraceRoles + role) * kTracedTiles + tile) * 2 + end] = global_timer_ns();
}
