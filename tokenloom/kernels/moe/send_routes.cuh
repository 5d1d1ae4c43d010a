// The dispatch of a MegaMoE: each route's row goes straight to its place in the order of its expert's rows, and experts
// come one after the other, so that GEMM1 multiplies the first while rows of the last are on their way.
//
//   all blocks      count the routes of their chunk; the last block tells all ranks the totals   (roles/count_routes.cuh)
//   all blocks      wait for all ranks' counts; go on only if all ranks mean the same call           (transport/call.cuh)
//   all blocks      pack the tokens of their chunk meanwhile, if there is room for them                      (pack_chunk)
//   block 0         says where each expert's rows begin and how many come from whom: GEMM1 may begin      (publish_bounds)
//   all blocks      put their routes into the order in which they leave                                    (order_routes)
//   sending warps   take one after the other: values by bulk copies, with scales, home and weight             (send_rows)
//   they, or one    add 1 for each row that has arrived, to a count at the rank of its expert               (arrivals_of)
//   last block out  advances the epoch; if the call was refused or a wait has expired, there are no rows
//
// The order in which rows leave is by number of the local expert, then by rank, from the next one on: all ranks begin
// with their first experts, and no two with the same one.
//
// What shared experts take stays here: each of this rank's tokens, behind all routes.
#pragma once
#include "device/ptx/grid.cuh"
#include "kernels/moe/send_rows.cuh"

// The experts in the order in which rows leave.
template <class Shape>
__device__ __forceinline__ int32 expert_in_turn(int rank, int32 turn) {
    const int32 local = turn / Shape::num_ranks, step = turn % Shape::num_ranks;
    return (rank + 1 + step) % Shape::num_ranks * Shape::experts_per_rank + local;
}

// One warp: put(i, sum of of(j) for all j < i) for each i < count. Returns the sum of all.
template <class Of, class Put>
__device__ __forceinline__ int32 sum_before(int32 count, int lane, Of of, Put put) {
    int32 before = 0;
    for (int32 first = 0; first < count; first += 32) {
        const int32 i = first + lane, own = i < count ? of(i) : 0;
        int32 through = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int32 earlier = __shfl_up_sync(~0u, through, step);
            if (lane >= step) through += earlier;
        }
        if (i < count) put(i, before + through - own);
        before += __shfl_sync(~0u, through, 31);
    }
    return before;
}

// shared.place, shared.next and shared.offsets, from all ranks' counts.
template <class Shape>
__device__ void find_places(const SendRoutesArgs& args, SendRoutesShared<Shape>& shared,
                            const AllCounts<Shape>& counts) {
    constexpr int kLocal = Shape::experts_per_rank, kRanks = Shape::num_ranks;
    const int self = args.call.rank, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32* before = shared.before + kRanks;
    for (int e = threadIdx.x; e < Shape::num_experts; e += Shape::threads) {
        int32 from_others = 0, total = 0;
        for (int s = 0; s < kRanks; ++s) {
            if (s == self) from_others = total;
            total += counts.routes(s, e);
        }
        shared.total[e] = total;
        shared.place[e] = from_others + before[e];
    }
    __syncthreads();
    for (int r = warp; r < kRanks; r += Shape::threads / 32) {
        const int32 end = sum_before(
            kLocal, lane, [&](int32 l) { return shared.total[r * kLocal + l]; },
            [&](int32 l, int32 first) {
                shared.place[r * kLocal + l] += first;
                if (r == self) shared.offsets[l] = first;
            });
        if (r == self && lane <= Shape::shared_experts) shared.offsets[kLocal + lane] = end + lane * args.num_tokens;
    }
    if (warp == 0) {
        const int32 routes = sum_before(
            Shape::num_experts, lane,
            [&](int32 turn) { return shared.chunk[kRanks + expert_in_turn<Shape>(self, turn)]; },
            [&](int32 turn, int32 first) { shared.next[expert_in_turn<Shape>(self, turn)] = first; });
        if (lane == 0) shared.routes = routes;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < Shape::num_experts; e += Shape::threads) shared.place[e] -= shared.next[e];
}

// Block 0, with all its threads: what GEMM1 has to know before it can begin.
template <class Shape>
__device__ void publish_bounds(const SendRoutesArgs& args, const SendRoutesShared<Shape>& shared,
                               const AllCounts<Shape>& counts, uint32 epoch) {
    constexpr int kLocal = Shape::experts_per_rank, kAll = kLocal + Shape::shared_experts;
    const int self = args.call.rank;
    for (int e = threadIdx.x; e <= kAll; e += Shape::threads) {
        args.offsets[e] = shared.offsets[e];
        if (e < kLocal && args.stats != nullptr) args.stats[e] += shared.offsets[e + 1] - shared.offsets[e];
    }
    for (int i = threadIdx.x; i < kAll * Shape::num_ranks; i += Shape::threads) {
        const int e = i / Shape::num_ranks, source = i % Shape::num_ranks;
        if (e < kLocal) args.expected[i] += counts.routes(source, self * kLocal + e);
        else if (source == self) args.expected[i] += args.num_tokens;
    }
    __syncthreads();
    if (threadIdx.x == 0) store_release_gpu(args.begun, epoch);
}

