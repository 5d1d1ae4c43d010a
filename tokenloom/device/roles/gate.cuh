// Two GEMMs in turn, of which the second takes the rows of a tile as soon as the first has stored them.
//
// The first counts, for each tile of rows, the storing warps that have stored a strip of it. Both have the same tiles
// of rows: a tile has the same place among the counts in both.
#pragma once
#include "device/ptx/bulk.cuh"
#include "device/ptx/memory.cuh"
#include "device/roles/gemm_tile.cuh"

// No other tile of rows has the same place: each begins kLeastStep rows behind the one before, or with the next expert.
__device__ __forceinline__ int32 place_among_tiles(const Tile& tile) { return tile.row / kLeastStep + tile.expert; }

// A *gate* says when the rows of a tile are there:
//
//   bool is_open(tile)   whether they are
//   void wait(tile)      waits for them; TMA and this thread may then load them
struct AlwaysOpen {
    __device__ __forceinline__ bool is_open(const Tile&) const { return true; }
    __device__ __forceinline__ void wait(const Tile&) const {}
};

// kQuantized: rows are quantised once they are whole, and counted then (quantize.cuh).
template <bool kQuantized>
struct OpenWhenStored {
    uint32* const& stored;  // [places] of tiles
    const uint32& wanted;   // storing warps that report each tile of rows

    __device__ __forceinline__ bool is_open(const Tile& tile) const {
        const uint32 rows = kQuantized ? tile.rows : 0;
        return load_acquire_gpu(stored + place_among_tiles(tile)) >= wanted + rows;
    }
    // No deadline: the kernel that stores them runs already, and its own waits have one. Once for each tile: what lies
    // beside its rows, in the same cache lines, may still arrive, so nothing found for one tile holds for another.
    __device__ __forceinline__ void wait(const Tile& tile) const {
        while (!is_open(tile)) {
        }
        fence_global_to_bulk();
    }
};

// A *report* tells who waits that a storing warp has stored its part of a tile: stored(tile), by all lanes.
struct NoReport {
    __device__ __forceinline__ void stored(const Tile&) const {}
};

struct ReportTiles {
    uint32* const& counts;  // [places] of tiles, 0 before

    __device__ __forceinline__ void stored(const Tile& tile) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) add_release_gpu(counts + place_among_tiles(tile), 1);
    }
};
