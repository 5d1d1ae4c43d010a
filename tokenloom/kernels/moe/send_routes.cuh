// The dispatch of a MegaMoE: each route's row goes straight to its place in the order of its expert's rows, and experts
// come one after the other, so that GEMM1 multiplies the first while rows of the last are on their way.
//
//   all blocks      count the routes of their chunk; the last block tells all ranks the totals   (roles/count_routes.cuh)
//   all blocks      wait for all ranks' counts; go on only if all ranks mean the same call           (transport/call.cuh)
//   block 0         says where each expert's rows begin and how many come from whom: GEMM1 may begin      (publish_bounds)
//   all blocks      put their routes into the order in which they leave                                    (order_routes)
//   sending warps   take one after the other: values by bulk copies, with scales, home and weight             (send_rows)
//   notify warp     adds 1 for each row that has arrived, to a count at the rank of its expert               (notify_row)
//   last block out  advances the epoch; if the call was refused or a wait has expired, there are no rows
//
// The order in which rows leave is by number of the local expert, then by rank, from the next one on: all ranks begin
// with their first experts, and no two with the same one.
//
// What shared experts take stays here: each of this rank's tokens, behind all routes.
#pragma once
#include "device/ptx/grid.cuh"
#include "device/roles/arrivals.cuh"
#include "device/roles/count_routes.cuh"
#include "device/sync/progress.cuh"
#include "device/tile/rows.cuh"

struct alignas(16) RowToSend {
    int32 place;   // where it goes
    int32 expert;  // E and more: a shared one
    int32 result;  // which of this rank's results comes of it: token * (K + S) + k
    float weight;
};

struct SendRoutesArgs {
    Call call;
    // What every call is told anew lies side by side, so that the host writes it at once.
    const void* topk_ids;       // [T][K] int32 or int64
    const float* topk_weights;  // [T][K]
    int32* stats;               // null, or [L]: the number of routes is added
    int32 num_tokens;
    int32 ids_are_int64;
    // What receivers have, as offsets in their buffers. A place is an index into it.
    const uint64* peers;  // [W] every rank's buffer; device memory
    uint64 rows;          // [places][H] E4M3
    uint64 row_scales;    // float [places][H / 128]
    uint64 row_homes;     // uint32 [places]: where the result goes, see arrivals.cuh
    uint64 row_weights;   // float [places]
    uint64 arrived;       // uint32 [L + S][W]: rows of an expert from a rank that are here, of all calls
    // What this rank's GEMMs are told; see arrivals.cuh.
    int32* offsets;    // [L + S + 1] first place of each expert
    uint32* expected;  // [L + S][W] what `arrived` is to become
    uint32* begun;     // [1] the epoch once both are there; 0 before the call
    // Of this kernel alone, but for the first.
    const unsigned char* packed;  // [T] this rank's tokens, see pack_tokens.cuh
    int32* block_counts;          // see count_routes.cuh
    RowToSend* order;             // [M * K] routes, of each block in the order in which they leave
};

// A sending warp's rows between load and store.
template <class Shape>
struct RowRing {
    alignas(128) unsigned char row[Shape::stages][Shape::packed_bytes];
    alignas(16) RowToSend what[Shape::stages];
    alignas(8) uint64 loaded[Shape::stages];
};

template <class Shape>
struct SendRoutesShared {
    static constexpr int kCounts = kRouteCounts<Shape>;
    RowRing<Shape> ring[Shape::send_warps];
    PeerWindow<Shape::num_ranks> data;  // all ranks' buffers: here they are read fast
    Progress<Shape::send_warps> progress;
    alignas(16) int32 header[header_words<kCounts>];  // what the last block announces
    int32 before[kCounts];  // of the tokens before this chunk
    int32 chunk[kCounts];
    int32 total[Shape::num_experts];  // routes of all ranks
    int32 place[Shape::num_experts];  // of this chunk's first route; later less its number among those that leave here
    int32 next[Shape::num_experts];  // number, in this block, of the next route that is put in order
    int32 offsets[Shape::experts_per_rank + Shape::shared_experts + 1];
    int32 routes;  // of this chunk
    int32 taken;   // rows of this chunk that warps have claimed
};

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
        if (lane == 0) shared.routes = routes, shared.taken = 0;
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
        if (expert < 0 || turn.leaves_out(expert / Shape::experts_per_rank)) continue;
        const int32 number = atomicAdd(&shared.next[expert], 1);
        const int32 result = (chunk.begin + i / Shape::top_k) * kTerms + i % Shape::top_k;
        args.order[first + number] = {shared.place[expert] + number, expert, result, args.topk_weights[first + i]};
    }
}

