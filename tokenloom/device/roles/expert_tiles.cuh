// A tile source for rows that are grouped by expert. Tiles are counted on the device, from the rows of each expert.
//
// Both blocks of a cluster take the same rows, of one expert, and neighbouring strips of columns. The order is expert by
// expert, then pair of strips by pair of strips: clusters that run at the same time share weights in the second-level
// cache. Cluster c of C takes the pairs c, c + C, c + 2C, ...
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

// A *cut* says how tiles divide the output of an expert. Tiles begin at least kLeastStep rows apart.
//
//   kRows, kColumns               the most rows of a tile, and its columns
//   kN                            columns of the output before the epilogue
//   int32 tiles(int32 rows)       tiles of the same columns, of an expert with so many rows
//   Part part(int32 rows, int32 tile)    the rows of one of them
//   bool halves(int32 rows)       see Tile
struct Part {
    int32 first, rows;
};

// Tiles of recipe "block". A full one is as large as any.
template <int kOutputColumns>
struct FixedCut {
    static constexpr int kN = kOutputColumns, kRows = kRowsOfA, kColumns = kRowsOfB;
    static_assert(kRows >= kLeastStep, "as far apart as tiles have to begin");

    static __device__ __forceinline__ int32 tiles(int32 rows) { return (rows + kRows - 1) / kRows; }
    static __device__ __forceinline__ Part part(int32 rows, int32 tile) {
        return {tile * kRows, min(rows - tile * kRows, kRows)};
    }
    static __device__ __forceinline__ bool halves(int32 rows) { return rows <= kGroupRows; }
};

// Tiles of recipe "row". The time of one goes with its rows, rounded up to kStep. But one with few rows loads as many
// weights as any: where the last tile would have few, it shares evenly with the one before.
template <int kOutputColumns, int kMostRows = kRowsOfB>
struct EvenCut {
    static constexpr int kN = kOutputColumns, kRows = kMostRows, kColumns = kRowsOfA, kStep = 16;
    static_assert(kRows % 32 == 0 && kRows <= kRowsOfB, "whole boxes, as many as a product takes");
    static_assert(kRows / 2 >= kLeastStep, "two that share begin far enough apart");

    static __device__ __forceinline__ int32 tiles(int32 rows) { return (rows + kRows - 1) / kRows; }
    static __device__ __forceinline__ Part part(int32 rows, int32 tile) {
        const int32 last = tiles(rows) - 1, rest = rows - last * kRows, first = tile * kRows;
        const bool share = last > 0 && rest <= kRows / 2;
        if (!share || tile < last - 1) return {first, min(rows - first, kRows)};
        const int32 both = kRows + rest, half = ((both + 1) / 2 + kStep - 1) / kStep * kStep;
        return tile < last ? Part{first, half} : Part{first - kRows + half, both - half};
    }
    static __device__ __forceinline__ bool halves(int32) { return false; }
};

template <class Cut>
constexpr int kStripPairs = (Cut::kN + kClusterBlocks * Cut::kColumns - 1) / (kClusterBlocks * Cut::kColumns);

constexpr int32 kTilesAtOnce = 2;  // tiles of the same columns, which two clusters take at nearly the same time

template <class Cut, class Bounds>
__device__ __forceinline__ int32 pairs_of(const Bounds& bounds, int32 expert) {
    return Cut::tiles(bounds.end(expert) - bounds.begin(expert)) * kStripPairs<Cut>;
}

// A block's tile of a pair, which is counted among those of its expert.
template <class Cut, class Bounds>
__device__ __forceinline__ Tile tile_of(const Bounds& bounds, int32 expert, int32 pair, int32 block) {
    const int32 begin = bounds.begin(expert), rows = bounds.end(expert) - begin, tiles = Cut::tiles(rows);
    const Part part = Cut::part(rows, pair % tiles);
    return {expert, begin + part.first, part.rows, (pair / tiles * kClusterBlocks + block) * Cut::kColumns,
            Cut::halves(rows), tiles > kTilesAtOnce};
}

template <class Cut, class Bounds>
struct ExpertTiles {
    const Bounds& bounds;
    int32 pair;  // of tiles, among those of its expert
    int32 expert = 0;

    __device__ explicit ExpertTiles(const Bounds& bounds_)
        : bounds(bounds_),
          pair(static_cast<int32>(blockIdx.x / kClusterBlocks) - static_cast<int32>(gridDim.x / kClusterBlocks)) {}

    __device__ bool next(uint32) {
        for (pair += gridDim.x / kClusterBlocks; expert < Bounds::kExperts; ++expert) {
            const int32 pairs = pairs_of<Cut>(bounds, expert);
            if (pair < pairs) return true;
            pair -= pairs;
        }
        return false;
    }

    __device__ Tile tile(int32 block) const { return tile_of<Cut>(bounds, expert, pair, block); }

    __device__ __forceinline__ void before_block(int, int) {}
    __device__ __forceinline__ void forget() { asm volatile("" : "+r"(pair)); }
};
