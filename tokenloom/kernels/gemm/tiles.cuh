// Which tiles a cluster of two blocks computes, counted on the device from the rows of each expert.
//
// Both blocks take the same rows, up to 128 of one expert, and neighbouring strips of 256 columns. Order: expert by
// expert, pair of strips by pair of strips, so that clusters that run at once share weights in the second-level cache.
#pragma once
#include "kernels/gemm/args.cuh"

struct Tile {
    int32 expert, row, rows, column;  // 1..128 rows

    // Warpgroups that have rows to multiply.
    __device__ __forceinline__ int groups() const { return (rows + kGroupRows - 1) / kGroupRows; }
};

template <class Shape>
struct TileSource {
    static constexpr int kStripPairs = (Shape::n + 2 * kTileColumns - 1) / (2 * kTileColumns);
    const int32* offsets;
    int32 block;       // of the cluster
    int32 next_pair;   // of tiles, among all
    int32 expert = 0;  // of the next pair, at the earliest
    int32 before = 0;  // pairs of the experts before it

    __device__ TileSource(const int32* offsets_, int32 block_)
        : offsets(offsets_), block(block_), next_pair(blockIdx.x / 2) {}

    __device__ bool next(Tile& tile) {
        for (; expert < Shape::num_experts; ++expert) {
            const int32 begin = offsets[expert], end = offsets[expert + 1];
            const int32 row_tiles = (end - begin + kTileRows - 1) / kTileRows, pairs = row_tiles * kStripPairs;
            const int32 pair = next_pair - before;
            if (pair < pairs) {
                const int32 row = begin + pair % row_tiles * kTileRows;
                tile = {expert, row, min(end - row, kTileRows), (pair / row_tiles * 2 + block) * kTileColumns};
                next_pair += gridDim.x / 2;
                return true;
            }
            before += pairs;
        }
        return false;
    }
};
