// Rows that other ranks send while the GEMM that takes them runs already.
//
// A kernel beside it receives counts from all ranks, writes down where each expert's rows begin and how many every rank
// sends, and then says so. Each rank counts, for each expert, the rows that it has sent and that are there.
#pragma once
#include "device/roles/gate.cuh"
#include "device/sync/wait.cuh"

constexpr int kMostFusedRanks = 32;  // a bit of a word for each: here, and in kernels/moe

// Where the result of a row goes: the rank, and which row of that rank's results.
constexpr int kHomeRowBits = 26;

__device__ __forceinline__ uint32 home_of(int rank, int32 row) {
    return static_cast<uint32>(rank) << kHomeRowBits | static_cast<uint32>(row);
}

// What is said of a call. By all threads of a block: the epoch of the call, once the bounds of its experts can be read.
// No deadline: the kernel that says it runs already, and has deadlines of its own.
__device__ __forceinline__ uint32 wait_for_bounds(const uint32* begun, uint32& shared_epoch) {
    if (threadIdx.x == 0) {
        uint32 epoch;
        while ((epoch = load_acquire_gpu(begun)) == 0) {
        }
        shared_epoch = epoch;
    }
    __syncthreads();
    return shared_epoch;
}

// A gate as in gate.cuh: all rows of the tile's expert are here, from all ranks. Behind a wait that has expired the gate
// is open too, so that all roles come to their end. Nobody trusts the results then.
//
// Counts grow over all calls, and wrap. Nobody sends rows of the next call while this rank is in this one.
//
// Tiles come in the order of experts. What was found of an expert holds for all of its tiles.
template <int kRanks>
struct OpenWhenArrived {
    static_assert(kRanks <= kMostFusedRanks);
    const uint32* const& arrived;   // [experts][kRanks] rows, written by that rank
    const uint32* const& expected;  // [experts][kRanks] how many there are to be
    const Deadline& deadline;
    uint32 epoch;
    mutable int32 found = -1;  // the last expert whose rows are all here

    // Ranks whose rows are not here yet.
    __device__ __forceinline__ uint32 missing(int32 expert) const {
        const uint32 *counts = arrived + expert * kRanks, *wanted = expected + expert * kRanks;
        uint32 seen[kRanks], ranks = 0;  // all loads are on their way together
#pragma unroll
        for (int r = 0; r < kRanks; ++r) seen[r] = load_relaxed_sys(counts + r);
#pragma unroll
        for (int r = 0; r < kRanks; ++r)
            if (static_cast<int32>(seen[r] - wanted[r]) < 0) ranks |= 1u << r;
        return ranks;
    }

    __device__ __forceinline__ bool is_open(const Tile& tile) const {
        if (tile.expert == found) return true;
        if (missing(tile.expert) != 0) return false;
        enter(tile.expert);
        return true;
    }

    __device__ __forceinline__ void wait(const Tile& tile) const {
        if (tile.expert == found) return;
        constexpr uint32 kPollsOfClock = 256;
        uint64 began = 0;
        uint32 ranks;
        for (uint32 polls = 1; (ranks = missing(tile.expert)) != 0; ++polls) {
            if (polls % kPollsOfClock != 0) continue;
            if (has_expired(deadline)) break;
            const uint64 now = global_timer_ns();
            if (began == 0) began = now;
            if (now - began <= deadline.timeout_ns) continue;
            const uint32 rank = __ffs(ranks) - 1, place = tile.expert * kRanks + rank;
            record_fault(deadline.fault, deadline.fault_claimed, rank, kPhaseArrivals, epoch, expected[place],
                         load_relaxed_sys(arrived + place));
            break;
        }
        enter(tile.expert);
    }

    __device__ __forceinline__ void enter(int32 expert) const {
        fence_acquire_sys();
        fence_global_to_bulk();
        found = expert;
    }
};

// A destination as in store.cuh: each row of the output goes to the rank where its token is.
template <int kRanks>
struct RowsToHomes {
    const uint32* const& homes;     // [rows], see home_of
    const uint64 (&peers)[kRanks];  // every rank's buffer; in shared memory
    const uint64& offset;           // in it, of the results
    const uint32* const& fault_claimed;
    const int64 row_bytes;

    // After a wait of this rank has expired, homes may be of other calls. All lanes hear the same.
    __device__ __forceinline__ bool is_safe() const {
        return __shfl_sync(~0u, load_relaxed_sys(fault_claimed), 0) == 0;
    }

    __device__ __forceinline__ uint32 place_of(int64 row) const { return homes[row]; }
    __device__ __forceinline__ unsigned char* row(uint32 own, int64, int number) const {
        const uint32 home = __shfl_sync(~0u, own, number), row = home & ((1u << kHomeRowBits) - 1);
        return reinterpret_cast<unsigned char*>(peers[home >> kHomeRowBits] + offset + row * row_bytes);
    }
};
