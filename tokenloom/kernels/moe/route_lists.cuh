// Which received rows each local expert takes, as lists that the GEMMs follow; where there is room, the rows themselves
// too, in the order of the lists, so that GEMM1 need not gather them.
//
// Blocks take chunks of the received routes, in no order: an expert's list is in whatever order they came to it. That
// shows nowhere: a row's result does not depend on its place, and has an address of its own.
//
// Shared experts are this rank's last ones. Their lists are all of its own tokens, which are put, quantised, behind the
// received rows.
#pragma once
#include "device/ptx/memory.cuh"
#include "device/tile/fp8.cuh"

struct RouteListsArgs {
    // From the dispatch, layout token; R rows were received.
    const int32* ids;            // [>= R][K] local expert of each route, or -1
    const float* weights;        // [>= R][K]
    const int32* row_tokens;     // [>= R] the token at home that a row is
    const int32* num_rows;       // [1] R
    const int32* source_counts;  // [W] rows from each rank
    const int32* expert_counts;  // [L] routes to each expert, of those with routes
    unsigned char* values;       // [>= R][H] E4M3; own tokens from row Shape::received_rows on
    float* scales;               // [>= R][H / 128]
    // With shared experts: this rank's tokens, as they were given.
    const unsigned char* x;      // [T][H] of Shape::x_dtype, or E4M3
    const float* x_scales;       // beside E4M3: [T][H / 128]
    int32 num_tokens;
    int32 rank;
    // Where results go home to: a row for each token and k, then for each shared expert.
    const uint64* peers;  // [W] device memory: every rank's buffer
    uint64 home;          // in it: [M][K + S] rows of bfloat16
    // The lists, one behind the other.
    int32* offsets;      // [L + S + 1] first place of each expert
    int32* rows;         // [places] received row
    float* row_weights;  // [places]
    uint64* targets;     // [places] address of the row at home
    int32* taken;        // [L] places taken of each list; 0 before the call
    int32* stats;        // null, or [L]: routes are added to it
    // Copies of rows lie behind the activations that GEMM1 will write, in the same buffer of `copy_room` rows of H.
    unsigned char* copies;
    int32* copied;       // [2]: the first n places' rows are rows first.. of the buffer
    int32 copy_room;     // 0: none are wanted
    int32 padding;
    const uint32* fault_claimed;  // set if a wait of this rank has expired: then what was received is not to be trusted
};

template <class Shape>
struct RouteListsShared {
    static constexpr int kExperts = Shape::experts_per_rank + Shape::shared_experts;
    static constexpr int kThreadRoutes = 2;
    static constexpr int kMostChunkRows = Shape::threads * kThreadRoutes / Shape::top_k;
    static constexpr int kChunk = kMostChunkRows * Shape::top_k;  // routes
    int32 places[kChunk];          // of the chunk's routes, or -1
    int32 ends[Shape::num_ranks];  // of each source's rows
    int32 copied[2];
    int32 offsets[kExperts + 1];
    int32 found[Shape::experts_per_rank];  // of the chunk, for each expert; then where they begin
};

template <class Shape>
__device__ __forceinline__ void begin_lists(const RouteListsArgs& args, RouteListsShared<Shape>& shared) {
    constexpr int kExperts = RouteListsShared<Shape>::kExperts, kRouted = Shape::experts_per_rank;
    const int lane = threadIdx.x;
    if (lane < 32) {
        const bool trusted = load_relaxed_sys(args.fault_claimed) == 0;
        int32 before = 0;
        for (int first = 0; first < kExperts; first += 32) {
            const int e = first + lane;
            int32 own = 0;
            if (e < kExperts && trusted) own = e < kRouted ? args.expert_counts[e] : args.num_tokens;
            int32 through = own;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int32 earlier = __shfl_up_sync(~0u, through, step);
                if (lane >= step) through += earlier;
            }
            if (e < kExperts) {
                shared.offsets[e] = before + through - own;
                if (blockIdx.x == 0 && e < kRouted && args.stats != nullptr) args.stats[e] += own;
            }
            before += __shfl_sync(~0u, through, 31);
        }
        if (lane == 0) {
            shared.offsets[kExperts] = before;
            const auto first = static_cast<int32>(
                (static_cast<int64>(before) * Shape::intermediate + Shape::hidden - 1) / Shape::hidden);
            shared.copied[0] = first;
            shared.copied[1] = max(min(before, args.copy_room - first), 0);
        }
    }
    for (int s = threadIdx.x; s < Shape::num_ranks; s += Shape::threads) {
        int32 end = 0;
        for (int i = 0; i <= s; ++i) end += args.source_counts[i];
        shared.ends[s] = end;
    }
    __syncthreads();
    if (blockIdx.x != 0) return;
    for (int e = threadIdx.x; e <= kExperts; e += Shape::threads) args.offsets[e] = shared.offsets[e];
    if (threadIdx.x < 2) args.copied[threadIdx.x] = shared.copied[threadIdx.x];
}

template <class Shape>
__device__ __forceinline__ uint64 home_of(const RouteListsArgs& args, int source, int32 token, int k) {
    const int64 row = static_cast<int64>(token) * (Shape::top_k + Shape::shared_experts) + k;
    return args.peers[source] + args.home + static_cast<uint64>(row) * (Shape::hidden * 2);
}