// The chunk's routes in the order in which they leave. Those of an expert are in any order: the result of a row does not
// depend on its place, and goes to an address of its own.
template <class Shape>
__device__ void order_routes(const SendRoutesArgs& args, SendRoutesShared<Shape>& shared, Chunk chunk, Turn turn) {
    constexpr int kTerms = Shape::top_k + Shape::shared_experts;
    const int64 first = static_cast<int64>(chunk.begin) * Shape::top_k;
    const int32 routes = (chunk.end - chunk.begin) * Shape::top_k;
    for (int32 i = threadIdx.x; i < routes; i += Shape::threads) {
        const int32 expert = expert_of<Shape>(args, first + i);
        if (expert < 0 || turn.leaves_out<Shape::num_ranks>(expert / Shape::experts_per_rank)) continue;
        const int32 number = atomicAdd(&shared.next[expert], 1);
        const int32 result = (chunk.begin + i / Shape::top_k) * kTerms + i % Shape::top_k;
        args.order[first + number] = {shared.place[expert] + number, expert, result, args.topk_weights[first + i]};
    }
}

// All that a block does before it leaves. False, in any thread: the dispatch does not take place, or not all of it.
template <class Shape>
__device__ bool send_all_routes(const SendRoutesArgs& args, Turn turn) {
    extern __shared__ __align__(128) unsigned char memory[];
    using Shared = SendRoutesShared<Shape>;
    static_assert(Shape::num_ranks <= kMostFusedRanks, "a bit of a word for each rank");
    static_assert(Shape::shared_experts < 32, "a lane for each");
    static_assert(sizeof(Shared) <= Shape::shared_bytes, "launch.py asks for what this needs");
    auto& shared = *reinterpret_cast<Shared*>(memory);
    constexpr int kCounts = Shared::kCounts;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) mark(args.call, kBegun);
    if (__syncthreads_or(has_expired(deadline_of(args.call)))) return false;
    const Chunk chunk = chunk_of(args.num_tokens, blockIdx.x);
    if constexpr (Shape::kept_tokens == 0) {
        if (warp == 0) shared.outbox.progress.clear(lane);
        if (warp < Shape::send_warps && lane < Shape::stages) mbarrier_init(&shared.outbox.ring[warp].loaded[lane], 1);
    }
    if (threadIdx.x < Shape::num_ranks) shared.data.bases[threadIdx.x] = args.peers[threadIdx.x];
    mbarrier_init_fence();
    if (blockIdx.x == gridDim.x - 1)  // blocks start in order: when it runs, none of this rank lacks an SM
        announce_call<Shape::num_ranks, kCounts, Shape::threads>(args.call, turn, shared.header);
    if (!count_all_routes<Shape>(args, shared, chunk, turn)) return false;
    if (threadIdx.x == 0) mark(args.call, kCounted);
    if (blockIdx.x == gridDim.x - 1) {
        for (int i = threadIdx.x; i < kCounts; i += Shape::threads)
            shared.header[kHeaderWords + i] = shared.before[i] + shared.chunk[i];
        __syncthreads();
        tell_counts<Shape::num_ranks, kCounts, Shape::threads>(args.call, turn, shared.header);
    }
    if constexpr (Shape::kept_tokens != 0) {
        pack_chunk<Shape>(args, shared, chunk, warp, lane);
        if (threadIdx.x == 0) mark(args.call, kFilled);
    }
    const Opened opened = await_call<Shape::num_ranks, kCounts, Shape::threads>(args.call, turn);
    let_next_kernel_begin();  // not before: other ranks' hosts may be busy, and the GEMMs take all SMs that are left
    if (threadIdx.x == 0) mark(args.call, kHeard);
    if (opened != Opened::kGo || !await_counts<Shape::num_ranks, kCounts, Shape::threads>(args.call, turn)) return false;

    const AllCounts<Shape> counts{headers_of<Shape::num_ranks, kCounts>(args.call, turn.epoch), turn};
    find_places<Shape>(args, shared, counts);
    __syncthreads();
    if (blockIdx.x == 0) publish_bounds<Shape>(args, shared, counts, turn.epoch);
    order_routes<Shape>(args, shared, chunk, turn);
    if constexpr (Shape::kept_tokens == 0) wait_for_earlier_kernels();  // they have packed this rank's tokens
    __syncthreads();
    if (threadIdx.x == 0) mark(args.call, kPlaced);
    send_rows<Shape>(args, shared, chunk, warp, lane);
    if (threadIdx.x == 0) mark(args.call, kDone);
    return true;
}

template <class Shape>
__device__ void send_routes(const SendRoutesArgs& args) {
    const Turn turn = turn_of(args.call);
    const bool done = send_all_routes<Shape>(args, turn);
    wait_for_earlier_kernels();  // in any case: whoever waits for this kernel waits for those before it
    close_call<Shape::num_ranks>(args.call, turn, done, [&] {  // GEMM1 waits for bounds, unless it has some
        const int lane = threadIdx.x;
        if (load_acquire_gpu(args.begun) == turn.epoch) return;
        for (int e = lane; e <= Shape::experts_per_rank + Shape::shared_experts; e += 32) args.offsets[e] = 0;
        __syncwarp();
        if (lane == 0) store_release_gpu(args.begun, turn.epoch);
    });
}
