// A tile source for rows that are grouped by expert. Tiles are counted on the device, from the rows of each expert.
//
// Both blocks of a cluster take the same rows, up to 128 of one expert, and neighbouring strips of 256 columns. The
// order is expert by expert, then pair of strips by pair of strips: clusters that run at the same time share weights in
// the second-level cache. Cluster c of C takes the pairs c, c + C, c + 2C, ...
#pragma once
#include "device/roles/gemm_tile.cuh"

// *Bounds* say which rows are which of kExperts experts', in shared memory:
//
//   fill(..., int threads)     by all threads of the block; complete after a barrier
//   int32 begin(int32 expert)  its first row
//   int32 end(int32 expert)    the row after its last
//
// Here each expert's rows follow those of the one before.
template <int kNumExperts>
struct BoundsByOffset {
    static constexpr int32 kExperts = kNumExperts;
    int32 offsets[kExperts + 1];  // first row of each expert

    __device__ __forceinline__ void fill(const int32* from, int threads) {
        for (int i = threadIdx.x; i <= kExperts; i += threads) offsets[i] = from[i];
    }
    __device__ __forceinline__ int32 begin(int32 expert) const { return offsets[expert]; }
    __device__ __forceinline__ int32 end(int32 expert) const { return offsets[expert + 1]; }
};

// Here each expert has as many places as the others, and its rows fill the first of them.
template <int kNumExperts>
struct BoundsInSlots {
    static constexpr int32 kExperts = kNumExperts;
    int32 counts[kExperts];
    int32 capacity;  // places of each expert

    __device__ __forceinline__ void fill(const int32* from, int32 places, int threads) {
        for (int i = threadIdx.x; i < kExperts; i += threads) counts[i] = min(from[i], places);
        if (threadIdx.x == 0) capacity = places;
    }
    __device__ __forceinline__ int32 begin(int32 expert) const { return expert * capacity; }
    __device__ __forceinline__ int32 end(int32 expert) const { return begin(expert) + counts[expert]; }
};

template <int kN>  // columns of the output before the epilogue
constexpr int kStripPairs = (kN + 2 * kTileColumns - 1) / (2 * kTileColumns);

constexpr int32 kTilesAtOnce = 2;  // tiles of the same columns, which two clusters take at nearly the same time

template <class Bounds>
__device__ __forceinline__ int32 row_tiles_of(const Bounds& bounds, int32 expert) {
    return (bounds.end(expert) - bounds.begin(expert) + kTileRows - 1) / kTileRows;
}

// A block's tile of a pair, which is counted among those of its expert.
template <int kN, class Bounds>
__device__ __forceinline__ Tile tile_of(const Bounds& bounds, int32 expert, int32 pair, int32 block) {
    const int32 begin = bounds.begin(expert), end = bounds.end(expert), tiles = row_tiles_of(bounds, expert);
    const int32 row = begin + pair % tiles * kTileRows;
    return {expert, row, min(end - row, kTileRows), (pair / tiles * kClusterBlocks + block) * kTileColumns,
            end - begin <= kGroupRows, tiles > kTilesAtOnce};
}

template <int kN, class Bounds>
struct ExpertTiles {
    const Bounds& bounds;
    int32 pair;  // of tiles, among those of its expert
    int32 expert = 0;

    __device__ explicit ExpertTiles(const Bounds& bounds_)
        : bounds(bounds_),
          pair(static_cast<int32>(blockIdx.x / kClusterBlocks) - static_cast<int32>(gridDim.x / kClusterBlocks)) {}

    __device__ bool next(uint32) {
        for (pair += gridDim.x / kClusterBlocks; expert < Bounds::kExperts; ++expert) {
            const int32 pairs = row_tiles_of(bounds, expert) * kStripPairs<kN>;
            if (pair < pairs) return true;
            pair -= pairs;
        }
        return false;
    }

    __device__ Tile tile(int32 block) const { return tile_of<kN>(bounds, expert, pair, block); }

    __device__ __forceinline__ void before_block(int, int) {}
    __device__ __forceinline__ void forget() { asm volatile("" : "+r"(pair)); }
};
