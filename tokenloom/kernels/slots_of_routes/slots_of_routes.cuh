// Expert ids to physical slots: which of its expert's slots each route goes to.
//
// A route of expert e goes to slot number (rank + n) % (slots of e), where n is its index among this rank's routes of e.
// Each block takes as many routes as it has threads. It counts the routes before them by itself: ids are few bytes, and
// blocks that told each other would wait longer. Experts with one slot are not counted.
#pragma once
#include "device/ptx/grid.cuh"
#include "device/tile/routes.cuh"
#include "device/tile/shares.cuh"

struct SlotsOfRoutesArgs {
    const void* topk_ids;  // [routes], int32 or int64
    int32* slot_ids;       // [routes], rank * slots_per_rank + slot, or -1
    const int32* starts;   // [E + 1], where the slots of each expert begin in `slots`
    const int32* slots;    // slots of all experts, ascending for each
    int64 routes;
    int32 ids_are_int64;
    int32 rank;
    const Share* shares;  // by a split: of all slots
    const int32* heads;   // [W * S], the share of each slot that begins first, or -1
    const int32* before;  // [W * S], routes of earlier sources to each slot by the placement
};

// By a split, a bit beside where an expert's slots begin, in shared memory: its routes are counted.
constexpr int32 kCounted = 1 << 30;

template <class Shape>
__device__ __forceinline__ int32 begin_of(const int32* starts, int32 expert) {
    return Shape::split ? starts[expert] & ~kCounted : starts[expert];
}

template <class Shape>
__device__ __forceinline__ int32 replicas_of(const int32* starts, int32 expert) {
    return begin_of<Shape>(starts, expert + 1) - begin_of<Shape>(starts, expert);
}

template <class Shape>
__device__ __forceinline__ bool is_counted(const int32* starts, int32 expert) {
    return Shape::split ? (starts[expert] & kCounted) != 0 : replicas_of<Shape>(starts, expert) > 1;
}

// Adds the routes before `end` to the counts of experts that are counted.
template <class Shape, class Id>
__device__ void count_routes_before(const Id* ids, int64 end, const int32* starts, int32* counts) {
    constexpr int kAtOnce = 16;  // loads that are on their way together
    for (int64 i = threadIdx.x; i < end; i += kAtOnce * Shape::threads) {
        Id id[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) id[j] = i + j * Shape::threads < end ? ids[i + j * Shape::threads] : -1;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            const int32 expert = expert_of_id<Shape::num_experts>(id[j]);
            if (expert >= 0 && is_counted<Shape>(starts, expert)) atomicAdd(&counts[expert], 1);
        }
    }
}

template <class Shape>
__device__ void slots_of_routes(const SlotsOfRoutesArgs& args) {
    __shared__ int32 starts[Shape::num_experts + 1];
    __shared__ int32 counts[Shape::num_experts];
    const int64 first = static_cast<int64>(blockIdx.x) * Shape::threads, route = first + threadIdx.x;
    let_next_kernel_begin();  // a dispatch, which waits for this one
    const int32 expert =
        route < args.routes ? expert_of<Shape::num_experts>(args.topk_ids, args.ids_are_int64, route) : -1;
    bool any_counted = false;
    for (int e = threadIdx.x; e < Shape::num_experts; e += Shape::threads) {
        const int32 begin = args.starts[e], end = args.starts[e + 1];
        starts[e] = begin, counts[e] = 0;
        if (e == Shape::num_experts - 1) starts[e + 1] = end;
        any_counted = any_counted || end - begin > 1;
        if constexpr (Shape::split) {
            if (end - begin > 1 || (end > begin && args.heads[args.slots[begin]] >= 0))
                starts[e] |= kCounted, any_counted = true;
        }
    }
    any_counted = __syncthreads_or(any_counted);
    const int32 begin = expert >= 0 ? begin_of<Shape>(starts, expert) : 0;
    const int32 replicas = expert >= 0 ? replicas_of<Shape>(starts, expert) : 0;
    if (!any_counted) {
        if (route < args.routes) args.slot_ids[route] = replicas > 0 ? args.slots[begin] : -1;
        return;
    }
    if (args.ids_are_int64)
        count_routes_before<Shape>(static_cast<const int64*>(args.topk_ids), first, starts, counts);
    else count_routes_before<Shape>(static_cast<const int32*>(args.topk_ids), first, starts, counts);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool counts_here = Shape::split ? expert >= 0 && is_counted<Shape>(starts, expert) : replicas > 1;
    const uint32 same = __match_any_sync(~0u, counts_here ? expert : -1);  // faster, the fewer there are to tell apart
    const int32 earlier = __popc(same & ((1u << lane) - 1));
    int32 index = earlier;
    // Warps take turns, since their order is that of the routes.
    for (int w = 0; w < Shape::threads / 32; ++w) {
        __syncthreads();
        if (w != warp) continue;
        if (counts_here) index += counts[expert];
        __syncwarp();
        if (counts_here && earlier == 0) counts[expert] += __popc(same);
    }
    if (route < args.routes) {
        int32 slot = replicas > 0 ? args.slots[begin + (args.rank + index) % replicas] : -1;
        if constexpr (Shape::split) {
            if (counts_here)
                slot = target_of_route(args.shares, args.heads[slot], slot, args.before[slot] + index / replicas);
        }
        args.slot_ids[route] = slot;
    }
}
