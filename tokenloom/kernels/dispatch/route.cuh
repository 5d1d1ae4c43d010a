// Routing inside the dispatch kernel: which place, at its destination, every row of this block goes to.
//
// Blocks count the routes of their chunks (device/roles/count_routes.cuh). From all ranks' counts every block computes
// the same prefix sums, and so the place of each row.
#pragma once
#include "device/roles/count_routes.cuh"
#include "kernels/dispatch/args.cuh"

template <class Shape>
struct RouteShared {
    static constexpr int kCounts = kRouteCounts<Shape>;
    alignas(16) int32 header[header_words<kCounts>];  // what the last block announces
    int32 before[kCounts];                   // rows per rank, then routes per expert, of the tokens before this chunk
    int32 chunk[kCounts];                    // the same of this chunk
    int32 row_base[Shape::num_ranks];        // first row of this source among the rows that rank r receives
    int32 received_base[Shape::num_ranks];   // first received row that comes from source s
    int32 received[Shape::num_ranks];        // how many do
    int32 needed[Shape::num_ranks];          // rows that rank r, or in layout slots its fullest expert, needs
    int32 expert_total[Shape::num_experts];  // routes of all ranks
    // Where this source's routes begin: their first place, or in layout slots the routes of the sources before.
    int32 place_base[Places<Shape>::kDirect ? Shape::num_experts : 1];
    // First place of each of this rank's experts, and where the last one's end (layout expert).
    int32 own_start[Places<Shape>::kOfRoutes ? Shape::experts_per_rank + 1 : 1];
};

// Counts of a part of a chunk, warp by warp; the ring of rows takes its memory later.
template <class Shape>
struct RunningCounts {
    static constexpr int kWarps = Shape::threads / 32;
    static constexpr int kPlaceWarps = Shape::place_warps;  // fewer where counts of all experts take much memory
    int32 rows[kWarps][Shape::num_ranks];
    int32 routes[kPlaceWarps][Places<Shape>::kOfRoutes ? Shape::num_experts : 1];
};

template <class Shape>
__device__ __forceinline__ RankMask<Shape::num_ranks> ranks_of(const DispatchArgs& args, Turn turn, int32 token) {
    RankMask<Shape::num_ranks> ranks = 0;
#pragma unroll
    for (int k = 0; k < Shape::top_k; ++k) {
        const int32 expert = expert_of<Shape>(args, static_cast<int64>(token) * Shape::top_k + k);
        if (expert >= 0) ranks |= RankMask<Shape::num_ranks>{1} << (expert / Shape::experts_per_rank);
    }
    return ranks & ~turn.mask<Shape::num_ranks>();
}

// One warp: where each expert's places begin on a rank, and how many it needs.
template <class Shape>
__device__ void find_starts(const DispatchArgs& args, RouteShared<Shape>& shared, int rank, int lane) {
    constexpr int kExperts = Shape::experts_per_rank;
    int32 start = 0, most = 0;
    for (int first = 0; first < kExperts; first += 32) {
        const int l = first + lane;
        const int32 routes = l < kExperts ? shared.expert_total[rank * kExperts + l] : 0;
        const int32 padded = (routes + args.alignment - 1) / args.alignment * args.alignment;
        int32 end = padded;  // of this lane's expert and those of all lanes before
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int32 earlier = __shfl_up_sync(~0u, end, step);
            if (lane >= step) end += earlier;
        }
        const int32 begin = start + end - padded;
        if (l < kExperts) {
            if constexpr (Shape::layout == kLayoutExpert && Places<Shape>::kDirect)
                shared.place_base[rank * kExperts + l] += begin;
            if (rank == args.call.rank) shared.own_start[l] = begin;
        }
        start += __shfl_sync(~0u, end, 31);
        most = max(most, routes);
    }
    if (rank == args.call.rank && lane == 0) shared.own_start[kExperts] = start;
    if constexpr (Shape::layout == kLayoutSlots) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) most = max(most, __shfl_xor_sync(~0u, most, step));
    }
    if (lane == 0) shared.needed[rank] = Shape::layout == kLayoutSlots ? most : start;
}

// Layout slots: what a source has of the places of a local expert, of whose routes [begin, end) are its own.
template <class Shape>
__device__ __forceinline__ void publish_range(const DispatchArgs& args, int expert, int source, int32 begin, int32 end) {
    int32* range = args.slot_ranges + 2 * (expert * Shape::num_ranks + source);
    range[0] = min(begin, args.capacity);
    range[1] = min(end, args.capacity) - range[0];
}

// Prefix sums over all ranks' counts. Every block makes them, and so knows the place of each of its rows. Block 0 also
// writes down the ranges of layout slots.
template <class Shape>
__device__ void find_bases(const DispatchArgs& args, RouteShared<Shape>& shared, const AllCounts<Shape>& counts) {
    if (threadIdx.x < Shape::num_ranks) {
        const int i = threadIdx.x;
        int32 base = 0, total = 0, received = 0;
        for (int s = 0; s < Shape::num_ranks; ++s) {
            if (s == args.call.rank) base = total;
            if (s < i) received += counts.rows(s, args.call.rank);
            total += counts.rows(s, i);
        }
        shared.row_base[i] = Places<Shape>::kFixed ? args.call.rank * args.max_tokens : base;
        shared.needed[i] = total;
        shared.received_base[i] = received;
        shared.received[i] = counts.rows(i, args.call.rank);
    }
    for (int e = threadIdx.x; e < Shape::num_experts; e += Shape::threads) {
        int32 base = 0, total = 0;
        for (int s = 0; s < Shape::num_ranks; ++s) {
            if (s == args.call.rank) base = total;
            const int32 begin = total;
            total += counts.routes(s, e);
            if (Shape::layout == kLayoutSlots && blockIdx.x == 0 && e / Shape::experts_per_rank == args.call.rank)
                publish_range<Shape>(args, e % Shape::experts_per_rank, s, begin, total);
        }
        shared.expert_total[e] = total;
        if constexpr (Places<Shape>::kDirect) shared.place_base[e] = base;
    }
    __syncthreads();
    if constexpr (Places<Shape>::kOfRoutes) {
        for (int r = threadIdx.x / 32; r < Shape::num_ranks; r += Shape::threads / 32)
            find_starts<Shape>(args, shared, r, threadIdx.x % 32);
        __syncthreads();
    }
}