// Row `number` of the chunk, in the order in which they leave: routes, then what shared experts take.
template <class Shape>
__device__ __forceinline__ RowToSend row_to_send(const SendRoutesArgs& args, const SendRoutesShared<Shape>& shared,
                                                 Chunk chunk, int32 number) {
    constexpr int kTerms = Shape::top_k + Shape::shared_experts;
    if (number < shared.routes) return args.order[static_cast<int64>(chunk.begin) * Shape::top_k + number];
    const int32 tokens = chunk.end - chunk.begin, expert = (number - shared.routes) / tokens;
    const int32 token = chunk.begin + (number - shared.routes) % tokens;
    return {shared.offsets[Shape::experts_per_rank + expert] + token, Shape::num_experts + expert,
            token * kTerms + Shape::top_k + expert, 1.0f};
}

// The rows that a sending warp takes, a few at a time: each lane finds out about one of them.
template <class Shape>
struct RowSource {
    static constexpr int32 kMostAtOnce = 8;
    const SendRoutesArgs& args;
    SendRoutesShared<Shape>& shared;
    Chunk chunk;
    int lane;
    int32 rows, at_once;
    int32 taken = 0, used = 0;  // of the rows that it has claimed
    RowToSend own{};

    __device__ __forceinline__ RowSource(const SendRoutesArgs& args_, SendRoutesShared<Shape>& shared_, Chunk chunk_,
                                         int lane_)
        : args(args_), shared(shared_), chunk(chunk_), lane(lane_) {
        rows = shared.routes + Shape::shared_experts * (chunk.end - chunk.begin);
        at_once = min(max(rows / (2 * Shape::send_warps), 1), kMostAtOnce);  // so that all warps have some
    }

    __device__ __forceinline__ bool next(RowToSend& row) {
        if (used == taken) {
            const int32 first = __shfl_sync(~0u, lane == 0 ? atomicAdd(&shared.taken, at_once) : 0, 0);
            taken = max(min(rows - first, at_once), 0);
            used = 0;
            if (taken == 0) return false;
            if (lane < taken) own = row_to_send<Shape>(args, shared, chunk, first + lane);
        }
        row.place = __shfl_sync(~0u, own.place, used);
        row.expert = __shfl_sync(~0u, own.expert, used);
        row.result = __shfl_sync(~0u, own.result, used);
        row.weight = __shfl_sync(~0u, own.weight, used);
        ++used;
        return true;
    }
};

// One row, from shared memory to its place: values by a bulk copy, all else by the lanes.
template <class Shape>
__device__ __forceinline__ void send_row(const SendRoutesArgs& args, const SendRoutesShared<Shape>& shared,
                                         const RowToSend& what, const unsigned char* row, int lane) {
    constexpr int kScales = Shape::hidden / 128;
    const int self = args.call.rank;
    const int rank = what.expert < Shape::num_experts ? what.expert / Shape::experts_per_rank : self;
    const auto place = static_cast<int64>(what.place);
    if (lane == 0) {
        bulk_store(shared.data.staging(rank, args.rows) + place * Shape::hidden, row, Shape::hidden);
        bulk_commit();
        shared.data.put(rank, args.row_homes, place, home_of(self, what.result));
    }
    if (lane == 1) shared.data.put(rank, args.row_weights, place, what.weight);
    const auto* scales = reinterpret_cast<const float*>(row + Shape::hidden);
#pragma unroll 2
    for (int i = lane; i < kScales; i += 32) shared.data.put(rank, args.row_scales, place * kScales + i, scales[i]);
}

// A sending warp. Loads are kAhead rows ahead of stores, of which the newest kStoring may still read their stages.
template <class Shape>
__device__ void send_rows(const SendRoutesArgs& args, SendRoutesShared<Shape>& shared, Chunk chunk, int warp,
                          int lane) {
    constexpr uint32 kStages = Shape::stages, kStoring = kStages / 2, kAhead = kStages - kStoring;
    constexpr uint32 kUnreported = 2;  // rows that are on their way when the one before them is reported
    constexpr int32 kTerms = Shape::top_k + Shape::shared_experts;
    static_assert(kAhead + kUnreported + 2 < Progress<Shape::send_warps>::kRecent, "rows begun and not yet notified");
    RowRing<Shape>& ring = shared.ring[warp];
    RowSource<Shape> source(args, shared, chunk, lane);
    uint32 loads = 0, sent = 0;
    const auto load = [&] {
        RowToSend what;
        if (!source.next(what)) return;
        shared.progress.begin(warp, loads, what.expert, lane);
        const uint32 stage = loads++ % kStages;
        if (lane == 0) {
            ring.what[stage] = what;
            mbarrier_arrive_expect(&ring.loaded[stage], Shape::packed_bytes);
            bulk_load(ring.row[stage], args.packed + static_cast<int64>(what.result / kTerms) * Shape::packed_bytes,
                      Shape::packed_bytes, &ring.loaded[stage]);
        }
        __syncwarp();
    };
    fence_global_to_bulk();  // to tokens that other kernels have packed, and to where other ranks have said there is room
    for (uint32 i = 0; i < kAhead; ++i) load();
    while (sent != loads) {
        const uint32 stage = sent % kStages;
        mbarrier_wait(&ring.loaded[stage], sent / kStages & 1);
        send_row<Shape>(args, shared, ring.what[stage], ring.row[stage], lane);
        ++sent;
        if (lane == 0) bulk_wait_read<kStoring>();
        __syncwarp();
        load();
        if (sent > kUnreported) {
            if (lane == 0) bulk_wait_written<kUnreported>();
            shared.progress.report(warp, sent - kUnreported, lane);
        }
    }
    if (lane == 0) bulk_wait_written<0>();
    shared.progress.report(warp, sent, lane);
    shared.progress.close(warp, lane);
}

