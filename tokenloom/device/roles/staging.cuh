// Rows of a tile on their way to memory: math warpgroups stage them in shared memory and go on; storing warps write
// them where they belong.
#pragma once
#include "device/ptx/bulk.cuh"
#include "device/roles/gemm_tile.cuh"

constexpr int kStagingArrivals = kGroupWarps;  // on a full buffer: each warp of the warpgroup

// *Lines* say where a unit of 16 bytes of a staged row lies. Lanes that write the same unit of eight rows, or read all units
// of some rows, meet no bank twice.
//
//   kPitch             from one row to the next
//   kRowsAlike         rows that many apart have their units in the same order
//   place(row, unit)
//
// Here a gap follows each row. Units keep their order, so a row may be written in smaller pieces, too.
template <int kBytes>
struct PaddedLines {
    static constexpr int kPitch = kBytes + 16, kRowsAlike = 1;
    static __device__ __forceinline__ int place(int row, int unit) { return row * kPitch + unit * 16; }
};

// Here there are no gaps, which together can hold a stage of operands. Units change places instead.
template <int kBytes>
struct DenseLines {
    static constexpr int kPitch = kBytes, kUnits = kBytes / 16, kRowsOfBanks = 128 / kBytes;  // rows that have all banks
    static constexpr int kRowsAlike = kRowsOfBanks * kUnits;
    static_assert(kBytes == 64 || kBytes == 128, "eight rows have all banks for a unit");
    static __device__ __forceinline__ int place(int row, int unit) {
        return row * kPitch + (unit ^ row / kRowsOfBanks % kUnits) * 16;
    }
};

// Each warpgroup has a buffer and a pair of barriers of its own.
template <int kMostRows, int kBytes, template <int> class LinesOf = PaddedLines>
struct Staging {
    static constexpr int kRows = kMostRows, kRowBytes = kBytes;  // of a warpgroup
    using Lines = LinesOf<kRowBytes>;
    alignas(16) unsigned char rows[kGroups][kRows * Lines::kPitch];
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
