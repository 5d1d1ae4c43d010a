// Route lists: which received rows each local expert takes. The GEMMs follow them. Where there is room, rows are also
// copied into the order of the lists, so that GEMM1 does not have to gather them.
//
// Blocks take chunks of the received routes in any order, so the order within a list is arbitrary. It does not show:
// the result of a row does not depend on its place, and goes to an address of its own.
//
// Shared experts are this rank's last experts. Each takes all of the rank's own tokens, which this kernel puts,
// quantised, behind the received rows.
#pragma once
#include "device/ptx/grid.cuh"
#include "device/tile/fp8.cuh"
#include "device/transport/peer.cuh"

struct RouteListsArgs {
    // What every call is told anew lies side by side, so that the host writes it at once.
    const int32* num_rows;       // [1] R, rows that the dispatch in layout token received
    const int32* source_counts;  // [W] rows from each rank
    const int32* expert_counts;  // [L] routes to each expert, of those with routes
    const unsigned char* x;      // with shared experts: this rank's tokens, [T][H] of Shape::x_dtype, or E4M3
    const float* x_scales;       // with E4M3: [T][H / 128]
    int32* stats;                // null, or [L]: the number of routes is added
    int32 num_tokens;
    int32 copy_room;  // of the copies below; 0: none are wanted
    // From the dispatch.
    const int32* ids;         // [>= R][K] local expert of each route, or -1
    const float* weights;     // [>= R][K]
    const int32* row_tokens;  // [>= R] token of the home rank that a row is
    unsigned char* values;    // [>= R][H] E4M3; own tokens begin at row Shape::received_rows
    float* scales;            // [>= R][H / 128]
    // Where results go: each rank has a row for each of its tokens and k, then for each shared expert.
    const uint64* peers;  // [W] every rank's buffer; device memory
    uint64 combine_recv;  // offset in it of [M][K + S] rows of bfloat16
    // The lists, one after the other. A place is an index into them.
    int32* offsets;      // [L + S + 1] first place of each expert
    int32* rows;         // [places] received row
    float* row_weights;  // [places]
    uint64* targets;     // [places] address of the result at its home rank
    int32* taken;        // [L] places taken of each list; 0 before the call
    // Copies of rows lie behind the activations that GEMM1 will write, in the same buffer of `copy_room` rows of H.
    unsigned char* copies;
    int32* copied;  // [2] (first, n): the rows of places 0..n-1 are rows first.. of that buffer
    const uint32* fault_claimed;  // not 0: a wait of this rank has expired, and what it received must not be trusted
    int32 rank;
    int32 padding;
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
    int32 found[Shape::experts_per_rank];  // routes of the chunk to each expert; then their first place
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

// Where the result of a token's k-th route (of its shared expert k - K) goes.
template <class Shape>
__device__ __forceinline__ uint64 target_of(const RouteListsArgs& args, int home_rank, int32 token, int k) {
    const auto& window = *reinterpret_cast<const PeerWindow<Shape::num_ranks>*>(args.peers);
    const int64 row = static_cast<int64>(token) * (Shape::top_k + Shape::shared_experts) + k;
    return window.staging_address(home_rank, args.combine_recv) + static_cast<uint64>(row) * (Shape::hidden * 2);
}

template <class Shape>
__device__ __forceinline__ void add_route(const RouteListsArgs& args, const RouteListsShared<Shape>& shared,
                                          int32 route, int32 place) {
    const int32 row = route / Shape::top_k, k = route % Shape::top_k;
    int source = 0;
    while (row >= shared.ends[source]) ++source;
    args.rows[place] = row;
    args.row_weights[place] = args.weights[route];
    args.targets[place] = target_of<Shape>(args, source, args.row_tokens[row], k);
}

// Lists one chunk of routes. `shared.places` then says where each route is.
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
        if (expert[i] >= 0 && place >= shared.offsets[expert[i] + 1]) place = -1;  // more than was counted: a fault
        if (place >= 0) add_route<Shape>(args, shared, first + own, place);
        if (own < Shared::kChunk) shared.places[own] = place;
    }
    __syncthreads();
}

// Copies a row to those of the lanes' places that have copies; -1 is none.
template <class Shape>
__device__ __forceinline__ void copy_to_places(const RouteListsArgs& args, const RouteListsShared<Shape>& shared,
                                               int32 row, int32 place, int lane) {
    const auto to = reinterpret_cast<uint64>(args.copies) +
                    static_cast<uint64>(shared.copied[0] + place) * Shape::hidden;
    const uint32 targets = __ballot_sync(~0u, place >= 0 && place < shared.copied[1]);
    copy_row<Shape::hidden>(args.values + static_cast<int64>(row) * Shape::hidden, to, targets, lane);
}

// A warp adds one of this rank's tokens to the lists of shared experts.
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
        args.targets[place] = target_of<Shape>(args, args.rank, token, Shape::top_k + lane);
    }
    copy_to_places<Shape>(args, shared, row, place, lane);
}

template <class Shape>
__device__ void route_lists(const RouteListsArgs& args) {
    using Shared = RouteListsShared<Shape>;
    __shared__ Shared shared;
    constexpr int kWarps = Shape::threads / 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    wait_for_earlier_kernels();
    let_next_kernel_begin();
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
