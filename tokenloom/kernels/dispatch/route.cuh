// Routing inside the dispatch kernel: which place, at its destination, every row of this block goes to.
//
// Tokens are split into one contiguous chunk per block. A block counts everything before its chunk by itself, so that
// blocks need not talk to each other; the last block, which thereby knows the totals, sends them to all ranks. From
// all ranks' counts every block computes the same prefix sums, and so the exact place of each of its rows.
#pragma once
#include "kernels/dispatch/args.cuh"

template <class Shape>
struct RouteShared {
    static constexpr int kCounts = Shape::num_ranks + Shape::num_experts;
    static constexpr int kWarps = Shape::threads / 32;
    int32 before[kCounts];            // rows per rank, then routes per expert, of the tokens before this chunk
    int32 chunk[kCounts];             // the same of this chunk
    int32 row_base[Shape::num_ranks]; // first row of this source among the rows that rank r receives
    int32 place_base[Shape::layout == kLayoutExpert ? Shape::num_experts : 1];  // first place of this source's routes
    int32 expert_total[Shape::layout == kLayoutExpert ? Shape::num_experts : 1];
    int32 needed[Shape::num_ranks];   // rows that rank r needs
    int32 running[kWarps][Shape::layout == kLayoutExpert ? kCounts : Shape::num_ranks];
};

struct Chunk {
    int32 begin, end;
};

__device__ __forceinline__ Chunk chunk_of(int32 num_tokens, int32 block, int32 num_blocks) {
    const int32 size = (num_tokens + num_blocks - 1) / num_blocks;
    const int32 begin = min(block * size, num_tokens);
    return {begin, min(begin + size, num_tokens)};
}

// Expert of route `index` (token * K + k), -1 for none; ids out of range count as none, never as addresses.
template <class Shape>
__device__ __forceinline__ int32 expert_of(const DispatchArgs& args, int64 index) {
    const int64 id = args.ids_are_int64 ? static_cast<const int64*>(args.topk_ids)[index]
                                        : static_cast<const int32*>(args.topk_ids)[index];
    return id >= 0 && id < Shape::num_experts ? static_cast<int32>(id) : -1;
}

template <class Shape>
__device__ __forceinline__ uint32 ranks_of(const DispatchArgs& args, int32 token) {
    uint32 ranks = 0;
#pragma unroll
    for (int k = 0; k < Shape::top_k; ++k) {
        const int32 expert = expert_of<Shape>(args, static_cast<int64>(token) * Shape::top_k + k);
        if (expert >= 0) ranks |= 1u << (expert / Shape::experts_per_rank);
    }
    return ranks;
}

// Adds the counts of tokens begin..end-1 to counts[W + E] in shared memory.
template <class Shape>
__device__ void count_routes(const DispatchArgs& args, int32 begin, int32 end, int32* counts) {
    const int lane = threadIdx.x % 32;
    int32 rows_of_lane = 0;  // lane r counts the rows for rank r
    for (int32 first = begin + (threadIdx.x - lane); first < end; first += Shape::threads) {
        const int32 token = first + lane;
        uint32 ranks = 0;
        if (token < end) {
#pragma unroll
            for (int k = 0; k < Shape::top_k; ++k) {
                const int32 expert = expert_of<Shape>(args, static_cast<int64>(token) * Shape::top_k + k);
                if (expert < 0) continue;
                ranks |= 1u << (expert / Shape::experts_per_rank);
                atomicAdd(&counts[Shape::num_ranks + expert], 1);
            }
        }
#pragma unroll
        for (int r = 0; r < Shape::num_ranks; ++r) {
            const int32 rows = __popc(__ballot_sync(~0u, (ranks >> r) & 1));
            if (lane == r) rows_of_lane += rows;
        }
    }
    if (lane < Shape::num_ranks && rows_of_lane != 0) atomicAdd(&counts[lane], rows_of_lane);
}

// Counts of all ranks, as they lie in this rank's control buffer.
template <class Shape>
struct AllCounts {
    static constexpr int kStride = kHeaderWords + RouteShared<Shape>::kCounts;
    const int32* first;
    __device__ int32 rows(int source, int rank) const { return first[source * kStride + rank]; }
    __device__ int32 routes(int source, int expert) const { return first[source * kStride + Shape::num_ranks + expert]; }
};

