// How every call opens: each rank tells all others that it has begun, its status, and what it was asked for.
//
// A rank's row is kHeaderWords of header, then (dispatch) its counts. Rows lie in every rank's control buffer, by
// parity of the epoch and by source. A flag that shows the epoch means: the row is here, and that rank has let go of
// what it received before. Two parities suffice: a rank that writes a row of epoch n + 2 has seen all flags of
// n + 1, so everyone has left n.
#pragma once
#include "device/sync/symmetric.cuh"
#include "device/sync/wait.cuh"

constexpr int kFields = 13;
constexpr int kHeaderWords = 16;  // status, fields, region, spare
constexpr int kRegionWord = 1 + kFields;

// In pinned host memory; written only when something is wrong. symmetric.py mirrors it.
struct CallRecord {
    uint32 needed_rows;    // rows that the fullest rank needs, if over the capacity
    uint32 capacity;       // the capacity then
    uint32 faulty_rank;    // 1 + the lowest rank with a status, or 0
    int32 status;          // its status
    uint32 differing_rank; // 1 + the lowest rank with other fields than rank 0, or 0
    uint32 field;          // the first that differs
    int32 theirs;
    int32 rank0s;
};

struct Call {
    const uint64* peers;  // [W] device memory: every rank's control buffer
    uint64 flags;         // uint32 [W]
    uint64 rows;          // int32 [2][W][kHeaderWords + counts]
    uint32* epoch;        // device memory: calls done so far
    uint32* blocks_out;   // device memory: blocks that have left this call
    uint32* claimed;      // device memory [2]: items that warps have claimed, of two kinds of work
    CallRecord* record;
    FaultRecord* fault;
    uint32* fault_claimed;
    uint64 timeout_ns;
    uint64* trace;        // null, or [blocks][kMarks] times in ns
    int32 rank;
    int32 status;  // 0, or what went wrong here before the call: then nobody sends anything
    int32 region;  // where this rank wants what it receives; may be another one on every rank
    int32 fields[kFields];
};

// The epoch of this call. Never 0, which flags show that nobody has raised; 2 instead, since parities alternate.
__device__ __forceinline__ uint32 epoch_of(const Call& call) {
    const uint32 next = *call.epoch + 1;
    return next != 0 ? next : 2;
}

// What a block has done, for measurements (microbench/phases.py has the words).
enum Mark { kBegun, kCounted, kHeard, kPlaced, kSent, kTold, kFilled, kSummed, kDone };
constexpr int kMarks = 16;

// Of several warps with the same mark the last one counts.
__device__ __forceinline__ void mark(const Call& call, Mark what) {
    if (call.trace != nullptr) call.trace[blockIdx.x * kMarks + what] = global_timer_ns();
}

enum class Opened { kGo, kRefused, kExpired };

__device__ __forceinline__ Deadline deadline_of(const Call& call) {
    return {call.fault, call.fault_claimed, call.timeout_ns};
}

template <int kCounts>
constexpr int row_words = (kHeaderWords + kCounts + 3) / 4 * 4;  // whole 16-byte units

template <int kRanks, int kCounts>
__device__ __forceinline__ uint64 row_offset(const Call& call, uint32 epoch, int source) {
    return call.rows + static_cast<uint64>((epoch & 1) * kRanks + source) * row_words<kCounts> * sizeof(int32);
}

// This rank's row to all ranks, then the flag. One block calls it, with all its threads. `row`, in shared memory, has
// the counts behind kHeaderWords that are filled in here.
template <int kRanks, int kCounts, int kThreads>
__device__ void announce_call(const Call& call, uint32 epoch, int num_counts, int32* row) {
    if (threadIdx.x < kHeaderWords)
        row[threadIdx.x] = threadIdx.x == 0             ? call.status
                           : threadIdx.x <= kFields     ? call.fields[threadIdx.x - 1]
                           : threadIdx.x == kRegionWord ? call.region
                                                        : 0;
    __syncthreads();
    const uint64 mine = row_offset<kRanks, kCounts>(call, epoch, call.rank);
    const int units = (kHeaderWords + num_counts + 3) / 4;
    for (int i = threadIdx.x; i < units * kRanks; i += kThreads)
        store_16(at_peer<unsigned char>(call.peers, i % kRanks, mine) + i / kRanks * 16,
                 reinterpret_cast<const Vec16*>(row)[i / kRanks]);
    __syncthreads();
    if (threadIdx.x < kRanks)
        store_release_sys(at_peer<uint32>(call.peers, threadIdx.x, call.flags) + call.rank, epoch);
}

// All ranks' rows are here, and all of them mean the same call. Every block calls it, with all its threads, and gets
// the same answer on all ranks; block 0 records what is wrong.
template <int kRanks, int kCounts>
__device__ Opened await_call(const Call& call, uint32 epoch) {
    const Deadline deadline = deadline_of(call);
    const int peer = threadIdx.x;
    bool here = true;
    int32 status = 0;
    int differs = kFields;
    if (peer < kRanks) {
        const auto* flags = at_peer<const uint32>(call.peers, call.rank, call.flags);
        here = wait_for_flag<Flag::kEveryCall>(flags + peer, epoch, deadline, peer, kPhaseOpen);
    }
    if (!__syncthreads_and(here)) return Opened::kExpired;
    const auto* row = at_peer<const int32>(call.peers, call.rank, row_offset<kRanks, kCounts>(call, epoch, peer));
    const auto* row0 = at_peer<const int32>(call.peers, call.rank, row_offset<kRanks, kCounts>(call, epoch, 0));
    if (peer < kRanks) {
        status = row[0];
        for (int f = kFields - 1; f >= 0; --f)
            if (row[1 + f] != row0[1 + f]) differs = f;
    }
    const bool fine = status == 0 && differs == kFields;
    if (__syncthreads_and(fine)) return Opened::kGo;
    if (blockIdx.x == 0 && threadIdx.x < 32) {
        const uint32 faulty = __ballot_sync(~0u, status != 0), differing = __ballot_sync(~0u, differs != kFields);
        if (faulty != 0 && threadIdx.x == __ffs(faulty) - 1) {
            call.record->status = status;
            store_release_sys(&call.record->faulty_rank, threadIdx.x + 1);
        }
        if (differing != 0 && threadIdx.x == __ffs(differing) - 1) {
            call.record->field = differs;
            call.record->theirs = row[1 + differs];
            call.record->rank0s = row0[1 + differs];
            store_release_sys(&call.record->differing_rank, threadIdx.x + 1);
        }
    }
    return Opened::kRefused;
}

// Work that the warps of all blocks share. Each warp begins with an item of its own, then takes what nobody has: SMs
// send at very different rates when the links are full. The next claim is on its way while an item is worked on.
struct Claims {
    uint32* counter;
    uint32 own;
    int lane;

    __device__ Claims(uint32* counter_, int lane_) : counter(counter_), lane(lane_) { advance(); }
    __device__ void advance() { own = lane == 0 ? add_relaxed_gpu(counter, 1) : 0; }
    __device__ uint32 take() {
        const uint32 item = __shfl_sync(~0u, own, 0);
        advance();
        return item;
    }
};

// Every block's last step. The last one out advances the epoch: all blocks have read it then.
__device__ __forceinline__ void close_call(const Call& call, uint32 epoch) {
    __syncthreads();
    if (threadIdx.x == 0 && add_acq_rel_gpu(call.blocks_out, 1) == gridDim.x - 1) {
        *call.blocks_out = 0;
        call.claimed[0] = call.claimed[1] = 0;
        *call.epoch = epoch;
    }
}
