// Combine: rows go home as partial sums, one per (token, rank), and are added there in ascending rank. Or, per route:
// every weighted row goes home by itself, and they are added there in ascending k.
//
//   all blocks      wait until all ranks have begun this combine, so that their buffers are free; the last one says
//                   that this rank has
//   pushing blocks  write chunks of rows into their home ranks' buffers; a warp of each raises the flags of
//                   chunks that are there; then they sum                                                    (push.cuh)
//   other blocks    take this rank's tokens in order, wait for the chunks that hold their rows, add them    (sum.cuh)
//   last block out  advances the epoch; if the call was refused or a wait has expired, it makes all results NaN
//
// A chunk is a few consecutive rows of one (expert rank, home rank) pair, so home starts long before the last row is
// sent. README.md has the protocol.
//
// Eager (small plans): buffers take turns by four, so nobody waits before it pushes. When all ranks have begun, other
// blocks sum: each word of a row says by itself that it is here.                                  (sync/arrival.cuh)
//
// Weights may come from home: a rank sends those of its tokens before it says that it has begun, so that whoever has
// heard of all ranks finds them. Then eager warps push only behind that.
//
// Halves are two kernels: one announces the call and pushes, the other sums.
//
// Dense (strategy reduce_scatter): pre_reduce.cuh has made the partial sums, copy engines have brought them. All warps
// sum.
#pragma once
#include "kernels/combine/push.cuh"
#include "kernels/combine/sum.cuh"

// Where rows come home in this call.
__device__ __forceinline__ uint64 region_of(const CombineArgs& args, Turn turn) {
    return args.combine_recv + (turn.epoch & (args.combine_turns - 1)) * args.turn_bytes;
}

template <class Shape>
__device__ void find_bases(const CombineArgs& args, CombineShared<Shape>& shared, Turn turn) {
    constexpr int kCounts = Shape::num_ranks + Shape::num_experts;
    if (threadIdx.x == 0) shared.combine_recv = region_of(args, turn);
    if (threadIdx.x < Shape::num_ranks) {
        const int i = threadIdx.x;
        int32 received = 0, home = 0, own = 0;
#pragma unroll
        for (int r = 0; r < Shape::num_ranks; ++r) {  // all loads are in flight together
            const int32 from_r = args.all_counts[r * kCounts + args.call.rank];
            const int32 to_r = args.all_counts[args.call.rank * kCounts + r];
            const int32 of_home = args.all_counts[i * kCounts + r];
            if (r < i) received += from_r, own += to_r;
            if (r < args.call.rank) home += of_home;
        }
        shared.control.bases[i] = args.call.peers[i];
        shared.data.bases[i] = args.peers[i];
        shared.received_base[i] = received;
        const bool stay = CombineRows<Shape>::kOwnStay && i == args.call.rank;
        const bool is_masked = turn.leaves_out<Shape::num_ranks>(i);
        shared.received[i] = stay || is_masked ? 0 : args.all_counts[i * kCounts + args.call.rank];
        shared.home_base[i] = home;
        shared.own_base[i] = own;
        shared.own[i] = is_masked ? kNoRows : args.all_counts[args.call.rank * kCounts + i];
    }
    __syncthreads();
}

// One warp: the result of a combine that did not take place. NaN, so that nobody takes what lay there for a result.
template <class Shape>
__device__ void publish_nan(const CombineArgs& args) {
    constexpr int64 kRowBytes = CombineRows<Shape>::kOutBytes;
    auto* out = static_cast<unsigned char*>(args.out);
    for (int64 token = 0; token < args.num_tokens; ++token)
        fill_row<kRowBytes>(out + token * kRowBytes, kNanWord<Shape::out_dtype>, threadIdx.x);
}

// One block: the weights of this rank's tokens, to all ranks. Two calls before, a rank has read what lay there: the
// rows that it made with it have come home.
template <class Shape>
__device__ void send_weights(const CombineArgs& args, Turn turn) {
    const uint64 mine = weights_from<Shape>(args, region_of(args, turn), args.call.rank);
    for (int32 i = threadIdx.x; i < args.num_tokens * Shape::top_k; i += Shape::threads) {
        const float weight = args.weights[i];
#pragma unroll
        for (int r = 0; r < Shape::num_ranks; ++r)
            if (!turn.leaves_out<Shape::num_ranks>(r)) window_of<Shape::num_ranks>(args.peers).put(r, mine, i, weight);
    }
}