// slots[t][r] for the tokens of this chunk: how many earlier tokens of this source go to rank r.
template <class Shape>
__device__ void find_slots(const DispatchArgs& args, RouteShared<Shape>& shared, RunningCounts<Shape>& running,
                           Chunk chunk, Turn turn) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int32 first = chunk.begin; first < chunk.end; first += Shape::threads) {
        const int32 token = first + threadIdx.x;
        const auto ranks = token < chunk.end ? ranks_of<Shape>(args, turn, token) : 0;
        int32 in_warp[Shape::num_ranks];
#pragma unroll
        for (int r = 0; r < Shape::num_ranks; ++r) {
            const uint32 going = __ballot_sync(~0u, (ranks >> r) & 1);
            in_warp[r] = __popc(going & ((1u << lane) - 1));
            if (lane == 0) running.rows[warp][r] = __popc(going);
        }
        __syncthreads();
        if (threadIdx.x < Shape::num_ranks) {  // counts of the warps -> first slot of each warp
            int32 slot = shared.before[threadIdx.x];
            for (int w = 0; w < running.kWarps; ++w) {
                const int32 rows = running.rows[w][threadIdx.x];
                running.rows[w][threadIdx.x] = slot;
                slot += rows;
            }
            shared.before[threadIdx.x] = slot;
        }
        __syncthreads();
        if (token < chunk.end) {
#pragma unroll
            for (int r = 0; r < Shape::num_ranks; ++r)
                args.slots[static_cast<int64>(token) * Shape::num_ranks + r] =
                    (ranks >> r) & 1 ? running.rows[warp][r] + in_warp[r] : -1;
        }
        __syncthreads();
    }
}

// Layouts expert and slots: places[t][k] for the tokens of this chunk, in the order (token, k) within the routes of this
// source to each expert. What is sent directly adds where those begin (place_base).
// Each warp takes a contiguous part of a tile's routes: it counts them first, then ranks equal experts lane by lane. Few
// routes are ranked by one warp, which takes less than to count for it.
template <class Shape>
__device__ void find_places(const DispatchArgs& args, RouteShared<Shape>& shared, RunningCounts<Shape>& running,
                            Chunk chunk, int32* places) {
    constexpr int kWarps = RunningCounts<Shape>::kPlaceWarps;
    constexpr int kRoutesOfWarp = 32 * Shape::top_k, kFew = 96;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64 begin = static_cast<int64>(chunk.begin) * Shape::top_k;
    const int64 end = static_cast<int64>(chunk.end) * Shape::top_k;
    const auto rank_routes = [&](int64 first, int routes, int32* next_of) {  // one warp
        for (int i = lane; i < routes; i += 32) {
            const int32 expert = first + i < end ? expert_of<Shape>(args, first + i) : -1;
            const uint32 same = __match_any_sync(~0u, expert);
            const int32 earlier = __popc(same & ((1u << lane) - 1));
            const int32 next = expert >= 0 ? next_of[expert] : 0;
            __syncwarp();
            if (expert >= 0) {
                if (earlier == 0) next_of[expert] = next + __popc(same);
                places[first + i] = next + earlier;
            } else if (first + i < end) {
                places[first + i] = -1;
            }
            __syncwarp();
        }
    };
    if (end - begin <= kFew) {
        if (warp == 0) rank_routes(begin, kFew, shared.before + Shape::num_ranks);
        return;
    }
    const bool takes_part = warp < kWarps;
    int32* counts = running.routes[takes_part ? warp : 0];
    for (int64 tile = begin; tile < end; tile += kWarps * kRoutesOfWarp) {
        const int64 first = tile + warp * kRoutesOfWarp;
        for (int e = threadIdx.x; e < kWarps * Shape::num_experts; e += Shape::threads)
            running.routes[e / Shape::num_experts][e % Shape::num_experts] = 0;
        __syncthreads();
        for (int i = lane; takes_part && i < kRoutesOfWarp; i += 32) {
            const int32 expert = first + i < end ? expert_of<Shape>(args, first + i) : -1;
            if (expert >= 0) atomicAdd(&counts[expert], 1);
        }
        __syncthreads();
        for (int e = threadIdx.x; e < Shape::num_experts; e += Shape::threads) {
            int32 next = shared.before[Shape::num_ranks + e];
            for (int w = 0; w < kWarps; ++w) {
                const int32 routes = running.routes[w][e];
                running.routes[w][e] = next;
                next += routes;
            }
            shared.before[Shape::num_ranks + e] = next;
        }
        __syncthreads();
        if (takes_part) rank_routes(first, kRoutesOfWarp, counts);
        __syncthreads();
    }
}
