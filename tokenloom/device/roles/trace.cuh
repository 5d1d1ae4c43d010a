// When each role of a block works on which tile, for people to look at, in variants that are compiled for it.
#pragma once
#include "device/ptx/memory.cuh"

// A math warpgroup has the number given here plus its own. A block starts once, which counts as its tile 0.
enum TraceRole : int { kLoads = 0, kMultiplies = 1, kStages = 3, kStores = 5, kStarts = 6, kTraceRoles = 7 };
enum TraceEnd : int { kBegins = 0, kEnds = 1 };
constexpr uint32 kTracedTiles = 128;  // of a block; later ones are left out

template <bool kTraced>
struct Trace {
    uint64* const& times;  // [blocks][kTraceRoles][kTracedTiles][2] nanoseconds

    // One thread of a role calls it. `tile` counts the tiles of the block.
    __device__ __forceinline__ void mark(int role, uint32 tile, TraceEnd end) const {
        if constexpr (kTraced)
            if (tile < kTracedTiles)
                times[((blockIdx.x * kTraceRoles + role) * kTracedTiles + tile) * 2 + end] = global_timer_ns();
    }
};

// When a block of another kernel works: null, or [blocks][2] nanoseconds. One thread of each warp calls it: of several
// warps the last one counts.
__device__ __forceinline__ void mark_block(uint64* times, TraceEnd end) {
    if (times != nullptr) times[blockIdx.x * 2 + end] = global_timer_ns();
}
