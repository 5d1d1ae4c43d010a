// Rows of a tile on their way to memory: math warpgroups stage them in shared memory and go on; storing warps write
// them where they belong.
#pragma once
#include "device/ptx/bulk.cuh"
#include "device/roles/gemm_tile.cuh"

constexpr int kStagingArrivals = kGroupWarps;  // on a full buffer: each warp of the warpgroup

// From one staged row to the next: padded against bank conflicts.
template <int kRowBytes>
constexpr int kStagingPitch = kRowBytes + 16;

// Each warpgroup has a buffer and a pair of barriers of its own.
template <int kMostRows, int kBytes>
struct Staging {
    static constexpr int kRows = kMostRows, kRowBytes = kBytes;  // of a warpgroup
    alignas(16) unsigned char rows[kGroups][kRows * kStagingPitch<kRowBytes>];
    uint64 full[kGroups];
    uint64 empty[kGroups];

    __device__ __forceinline__ void init(uint32 full_arrivals, uint32 empty_arrivals) {
        for (int i = 0; i < kGroups; ++i) {
            mbarrier_init(&full[i], full_arrivals);
            mbarrier_init(&empty[i], empty_arrivals);
        }
    }

    // A warpgroup waits until the storing warps have read what it staged for the tile before `tile`.
    __device__ __forceinline__ void wait_for_room(uint32 tile, int group) {
        mbarrier_wait(&empty[group], tile & 1 ^ 1);
    }

    // Each warp of a warpgroup says that its rows are there.
    __device__ __forceinline__ void publish(int group, int lane) {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&full[group]);
    }
};

// Where the columns of a warpgroup begin in a row of a tile. It has kChunks of the row's halves.
template <int kChunks>
__device__ __forceinline__ int first_byte(int row_bytes, int group) {
    return kChunks == kHalves ? 0 : group * (row_bytes / kHalves);
}
