// Which tiles a cluster of two blocks computes, counted on the device from the rows of each expert.
//
// A tile is up to 128 rows of one expert times a strip of 256 columns. The two blocks of a cluster take neighbours: two
// tiles of rows and the same strip, so that they share weights; or, for the last tile of an odd number, the same rows and
// two strips, so that they share rows. Order: expert by expert, strip by strip, so that clusters that run at once share
// weights in the second-level cache.
#pragma once
#include "kernels/gemm/args.cuh"

struct Tile {
    int32 expert, row, rows, column;  // 1..128 rows
    bool shares_weights;              // with the other block; else it shares rows

    // Warpgroups that have rows to multiply.
    __device__ __forceinline__ int groups() const { return (rows + kGroupRows - 1) / kGroupRows; }
};

template <class Shape>
struct TileSource {
    static constexpr int kStrips = (Shape::n + kTileColumns - 1) / kTileColumns, kStripPairs = (kStrips + 1) / 2;
    const int32* offsets;
    int32 pair;        // of tiles, among those of its expert
    int32 expert = 0;

    __device__ explicit TileSource(const int32* offsets_)
        : offsets(offsets_), pair(static_cast<int32>(blockIdx.x / 2) - static_cast<int32>(gridDim.x / 2)) {}

    __device__ int32 row_tiles() const { return (offsets[expert + 1] - offsets[expert] + kTileRows - 1) / kTileRows; }

    // To the next pair of this cluster; false behind the last.
    __device__ bool next() {
        for (pair += gridDim.x / 2; expert < Shape::num_experts; ++expert) {
            const int32 tiles = row_tiles(), pairs = tiles / 2 * kStrips + tiles % 2 * kStripPairs;
            if (pair < pairs) return true;
            pair -= pairs;
        }
        return false;
    }

    // This block's of the pair.
    __device__ Tile tile(int32 block) const {
        const int32 begin = offsets[expert], end = offsets[expert + 1], tiles = row_tiles();
        const int32 row_pairs = tiles / 2, odd = pair - row_pairs * kStrips;  // not below 0: of the last, odd tile
        const bool shares_weights = odd < 0;
        const int32 row = begin + (shares_weights ? pair % row_pairs * 2 + block : tiles - 1) * kTileRows;
        const int32 strip = shares_weights ? pair / row_pairs : odd * 2 + block;
        return {expert, row, min(end - row, kTileRows), strip * kTileColumns, shares_weights};
    }
};