// Pushes what this warp pushes, of a kernel that sends.
template <class Shape>
__device__ __forceinline__ void push_rows(const CombineArgs& args, CombineShared<Shape>& shared, uint32 epoch, int warp,
                                          int lane) {
    if constexpr (CombineRows<Shape>::kCopies) push_copies<Shape>(args, shared, epoch, warp, lane);
    else push_sums<Shape>(args, shared, warp, lane);
    if (lane == 0) mark(args.call, kSent);
}

// All that a block does before it leaves. False, in any thread: the combine does not take place, or not all of it.
template <class Shape>
__device__ bool combine_rows(const CombineArgs& args, Turn turn) {
    const uint32 epoch = turn.epoch;
    extern __shared__ __align__(128) unsigned char memory[];
    static_assert(sizeof(CombineShared<Shape>) <= Shape::shared_bytes, "launch.py asks for what this needs");
    auto& shared = *reinterpret_cast<CombineShared<Shape>*>(memory);
    using Roles = CombineRoles<Shape>;
    constexpr int kCounts = Shape::num_ranks + Shape::num_experts;
    constexpr bool kWeightsFromHome = CombineRows<Shape>::kWeightsFromHome;
    constexpr bool kPushesEagerly = Shape::eager != 0 && Roles::kSends;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) mark(args.call, kBegun);
    if (__syncthreads_or(has_expired(deadline_of(args.call)))) return false;
    if (Shape::part != kReceive && blockIdx.x == gridDim.x - 1) {
        // Blocks start in order: when the last one runs, none of this rank lacks an SM.
        if constexpr (kWeightsFromHome) send_weights<Shape>(args, turn);
        announce_call<Shape::num_ranks, kCounts, Shape::threads>(args.call, turn, shared.header);
    }
    if (warp == 0) shared.progress.clear(lane);
    if constexpr (CombineRows<Shape>::kCopies) {
        if (warp < shared.kRings) CombineRows<Shape>::Copy::init(shared.control_of_push[warp], lane);
        mbarrier_init_fence();
    }
    find_bases<Shape>(args, shared, turn);
    if constexpr (kPushesEagerly && !kWeightsFromHome) {
        push_eagerly<Shape>(args, shared, turn, warp, lane);
        if constexpr (!Roles::kSums) return true;
    }
    const Opened opened = await_call<Shape::num_ranks, kCounts, Shape::threads, Roles::kSums>(args.call, turn);
    if (threadIdx.x == 0) mark(args.call, kHeard);
    if (opened != Opened::kGo) return opened == Opened::kRefused && !Roles::kSums;  // the other half says what is wrong
    if constexpr (kPushesEagerly && kWeightsFromHome) push_eagerly<Shape>(args, shared, turn, warp, lane);
    if constexpr (Roles::kChunks) {
        if (blockIdx.x < Roles::push_blocks(args)) {
            if (warp < Shape::push_warps) {
                push_rows<Shape>(args, shared, epoch, warp, lane);
            } else if (warp == Shape::push_warps) {
                notify_chunks<Shape>(args, shared, epoch, lane);
                if (lane == 0) mark(args.call, kNotified);
            }
            __syncthreads();
        }
    }
    bool done = true;
    if constexpr (Roles::kSums) {
        if constexpr (Roles::kArrives) done = sum_arriving_rows<Shape>(args, shared, turn, warp, lane);
        else done = sum_rows<Shape>(args, shared, turn, warp, lane);
        if (lane == 0) mark(args.call, kSummed);
    }
    if (threadIdx.x == 0) mark(args.call, kDone);
    return done;
}

template <class Shape>
__device__ void combine(const CombineArgs& args) {
    wait_for_earlier_kernels();
    const Turn turn = turn_of<Shape::part>(args.call);
    const bool done = combine_rows<Shape>(args, turn);
    close_call<Shape::num_ranks, Shape::part>(args.call, turn, done, [&] {
        if constexpr (CombineRoles<Shape>::kSums) publish_nan<Shape>(args);
    });
}
