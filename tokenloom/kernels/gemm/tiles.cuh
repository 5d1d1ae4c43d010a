// Which tiles a cluster of two blocks computes, counted on the device from the rows of each expert.
//
// Both blocks take the same rows, up to 128 of one expert, and neighbouring strips of 256 columns. Order: expert by
// expert, pair of strips by pair of strips, so that clusters that run at once share weights in the second-level cache.
#pragma once
#include "kernels/gemm/trace.cuh"

struct Tile {
    int32 expert, row, rows, column;  // 1..128 rows
    bool halves;  // the warpgroups take half of the columns each, not of the rows: all rows of an expert that has few

    // Warpgroups that have rows to multiply.
    __device__ __forceinline__ int groups() const { return (rows + kGroupRows - 1) / kGroupRows; }
};

template <class Shape>
struct TileSource {
    static constexpr int kStripPairs = (Shape::n + 2 * kTileColumns - 1) / (2 * kTileColumns);
    const int32* offsets;
    int32 pair;  // of tiles, among those of its expert
    int32 expert, end_expert;

    __device__ explicit TileSource(const GemmShared<Shape>& shared)
        : offsets(shared.offsets),
          pair(static_cast<int32>(blockIdx.x / 2) - static_cast<int32>(gridDim.x / 2)),
          expert(shared.first_expert),
          end_expert(shared.end_expert) {}

    __device__ int32 row_tiles() const { return (offsets[expert + 1] - offsets[expert] + kTileRows - 1) / kTileRows; }

    // To the next pair of this cluster; false behind the last.
    __device__ bool next() {
        for (pair += gridDim.x / 2; expert < end_expert; ++expert) {
            const int32 pairs = row_tiles() * kStripPairs;
            if (pair < pairs) return true;
            pair -= pairs;
        }
        return false;
    }

    // Its tile of a block of the cluster.
    __device__ Tile tile(int32 block) const {
        const int32 begin = offsets[expert], end = offsets[expert + 1], tiles = row_tiles();
        const int32 row = begin + pair % tiles * kTileRows;
        return {expert, row, min(end - row, kTileRows), (pair / tiles * 2 + block) * kTileColumns,
                end - begin <= kGroupRows};
    }
};
