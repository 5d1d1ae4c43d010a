// Where a rank's routes go, counted by the blocks of a kernel that sends rows.
//
// Tokens are split into one contiguous chunk per block. Each block counts its chunk, and adds the counts of the blocks
// before it (or counts their tokens itself, where they are few); so the last block knows the totals, which it sends to
// all ranks.
//
// A kernel's arguments have call, topk_ids, ids_are_int64, num_tokens and block_counts: flags of counts [kMostBlocks],
// as many flags for the kernel's own use, then counts of each block. Its shared memory has before[] and chunk[],
// kRouteCounts each.
#pragma once
#include "device/tile/routes.cuh"
#include "device/transport/call.cuh"

// Rows for each rank, then routes of each expert.
template <class Shape>
constexpr int kRouteCounts = Shape::num_ranks + Shape::num_experts;

struct Chunk {
    int32 begin, end;
};

__device__ __forceinline__ int32 chunk_size(int32 num_tokens, int32 blocks) { return (num_tokens + blocks - 1) / blocks; }

__device__ __forceinline__ int32 chunk_size(int32 num_tokens) { return chunk_size(num_tokens, gridDim.x); }

// Blocks behind the first so many have empty ones.
__device__ __forceinline__ Chunk chunk_of(int32 num_tokens, int32 block, int32 blocks) {
    const int32 size = chunk_size(num_tokens, blocks), begin = min(block * size, num_tokens);
    return {begin, min(begin + size, num_tokens)};
}

__device__ __forceinline__ Chunk chunk_of(int32 num_tokens, int32 block) {
    return chunk_of(num_tokens, block, gridDim.x);
}

// Expert of route token * K + k, or -1.
template <class Shape, class Args>
__device__ __forceinline__ int32 expert_of(const Args& args, int64 index) {
    return expert_of<Shape::num_experts>(args.topk_ids, args.ids_are_int64, index);
}

// The ids of one token, in 16-byte loads where rows of ids allow them.
template <class Shape, class Id>
struct TokenIds {
    static constexpr int kBytes = Shape::top_k * sizeof(Id);
    static constexpr bool kVectors = kBytes % 16 == 0;
    union {
        Id id[Shape::top_k];
        Vec16 part[kVectors ? kBytes / 16 : 1];
    };

    template <class Args>
    __device__ __forceinline__ void load(const Args& args, int32 token) {
        const auto* ids = static_cast<const Id*>(args.topk_ids) + static_cast<int64>(token) * Shape::top_k;
        if constexpr (kVectors) {
#pragma unroll
            for (int i = 0; i < kBytes / 16; ++i) part[i] = reinterpret_cast<const Vec16*>(ids)[i];
        } else {
#pragma unroll
            for (int k = 0; k < Shape::top_k; ++k) id[k] = ids[k];
        }
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int k = 0; k < Shape::top_k; ++k) id[k] = -1;
    }
};

// Adds the counts of a chunk to counts[W + E] in shared memory.
template <class Shape, class Id, class Args>
__device__ void count_routes_of(const Args& args, Chunk chunk, Turn turn, int32* counts) {
    const int lane = threadIdx.x % 32;
    constexpr int kOfLane = (Shape::num_ranks + 31) / 32;
    int32 rows_of_lane[kOfLane] = {};  // lane r % 32 counts the rows for rank r
    for (int32 first = chunk.begin + (threadIdx.x - lane); first < chunk.end; first += Shape::threads) {
        TokenIds<Shape, Id> ids;
        if (first + lane < chunk.end) ids.load(args, first + lane);
        else ids.clear();
        RankMask<Shape::num_ranks> ranks = 0;
#pragma unroll
        for (int k = 0; k < Shape::top_k; ++k) {
            const int32 expert = expert_of_id<Shape::num_experts>(ids.id[k]);
            if (expert < 0 || turn.leaves_out<Shape::num_ranks>(expert / Shape::experts_per_rank)) continue;
            ranks |= RankMask<Shape::num_ranks>{1} << (expert / Shape::experts_per_rank);
            atomicAdd(&counts[Shape::num_ranks + expert], 1);
        }
#pragma unroll
        for (int r = 0; r < Shape::num_ranks; ++r) {
            const int32 rows = __popc(__ballot_sync(~0u, (ranks >> r) & 1));
            if (lane == r % 32) rows_of_lane[r / 32] += rows;
        }
    }
#pragma unroll
    for (int i = 0; i < kOfLane; ++i)
        if (lane + 32 * i < Shape::num_ranks && rows_of_lane[i] != 0)
            atomicAdd(&counts[lane + 32 * i], rows_of_lane[i]);
}

template <class Shape, class Args>
__device__ void count_routes(const Args& args, Chunk chunk, Turn turn, int32* counts) {
    if (args.ids_are_int64) count_routes_of<Shape, int64>(args, chunk, turn, counts);
    else count_routes_of<Shape, int32>(args, chunk, turn, counts);
}

// shared.before and shared.chunk. Blocks wait for the counts of those before them, which run: a grid is no larger than
// what fits on the GPU at once. False: one of them has left, since a wait expired.
template <class Shape, class Args, class Shared>
__device__ bool count_all_routes(const Args& args, Shared& shared, Chunk chunk, Turn turn) {
    constexpr int kCounts = kRouteCounts<Shape>;
    for (int i = threadIdx.x; i < kCounts; i += Shape::threads) shared.before[i] = shared.chunk[i] = 0;
    __syncthreads();
    count_routes<Shape>(args, chunk, turn, shared.chunk);
    if (args.num_tokens <= 2 * Shape::threads) {  // faster than waiting for other blocks
        count_routes<Shape>(args, {0, chunk.begin}, turn, shared.before);
        __syncthreads();
        return true;
    }
    __syncthreads();
    static_assert(Shape::max_blocks == kMostBlocks, "flags for each block");
    int32* counts_of_block = args.block_counts + 2 * kMostBlocks;
    for (int i = threadIdx.x; i < kCounts; i += Shape::threads)
        counts_of_block[blockIdx.x * kCounts + i] = shared.chunk[i];
    __syncthreads();
    auto* flags = reinterpret_cast<uint32*>(args.block_counts);
    if (threadIdx.x == 0) store_release_gpu(flags + blockIdx.x, turn.epoch);
    const bool here =
        threadIdx.x >= blockIdx.x ||
        wait_for_block(flags + threadIdx.x, turn.epoch, deadline_of(args.call), args.call.rank);
    if (!__syncthreads_and(here)) return false;
    for (int i = threadIdx.x; i < kCounts; i += Shape::threads) {
        int32 sum = 0;
#pragma unroll 16
        for (int b = 0; b < blockIdx.x; ++b) sum += counts_of_block[b * kCounts + i];
        shared.before[i] = sum;
    }
    __syncthreads();
    return true;
}

// Counts of all ranks, as they lie in this rank's control buffer. Masked ranks have no tokens.
template <class Shape>
struct AllCounts {
    static constexpr int kStride = header_words<kRouteCounts<Shape>>;
    const StampedWord* headers;
    Turn turn;
    // Number `index` of what a source has counted: rows for each rank, then routes of each expert.
    __device__ int32 count(int source, int index) const {
        return turn.leaves_out<Shape::num_ranks>(source) ? 0 : headers[source * kStride + kHeaderWords + index].value;
    }
    __device__ int32 rows(int source, int rank) const { return count(source, rank); }
    __device__ int32 region(int rank) const { return headers[rank * kStride + kRegionWord].value; }
    __device__ int32 routes(int source, int expert) const { return count(source, Shape::num_ranks + expert); }
};
