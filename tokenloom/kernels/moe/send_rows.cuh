// The warps that send a MegaMoE's rows, in the order in which they leave: see send_routes.cuh.
#pragma once
#include "kernels/moe/routes_to_send.cuh"

// A word of a kept token that several warps pack: its largest magnitude.
__device__ __forceinline__ uint32* largest_of(unsigned char* token, int hidden) {
    return reinterpret_cast<uint32*>(token + hidden) + 1;
}

// Before warps send: what they read without loading it, where the block has room for all of its tokens.
template <class Shape>
__device__ void pack_chunk(const SendRoutesArgs& args, SendRoutesShared<Shape>& shared, Chunk chunk, int warp,
                           int lane) {
    using Token = PackedToken<Shape>;
    constexpr int kParts = Token::kParts;
    const int32 tokens = chunk.end - chunk.begin, parts = tokens * kParts;
    constexpr bool kSharesLargest = Token::kQuantizes && Token::kOneScale;
    if constexpr (kSharesLargest) {  // as bits, which magnitudes sort alike; behind the scale, where nothing is sent
        if (threadIdx.x < tokens) *largest_of(shared.outbox.token[threadIdx.x], Shape::hidden) = 0;
        __syncthreads();
        for (int32 i = warp; i < parts; i += Shape::threads / 32) {
            const unsigned char* from = Token::values_of(args.x, chunk.begin + i / kParts);
            const float largest = Token::Quantized::largest_of_tile(from, i % kParts, lane);
            if (lane == 0)
                atomicMax(largest_of(shared.outbox.token[i / kParts], Shape::hidden), __float_as_uint(largest));
        }
        __syncthreads();
    }
    for (int32 i = warp; i < parts; i += Shape::threads / 32) {
        unsigned char* to = shared.outbox.token[i / kParts];
        const float largest = kSharesLargest ? __uint_as_float(*largest_of(to, Shape::hidden)) : 0.0f;
        Token::pack(args.x, args.scales, chunk.begin + i / kParts, to, i % kParts, lane, largest);
    }
    fence_shared_to_bulk();
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

// The rows that a sending warp takes: one of so many in turn, so that a block sends in order. Each lane finds out about
// one of them.
template <class Shape>
struct RowSource {
    const SendRoutesArgs& args;
    const SendRoutesShared<Shape>& shared;
    Chunk chunk;
    int lane;
    int32 rows, next_row;
    int32 used = 32;  // of those that the lanes know
    RowToSend own{};

    __device__ __forceinline__ RowSource(const SendRoutesArgs& args_, const SendRoutesShared<Shape>& shared_,
                                         Chunk chunk_, int warp, int lane_)
        : args(args_), shared(shared_), chunk(chunk_), lane(lane_), next_row(warp) {
        rows = shared.routes + Shape::shared_experts * (chunk.end - chunk.begin);
    }

    __device__ __forceinline__ bool next(RowToSend& row) {
        if (next_row >= rows) return false;
        if (used == 32) {
            used = 0;
            const int32 number = next_row + lane * Shape::send_warps;
            if (number < rows) own = row_to_send<Shape>(args, shared, chunk, number);
        }
        row.place = __shfl_sync(~0u, own.place, used);
        row.expert = __shfl_sync(~0u, own.expert, used);
        row.result = __shfl_sync(~0u, own.result, used);
        row.weight = __shfl_sync(~0u, own.weight, used);
        ++used;
        next_row += Shape::send_warps;
        return true;
    }
};

// One row, from shared memory to its place: values by a bulk copy, all else by the lanes.
template <class Shape>
__device__ __forceinline__ void send_row(const SendRoutesArgs& args, const SendRoutesShared<Shape>& shared,
                                         const RowToSend& what, const unsigned char* row, int lane) {
    constexpr int kScales = Shape::row_scales != 0 ? 1 : Shape::hidden / 128;
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

// How many rows of an expert have come from this rank: a count at the expert's rank.
template <class Shape>
__device__ __forceinline__ PeerSignals arrivals_of(const SendRoutesArgs& args, const SendRoutesShared<Shape>& shared,
                                                   int32 expert) {
    const bool routed = expert < Shape::num_experts;
    const int self = args.call.rank, rank = routed ? expert / Shape::experts_per_rank : self;
    const int local = routed ? expert % Shape::experts_per_rank : Shape::experts_per_rank + expert - Shape::num_experts;
    return shared.data.signals(rank, args.arrived).from(local * Shape::num_ranks + self);
}

// A sending warp of a block that keeps its tokens. It tells of each row by itself: that is soonest, while rows are few.
// Of many the releases would wait for each other's rows.
template <class Shape>
__device__ void send_kept_rows(const SendRoutesArgs& args, SendRoutesShared<Shape>& shared, Chunk chunk, int warp,
                               int lane) {
    constexpr int32 kTerms = Shape::top_k + Shape::shared_experts;
    RowSource<Shape> source(args, shared, chunk, warp, lane);
    fence_global_to_bulk();  // to where other ranks have said there is room
    for (RowToSend what; source.next(what);) {
        send_row<Shape>(args, shared, what, shared.outbox.token[what.result / kTerms - chunk.begin], lane);
        __syncwarp();
        if (lane == 0) {
            bulk_wait_written<0>();
            arrivals_of<Shape>(args, shared, what.expert).add(0, 1);
        }
    }
}

// A sending warp that loads its rows. Two of them are on their way to their ranks, while the next ones are loaded. It sends
// no more ahead, so the rows of all warps leave nearly in order.
template <class Shape>
__device__ void send_loaded_rows(const SendRoutesArgs& args, SendRoutesShared<Shape>& shared, Chunk chunk, int warp,
                                 int lane) {
    constexpr uint32 kStages = Shape::stages;
    constexpr int32 kTerms = Shape::top_k + Shape::shared_experts;
    auto& progress = shared.outbox.progress;
    static_assert(kStages >= 2, "a row is loaded when the one before has left");
    static_assert(kStages + 2 < Progress<Shape::send_warps>::kRecent, "rows begun and not yet notified");
    auto& ring = shared.outbox.ring[warp];
    RowSource<Shape> source(args, shared, chunk, warp, lane);
    uint32 loads = 0;
    const auto load = [&] {
        RowToSend what;
        if (!source.next(what)) return;
        progress.begin(warp, loads, what.expert, lane);
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
    for (uint32 i = 0; i < kStages; ++i) load();
    uint32 sent = 0;
    for (; sent != loads; ++sent) {
        const uint32 stage = sent % kStages;
        mbarrier_wait(&ring.loaded[stage], sent / kStages & 1);
        send_row<Shape>(args, shared, ring.what[stage], ring.row[stage], lane);
        if (sent == 0) continue;
        if (lane == 0) bulk_wait_written<1>();
        progress.report(warp, sent, lane);  // all but this one
        load();
    }
    if (sent != 0) {
        if (lane == 0) bulk_wait_written<0>();
        progress.report(warp, sent, lane);
    }
    progress.close(warp, lane);
}

// All warps of a block whose tokens are packed and places known.
template <class Shape>
__device__ void send_rows(const SendRoutesArgs& args, SendRoutesShared<Shape>& shared, Chunk chunk, int warp,
                          int lane) {
    if constexpr (Shape::kept_tokens != 0) {
        if (warp < Shape::send_warps) send_kept_rows<Shape>(args, shared, chunk, warp, lane);
    } else if (warp < Shape::send_warps) {
        send_loaded_rows<Shape>(args, shared, chunk, warp, lane);
    } else if (warp == Shape::send_warps) {  // the notify warp, which has fenced when it is told of an expert's row
        shared.outbox.progress.watch(
            lane, [&](int32 expert) { arrivals_of<Shape>(args, shared, expert).add_relaxed(0, 1); });
    }
    if (warp < Shape::send_warps && lane == 0) mark(args.call, kSent);
}