template <class Shape>
__device__ __forceinline__ void add_route(const RouteListsArgs& args, const RouteListsShared<Shape>& shared,
                                          int32 route, int32 place) {
    const int32 row = route / Shape::top_k, k = route % Shape::top_k;
    int source = 0;
    while (row >= shared.ends[source]) ++source;
    args.rows[place] = row;
    args.row_weights[place] = args.weights[route];
    args.targets[place] = home_of<Shape>(args, source, args.row_tokens[row], k);
}

// The lists of one chunk of routes; `places` then says where each route is.
template <class Shape>
__device__ __forceinline__ void list_chunk(const RouteListsArgs& args, RouteListsShared<Shape>& shared, int32 first,
                                           int32 routes) {
    using Shared = RouteListsShared<Shape>;
    for (int e = threadIdx.x; e < Shape::experts_per_rank; e += Shape::threads) shared.found[e] = 0;
    __syncthreads();
    int32 expert[Shared::kThreadRoutes], earlier[Shared::kThreadRoutes];
#pragma unroll
    for (int i = 0; i < Shared::kThreadRoutes; ++i) {
        const int32 own = i * Shape::threads + static_cast<int32>(threadIdx.x);
        expert[i] = own < Shared::kChunk && first + own < routes ? args.ids[first + own] : -1;
        if (expert[i] >= 0) earlier[i] = atomicAdd(&shared.found[expert[i]], 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < Shape::experts_per_rank; e += Shape::threads)
        if (shared.found[e] > 0) shared.found[e] = shared.offsets[e] + atomicAdd(&args.taken[e], shared.found[e]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Shared::kThreadRoutes; ++i) {
        const int32 own = i * Shape::threads + static_cast<int32>(threadIdx.x);
        int32 place = expert[i] < 0 ? -1 : shared.found[expert[i]] + earlier[i];
        if (expert[i] >= 0 && place >= shared.offsets[expert[i] + 1]) place = -1;  // not what was counted: a fault
        if (place >= 0) add_route<Shape>(args, shared, first + own, place);
        if (own < Shared::kChunk) shared.places[own] = place;
    }
    __syncthreads();
}

// A row to the places, a lane's each, that are copied; -1: none.
template <class Shape>
__device__ __forceinline__ void copy_to_places(const RouteListsArgs& args, const RouteListsShared<Shape>& shared,
                                               int32 row, int32 place, int lane) {
    const auto to = reinterpret_cast<uint64>(args.copies) +
                    static_cast<uint64>(shared.copied[0] + place) * Shape::hidden;
    const uint32 targets = __ballot_sync(~0u, place >= 0 && place < shared.copied[1]);
    copy_row<Shape::hidden>(args.values + static_cast<int64>(row) * Shape::hidden, to, targets, lane);
}

// One of this rank's tokens, for shared experts; a warp.
template <class Shape>
__device__ __forceinline__ void add_own_token(const RouteListsArgs& args, const RouteListsShared<Shape>& shared,
                                              int32 token, int lane) {
    constexpr int kScales = Shape::hidden / kFp8Block, kRouted = Shape::experts_per_rank;
    const int32 row = Shape::received_rows + token;
    unsigned char* values = args.values + static_cast<int64>(row) * Shape::hidden;
    float* scales = args.scales + static_cast<int64>(row) * kScales;
    if constexpr (Shape::quantize != 0) {
        const unsigned char* from = args.x + static_cast<int64>(token) * Shape::hidden * kValueBytes<Shape::x_dtype>;
        quantize_row<Shape::x_dtype, Shape::hidden, Shape::power_of_two != 0>(
            from, reinterpret_cast<uint64>(values), reinterpret_cast<uint64>(scales), 1, lane);
    } else {
        copy_row<Shape::hidden>(args.x + static_cast<int64>(token) * Shape::hidden, reinterpret_cast<uint64>(values), 1,
                                lane);
        for (int i = lane; i < kScales; i += 32) scales[i] = args.x_scales[static_cast<int64>(token) * kScales + i];
    }
    __syncwarp();
    int32 place = -1;
    if (lane < Shape::shared_experts) {
        place = shared.offsets[kRouted + lane] + token;
        args.rows[place] = row;
        args.row_weights[place] = 1.0f;
        args.targets[place] = home_of<Shape>(args, args.rank, token, Shape::top_k + lane);
    }
    copy_to_places<Shape>(args, shared, row, place, lane);
}

template <class Shape>
__device__ void route_lists(const RouteListsArgs& args) {
    using Shared = RouteListsShared<Shape>;
    __shared__ Shared shared;
    constexpr int kWarps = Shape::threads / 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    begin_lists<Shape>(args, shared);
    const bool trusted = shared.offsets[Shared::kExperts] != 0;
    const int32 rows = trusted ? *args.num_rows : 0;
    // As many chunks as blocks, if there are enough rows.
    const int32 chunk_rows = min((rows + gridDim.x - 1) / gridDim.x, Shared::kMostChunkRows);
    for (int32 first = blockIdx.x * chunk_rows; first < rows; first += gridDim.x * chunk_rows) {
        const int32 end = min(first + chunk_rows, rows);
        list_chunk<Shape>(args, shared, first * Shape::top_k, end * Shape::top_k);
        for (int row = warp; row < end - first && shared.copied[1] > 0; row += kWarps)
            copy_to_places<Shape>(args, shared, first + row,
                                  lane < Shape::top_k ? shared.places[row * Shape::top_k + lane] : -1, lane);
        __syncthreads();  // before the next chunk is listed
    }
    if constexpr (Shape::shared_experts > 0)
        for (int32 token = blockIdx.x * kWarps + warp; trusted && token < args.num_tokens; token += gridDim.x * kWarps)
            add_own_token<Shape>(args, shared, token, lane);
}