// A row of an expert is where it goes, and a fence at system scope lies behind it. One lane of the notify warp calls it.
template <class Shape>
__device__ __forceinline__ void notify_row(const SendRoutesArgs& args, const SendRoutesShared<Shape>& shared,
                                           int32 expert) {
    const bool routed = expert < Shape::num_experts;
    const int self = args.call.rank, rank = routed ? expert / Shape::experts_per_rank : self;
    const int local = routed ? expert % Shape::experts_per_rank : Shape::experts_per_rank + expert - Shape::num_experts;
    shared.data.signals(rank, args.arrived).from(local * Shape::num_ranks).add_relaxed(self, 1);
}

// All that a block does before it leaves. False, in any thread: the dispatch does not take place, or not all of it.
template <class Shape>
__device__ bool send_all_routes(const SendRoutesArgs& args, Turn turn) {
    extern __shared__ __align__(128) unsigned char memory[];
    using Shared = SendRoutesShared<Shape>;
    static_assert(Shape::num_ranks <= kMostRanks, "a lane and a bit of every mask for each rank");
    static_assert(Shape::shared_experts < 32, "a lane for each");
    static_assert(sizeof(Shared) <= Shape::shared_bytes, "launch.py asks for what this needs");
    auto& shared = *reinterpret_cast<Shared*>(memory);
    constexpr int kCounts = Shared::kCounts;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) mark(args.call, kBegun);
    if (__syncthreads_or(has_expired(deadline_of(args.call)))) return false;
    const Chunk chunk = chunk_of(args.num_tokens, blockIdx.x);
    if (warp == 0) shared.progress.clear(lane);
    if (warp < Shape::send_warps && lane < Shape::stages) mbarrier_init(&shared.ring[warp].loaded[lane], 1);
    if (threadIdx.x < Shape::num_ranks) shared.data.bases[threadIdx.x] = args.peers[threadIdx.x];
    mbarrier_init_fence();
    if (!count_all_routes<Shape>(args, shared, chunk, turn)) return false;
    if (threadIdx.x == 0) mark(args.call, kCounted);
    if (blockIdx.x == gridDim.x - 1) {
        for (int i = threadIdx.x; i < kCounts; i += Shape::threads)
            shared.header[kHeaderWords + i] = shared.before[i] + shared.chunk[i];
        announce_call<Shape::num_ranks, kCounts, Shape::threads>(args.call, turn, kCounts, shared.header);
    }
    const Opened opened = await_call<Shape::num_ranks, kCounts>(args.call, turn);
    let_next_kernel_begin();  // not before: other ranks' hosts may be busy, and GEMM1 takes all SMs that are left
    if (threadIdx.x == 0) mark(args.call, kHeard);
    if (opened != Opened::kGo) return false;

    const AllCounts<Shape> counts{headers_of<Shape::num_ranks, kCounts>(args.call, turn.epoch) + kHeaderWords, turn};
    find_places<Shape>(args, shared, counts);
    __syncthreads();
    if (blockIdx.x == 0) publish_bounds<Shape>(args, shared, counts, turn.epoch);
    order_routes<Shape>(args, shared, chunk, turn);
    wait_for_earlier_kernels();  // they have packed this rank's tokens
    __syncthreads();
    if (threadIdx.x == 0) mark(args.call, kPlaced);
    if (warp < Shape::send_warps) {
        send_rows<Shape>(args, shared, chunk, warp, lane);
        if (lane == 0) mark(args.call, kSent);
    } else if (warp == Shape::send_warps) {
        shared.progress.watch(lane, [&](int32 expert) { notify_row<Shape>(args, shared, expert); });
    }
    if (threadIdx.x == 0) mark(args.call, kDone);
    return true;
}

template <class Shape>
__device__ void send_routes(const SendRoutesArgs& args) {
    const Turn turn = turn_of(args.call);
    const bool done = send_all_routes<Shape>(args, turn);
    wait_for_earlier_kernels();  // in any case: whoever waits for this kernel waits for those before it
    close_call(args.call, turn, done, [&] {  // GEMM1 waits for bounds, unless it has some
        const int lane = threadIdx.x;
        if (load_acquire_gpu(args.begun) == turn.epoch) return;
        for (int e = lane; e <= Shape::experts_per_rank + Shape::shared_experts; e += 32) args.offsets[e] = 0;
        __syncwarp();
        if (lane == 0) store_release_gpu(args.begun, turn.epoch);
    });
}
