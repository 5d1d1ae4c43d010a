// Which received rows each local expert takes: its routes in the order (source rank, token, k), as lists that the GEMMs
// follow. A block makes the list of one expert: it reads all ids that were received, in order, and counts its own.
#pragma once
#include "device/ptx/memory.cuh"

struct RouteListsArgs {
    // From the dispatch, layout token; R rows were received.
    const int32* ids;            // [>= R][K] local expert of each route, or -1
    const float* weights;        // [>= R][K]
    const int32* row_tokens;     // [>= R] the token at home that a row is
    const int32* num_rows;       // [1] R
    const int32* source_counts;  // [W] rows from each rank
    const int32* expert_counts;  // [L] routes to each expert
    // Where results go home to: a row for each token and k.
    const uint64* peers;  // [W] device memory: every rank's buffer
    uint64 home;          // in it: [M][K] rows of `home_row_bytes`
    uint64 home_row_bytes;
    // The lists, one behind the other.
    int32* offsets;      // [L + 1] first place of each expert
    int32* rows;         // [places] received row
    float* row_weights;  // [places]
    uint64* targets;     // [places] address of the row at home
    int32* stats;        // null, or [L]: routes are added to it
    const uint32* fault_claimed;  // set if a wait of this rank has expired: then what was received is not to be trusted
};

template <class Shape>
struct RouteListsShared {
    static constexpr int kWarps = Shape::threads / 32;
    int32 ends[Shape::num_ranks];  // of each source's rows
    int32 found[kWarps];           // matches of each warp
    int32 begin, end;              // places of this expert
};

template <class Shape>
__device__ __forceinline__ void begin_list(const RouteListsArgs& args, RouteListsShared<Shape>& shared, int expert) {
    if (threadIdx.x < 32) {
        int32 before = 0;
        const bool trusted = load_relaxed_sys(args.fault_claimed) == 0;
        for (int e = threadIdx.x; e < expert && trusted; e += 32) before += args.expert_counts[e];
#pragma unroll
        for (int other = 16; other > 0; other /= 2) before += __shfl_xor_sync(~0u, before, other);
        const int32 own = trusted ? args.expert_counts[expert] : 0;
        if (threadIdx.x == 0) {
            shared.begin = before;
            shared.end = before + own;
            args.offsets[expert] = before;
            if (expert + 1 == Shape::experts_per_rank) args.offsets[expert + 1] = before + own;
            if (args.stats != nullptr) args.stats[expert] += own;
        }
    }
    for (int s = threadIdx.x; s < Shape::num_ranks; s += Shape::threads) {
        int32 end = 0;
        for (int i = 0; i <= s; ++i) end += args.source_counts[i];
        shared.ends[s] = end;
    }
    __syncthreads();
}

template <class Shape>
__device__ __forceinline__ void add_route(const RouteListsArgs& args, const RouteListsShared<Shape>& shared,
                                          int32 route, int32 place) {
    const int32 row = route / Shape::top_k, k = route % Shape::top_k;
    int source = 0;
    while (row >= shared.ends[source]) ++source;
    args.rows[place] = row;
    args.row_weights[place] = args.weights[route];
    args.targets[place] = args.peers[source] + args.home +
                          (static_cast<uint64>(args.row_tokens[row]) * Shape::top_k + k) * args.home_row_bytes;
}

template <class Shape>
__device__ void route_lists(const RouteListsArgs& args) {
    __shared__ RouteListsShared<Shape> shared;
    constexpr int kWarps = RouteListsShared<Shape>::kWarps, kPerThread = 4;
    const int expert = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    begin_list<Shape>(args, shared, expert);
    const int32 routes = *args.num_rows * Shape::top_k, end = shared.end;
    int32 place = shared.begin;
    for (int32 first = 0; first < routes && place < end; first += Shape::threads * kPerThread) {
        const int32 own = first + threadIdx.x * kPerThread;
        uint32 matches = 0;
#pragma unroll
        for (int i = 0; i < kPerThread; ++i)
            if (own + i < routes && args.ids[own + i] == expert) matches |= 1u << i;
        int32 through = __popc(matches);  // matches of the warp up to this lane
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int32 earlier = __shfl_up_sync(~0u, through, step);
            if (lane >= step) through += earlier;
        }
        if (lane == 31) shared.found[warp] = through;
        __syncthreads();
        int32 before = place, all = 0;
        for (int w = 0; w < kWarps; ++w) {
            if (w < warp) before += shared.found[w];
            all += shared.found[w];
        }
        before += through - __popc(matches);
        for (uint32 rest = matches; rest != 0 && before < end; rest &= rest - 1)
            add_route<Shape>(args, shared, own + __ffs(rest) - 1, before++);
        place += all;
        __syncthreads();  // before `found` is written again
    }
}