// Prefix sums over all ranks' counts: row_base, place_base, needed.
template <class Shape>
__device__ void find_bases(const DispatchArgs& args, RouteShared<Shape>& shared, const AllCounts<Shape>& counts) {
    if (threadIdx.x < Shape::num_ranks) {
        int32 base = 0, total = 0;
        for (int s = 0; s < Shape::num_ranks; ++s) {
            if (s == args.call.rank) base = total;
            total += counts.rows(s, threadIdx.x);
        }
        shared.row_base[threadIdx.x] = Shape::layout == kLayoutRank ? args.call.rank * args.max_tokens : base;
        shared.needed[threadIdx.x] = total;
    }
    if constexpr (Shape::layout == kLayoutExpert) {
        for (int e = threadIdx.x; e < Shape::num_experts; e += Shape::threads) {
            int32 base = 0, total = 0;
            for (int s = 0; s < Shape::num_ranks; ++s) {
                if (s == args.call.rank) base = total;
                total += counts.routes(s, e);
            }
            shared.place_base[e] = base;
            shared.expert_total[e] = total;
        }
        __syncthreads();
        if (threadIdx.x < Shape::num_ranks) {
            int32 start = 0;
            for (int e = threadIdx.x * Shape::experts_per_rank; e < (threadIdx.x + 1) * Shape::experts_per_rank; ++e) {
                shared.place_base[e] += start;
                start += (shared.expert_total[e] + args.alignment - 1) / args.alignment * args.alignment;
            }
            shared.needed[threadIdx.x] = start;
        }
    }
    __syncthreads();
}

// slots[t][r] for the tokens of this chunk: how many earlier tokens of this source go to rank r.
template <class Shape>
__device__ void find_slots(const DispatchArgs& args, RouteShared<Shape>& shared, Chunk chunk) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int32 first = chunk.begin; first < chunk.end; first += Shape::threads) {
        const int32 token = first + threadIdx.x;
        const uint32 ranks = token < chunk.end ? ranks_of<Shape>(args, token) : 0;
        int32 in_warp[Shape::num_ranks];
#pragma unroll
        for (int r = 0; r < Shape::num_ranks; ++r) {
            const uint32 going = __ballot_sync(~0u, (ranks >> r) & 1);
            in_warp[r] = __popc(going & ((1u << lane) - 1));
            if (lane == 0) shared.running[warp][r] = __popc(going);
        }
        __syncthreads();
        if (threadIdx.x < Shape::num_ranks) {  // counts of the warps -> first slot of each warp
            int32 slot = shared.before[threadIdx.x];
            for (int w = 0; w < RouteShared<Shape>::kWarps; ++w) {
                const int32 rows = shared.running[w][threadIdx.x];
                shared.running[w][threadIdx.x] = slot;
                slot += rows;
            }
            shared.before[threadIdx.x] = slot;
        }
        __syncthreads();
        if (token < chunk.end) {
#pragma unroll
            for (int r = 0; r < Shape::num_ranks; ++r)
                args.slots[static_cast<int64>(token) * Shape::num_ranks + r] =
                    (ranks >> r) & 1 ? shared.running[warp][r] + in_warp[r] : -1;
        }
        __syncthreads();
    }
}

// Layout expert: places[t][k] for the tokens of this chunk, in the order (token, k) within each expert.
// Each warp takes a contiguous part of a tile's routes: it counts them first, then ranks equal experts lane by lane.
template <class Shape>
__device__ void find_places(const DispatchArgs& args, RouteShared<Shape>& shared, Chunk chunk, int32* places) {
    constexpr int kWarps = RouteShared<Shape>::kWarps;
    constexpr int kRoutesOfWarp = 32 * Shape::top_k;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64 end = static_cast<int64>(chunk.end) * Shape::top_k;
    int32* counts = shared.running[warp] + Shape::num_ranks;
    for (int64 tile = static_cast<int64>(chunk.begin) * Shape::top_k; tile < end; tile += kWarps * kRoutesOfWarp) {
        const int64 first = tile + warp * kRoutesOfWarp;
        for (int e = threadIdx.x; e < kWarps * Shape::num_experts; e += Shape::threads)
            shared.running[e / Shape::num_experts][Shape::num_ranks + e % Shape::num_experts] = 0;
        __syncthreads();
        for (int i = lane; i < kRoutesOfWarp; i += 32) {
            const int32 expert = first + i < end ? expert_of<Shape>(args, first + i) : -1;
            if (expert >= 0) atomicAdd(&counts[expert], 1);
        }
        __syncthreads();
        for (int e = threadIdx.x; e < Shape::num_experts; e += Shape::threads) {
            int32 next = shared.before[Shape::num_ranks + e];
            for (int w = 0; w < kWarps; ++w) {
                const int32 routes = shared.running[w][Shape::num_ranks + e];
                shared.running[w][Shape::num_ranks + e] = next;
                next += routes;
            }
            shared.before[Shape::num_ranks + e] = next;
        }
        __syncthreads();
        for (int i = lane; i < kRoutesOfWarp; i += 32) {
            const int32 expert = first + i < end ? expert_of<Shape>(args, first + i) : -1;
            const uint32 same = __match_any_sync(~0u, expert);
            const int32 earlier = __popc(same & ((1u << lane) - 1));
            const int32 next = expert >= 0 ? counts[expert] : 0;
            __syncwarp();
            if (expert >= 0) {
                if (earlier == 0) counts[expert] = next + __popc(same);
                places[first + i] = shared.place_base[expert] + next + earlier;
            } else if (first + i < end) {
                places[first + i] = -1;
            }
            __syncwarp();
        }
        __syncthreads();
    }
}
