// Waiting within a deadline: poll a flag until it reaches the epoch. A wait that expires leaves a record for the host.
#pragma once
#include "device/ptx/memory.cuh"

// In pinned host memory; the first wait of a rank that expires fills it. kernel_reports.py mirrors it.
struct FaultRecord {
    uint32 is_set;
    uint32 peer;
    uint32 phase;
    uint32 epoch;
    uint32 wanted;
    uint32 seen;
};

struct Deadline {
    FaultRecord* fault;    // pinned host memory
    uint32* fault_claimed; // device memory: 0 until a wait of this rank expires or its host gives up
    uint64 timeout_ns;
};

// What a wait is for, by number; kernel_reports.py has the words.
enum Phase : uint32 {
    kPhaseOpen = 1, kPhaseRows = 2, kPhasePartials = 3, kPhaseBlocks = 4, kPhaseForward = 5, kPhaseHome = 6,
    kPhaseArrivals = 7,
};

// Calls in a row that use different headers and regions: a rank may be three calls ahead of one that waits (device/transport/call.cuh). Epochs
// wrap, and then leave out those below kTurns.
constexpr uint32 kTurns = 4;

// Flags may be very old: they count only if they are no further ahead than their rank can be.
__device__ __forceinline__ bool has_reached(uint32 seen, uint32 wanted) {
    if (seen >= wanted) return seen - wanted < kTurns;
    return seen >= kTurns && seen - kTurns - wanted < kTurns;
}

__device__ __forceinline__ void record_fault(FaultRecord* record, uint32* claimed, uint32 peer, uint32 phase,
                                             uint32 epoch, uint32 wanted, uint32 seen) {
    if (compare_and_swap_gpu(claimed, 0, 1) != 0) return;
    record->peer = peer;
    record->phase = phase;
    record->epoch = epoch;
    record->wanted = wanted;
    record->seen = seen;
    store_release_sys(&record->is_set, 1);
}

// Whether a wait of this rank has expired, in this call or an earlier one: then nothing is as it should be.
__device__ __forceinline__ bool has_expired(const Deadline& deadline) {
    return load_relaxed_sys(deadline.fault_claimed) != 0;
}

constexpr int kPollsPerClock = 1024;

// One thread polls: `look` gives what it sees, and `is_there` says whether that is what the peer owes. False: expired, or
// another wait of this rank did; the caller must not touch what it waited for.
template <class Look, class IsThere>
__device__ __forceinline__ bool poll(Look look, IsThere is_there, uint32 wanted, const Deadline& deadline, uint32 peer,
                                     uint32 phase) {
    constexpr int kPollsBeforeSleep = 256;  // each waits for the one before
    uint64 began = 0;
    for (uint32 polls = 0; !is_there(look()); ++polls) {
        if (polls < kPollsBeforeSleep) continue;
        sleep_ns(64);
        if (polls % kPollsPerClock != 0) continue;
        const uint64 now = global_timer_ns();
        if (began == 0) began = now;
        if (now - began > deadline.timeout_ns) {
            record_fault(deadline.fault, deadline.fault_claimed, peer, phase, wanted, wanted, look());
            return false;
        }
        if (has_expired(deadline)) return false;
    }
    return true;
}

// One thread waits until the peer's flag reaches `wanted`. What the peer released before is visible to it then. False as
// above.
__device__ __forceinline__ bool wait_for_flag(const uint32* flag, uint32 wanted, const Deadline& deadline,
                                              uint32 peer, uint32 phase) {
    const auto look = [flag] { return load_relaxed_sys(flag); };
    const auto is_there = [wanted](uint32 seen) { return has_reached(seen, wanted); };
    if (!poll(look, is_there, wanted, deadline, peer, phase)) return false;
    load_acquire_sys(flag);
    return true;
}

// One thread of rank `self` waits for another block of its own grid. That block may have left because a wait expired,
// or may never run where the GPU has no room for all blocks. False as above.
__device__ __forceinline__ bool wait_for_block(const uint32* flag, uint32 wanted, const Deadline& deadline,
                                               uint32 self) {
    uint64 began = 0;
    for (uint32 polls = 1;; ++polls) {
        const uint32 seen = load_acquire_gpu(flag);
        if (seen == wanted) return true;
        if (has_expired(deadline)) return false;
        if (polls % kPollsPerClock != 0) continue;
        const uint64 now = global_timer_ns();
        if (began == 0) began = now;
        if (now - began > deadline.timeout_ns) {
            record_fault(deadline.fault, deadline.fault_claimed, self, kPhaseBlocks, wanted, wanted, seen);
            return false;
        }
    }
}
