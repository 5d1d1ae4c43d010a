// A tile source for rows that are grouped by expert. Tiles are counted on the device, from the rows of each expert.
//
// Both blocks of a cluster take the same rows, up to 128 of one expert, and neighbouring strips of 256 columns. The
// order is expert by expert, then pair of strips by pair of strips: clusters that run at the same time share weights in
// the second-level cache. Cluster c of C takes the pairs c, c + C, c + 2C, ...
#pragma once
#include "device/roles/gemm_tile.cuh"

// What the source reads, in shared memory. A launch may take a range of the experts.
template <int kExperts>
struct ExpertTable {
    int32 offsets[kExperts + 1];  // first row of each expert
    int32 first_expert, end_expert;

    // All threads of the block. The table is complete after a barrier.
    __device__ __forceinline__ void fill(const int32* from, int32 first, int32 end, int threads) {
        for (int i = threadIdx.x; i <= kExperts; i += threads) offsets[i] = from[i];
        if (threadIdx.x == 0) {
            first_expert = first;
            end_expert = end;
        }
    }
};

template <int kN>  // columns of the output before the epilogue
struct ExpertTiles {
    static constexpr int kStripPairs = (kN + 2 * kTileColumns - 1) / (2 * kTileColumns);
    const int32* offsets;
    int32 pair;  // of tiles, among those of its expert
    int32 expert, end_expert;

    template <int kExperts>
    __device__ explicit ExpertTiles(const ExpertTable<kExperts>& table)
        : offsets(table.offsets),
          pair(static_cast<int32>(blockIdx.x / kClusterBlocks) - static_cast<int32>(gridDim.x / kClusterBlocks)),
          expert(table.first_expert),
          end_expert(table.end_expert) {}

    __device__ int32 row_tiles() const { return (offsets[expert + 1] - offsets[expert] + kTileRows - 1) / kTileRows; }

    __device__ bool next() {
        for (pair += gridDim.x / kClusterBlocks; expert < end_expert; ++expert) {
            const int32 pairs = row_tiles() * kStripPairs;
            if (pair < pairs) return true;
            pair -= pairs;
        }
        return false;
    }

    __device__ Tile tile(int32 block) const {
        const int32 begin = offsets[expert], end = offsets[expert + 1], tiles = row_tiles();
        const int32 row = begin + pair % tiles * kTileRows;
        return {expert, row, min(end - row, kTileRows), (pair / tiles * kClusterBlocks + block) * kTileColumns,
                end - begin <= kGroupRows};
    }

    __device__ __forceinline__ void forget() { asm volatile("" : "+r"(pair)); }
};
