// The planner of balanced batches, see tokenloom/ops/split_batch.py, whose results these are, bit for bit.
//
// One block counts the routes of each slot, a thread for each expert, and of each rank, a warp for each. One warp then
// moves routes from slot to slot. What it looks for, it finds by reductions, to which each lane brings the best of its
// own: lane l has ranks l and l + 32, and of each rank slots l, l + 32 and so on.
#pragma once
#include "device/ptx/memory.cuh"
#include "device/tile/shares.cuh"

struct SplitBatchArgs {
    const int32* counts;   // [W, E], routes of each source to each expert; fewer than 2^31 in all
    const int32* starts;   // [E + 1], where the slots of each expert begin in `slots`
    const int32* slots;    // slots of all experts, ascending for each
    const int32* experts;  // [W * S], the expert in each slot, -1 for none, and for all of masked ranks; -2: taken
    const int32* masked;   // [W], whether a rank takes no part
    Share* shares;         // [(W - 1) * S], of each slot the last routes come first
    int32* summary;        // rows of the fullest rank by the placement and by the split, most pulls by or from a rank, shares
    int32* slot_experts;   // [W * S], the expert in each slot by the split
    int32* before;         // [W * S], routes of earlier sources to each slot by the placement
    int32* heads;          // [W * S], the share of each slot that begins first, or -1
    int32 rank;            // this source
    int32 rows_per_pull;   // a split pays if the fullest rank loses so many routes for each of these pulls
    int32 always;          // split whether it pays or not
    int32 padding;
};

constexpr int32 kNoNumber = 0x7fffffff;
constexpr int32 kEmpty = -1;

template <class Shape>
struct SplitMemory {
    static constexpr int kSlots = Shape::num_ranks * Shape::slots_per_rank;
    int32 left[kSlots];    // routes that each slot has, without those that others have given it
    int32 before[kSlots];
    int32 experts[kSlots];
    int32 heads[kSlots];
    int32 loads[Shape::num_ranks];
    int32 is_split;
};

struct Most {  // a value, and who has it
    int32 value, number;

    __device__ __forceinline__ void meet(int32 other, int32 its_number) {  // numbers ascend
        if (other > value) value = other, number = its_number;
    }
};

// The largest value of all lanes, and the first number that has it.
__device__ __forceinline__ Most most_of_lanes(Most own) {
    const int32 value = __reduce_max_sync(~0u, own.value);
    return {value, __reduce_min_sync(~0u, own.value == value ? own.number : kNoNumber)};
}

// Routes of an expert to each of its slots. Route n of a source goes to slot (source + n) % replicas of them.
template <class Shape>
__device__ __forceinline__ void count_expert(const SplitBatchArgs& args, SplitMemory<Shape>& memory, int expert) {
    constexpr int kAtOnce = Shape::num_ranks < 16 ? Shape::num_ranks : 16;  // loads that are on their way together
    const int32 begin = args.starts[expert];
    const uint32 replicas = args.starts[expert + 1] - begin;
    for (int first = 0; first < Shape::num_ranks; first += kAtOnce) {
        uint32 rest[kAtOnce], offset[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
            rest[j] = first + j < Shape::num_ranks ? args.counts[(first + j) * Shape::num_experts + expert] : 0;
        int32 all_whole = 0, whole_before = 0;  // of each replica alike
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            uint32 whole = rest[j];
            offset[j] = 0;
            if (replicas > 1) whole /= replicas, offset[j] = (first + j) % replicas;
            rest[j] -= whole * replicas;
            all_whole += whole;
            if (first + j < args.rank) whole_before += whole;
        }
        for (uint32 number = 0; number < replicas; ++number) {
            const int32 slot = args.slots[begin + number];
            int32 all = all_whole, before = whole_before;
            if (replicas > 1) {
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j) {
                    const uint32 since = number < offset[j] ? number + replicas - offset[j] : number - offset[j];
                    if (since >= rest[j]) continue;
                    ++all;
                    if (first + j < args.rank) ++before;
                }
            }
            if (first > 0) all += memory.left[slot], before += memory.before[slot];
            memory.left[slot] = all, memory.before[slot] = before;
        }
    }
}

// One warp. Fills memory.experts, memory.heads, memory.is_split, and what is not of one slot.
template <class Shape>
__device__ __forceinline__ void split_loads(const SplitBatchArgs& args, SplitMemory<Shape>& memory,
                                            const bool (&is_masked)[(Shape::num_ranks + 31) / 32], int lane) {
    constexpr int kPerRank = Shape::slots_per_rank, kOfLane = (Shape::num_ranks + 31) / 32;
    constexpr int kSlotsOfLane = (kPerRank + 31) / 32;
    int32 surplus[kOfLane], total = 0, fullest = 0, present = 0;
    bool helps[kOfLane];  // not masked, and nobody has given it anything
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) {
        helps[j] = lane + 32 * j < Shape::num_ranks && !is_masked[j];
        surplus[j] = lane + 32 * j < Shape::num_ranks ? memory.loads[lane + 32 * j] : 0;
        total += surplus[j], fullest = max(fullest, surplus[j]), present += helps[j];
    }
    total = __reduce_add_sync(~0u, total), present = max(1, __reduce_add_sync(~0u, present));
    const int32 rows_before = __reduce_max_sync(~0u, fullest);
    const int32 mean = total / present + (total % present > 0);
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) surplus[j] -= mean;

    int32 num_shares = 0, most_pulls = 0, sends[kOfLane] = {};
    for (;;) {
        int32 too_many = 0;
        Most largest = {-kNoNumber, kNoNumber}, lack = {0, kNoNumber};
#pragma unroll
        for (int j = 0; j < kOfLane; ++j) {
            too_many += max(0, surplus[j]);
            largest.meet(surplus[j], lane + 32 * j);
            if (helps[j]) lack.meet(-surplus[j], lane + 32 * j);
        }
        too_many = __reduce_add_sync(~0u, too_many);
        const int32 giver = most_of_lanes(largest).number;
        lack = most_of_lanes(lack);
        if (too_many == 0 || lack.value == 0) break;
        const int32 helper = lack.number, room = min(lack.value, too_many);
        int32 *const left = memory.left + giver * kPerRank, *const experts = memory.experts + helper * kPerRank;
        int32 wanted = room, pulls = 0;
        while (wanted > 0) {
            // Each lane alone writes what it reads here, so the warp need not meet.
            Most fullest_slot = {0, kNoNumber};
#pragma unroll 4
            for (int j = 0; j < kSlotsOfLane; ++j)
                if (const int i = lane + 32 * j; i < kPerRank) fullest_slot.meet(left[i], i);
            fullest_slot = most_of_lanes(fullest_slot);
            if (fullest_slot.value == 0) break;  // only if counts are none
            const int32 slot = giver * kPerRank + fullest_slot.number, expert = memory.experts[slot];
            const int32 next = lane == 0 ? memory.heads[slot] : -1;
            int32 found = kNoNumber;  // the helper's slot for the expert, or else an empty one, of each the first
#pragma unroll 4
            for (int j = 0; j < kSlotsOfLane; ++j) {
                const int i = lane + 32 * j;
                if (i >= kPerRank) continue;
                const int32 here = experts[i];
                found = min(found, here == expert ? i : here == kEmpty ? kPerRank + i : kNoNumber);
            }
            found = __reduce_min_sync(~0u, found);
            if (found == kNoNumber) break;
            const bool pulled = found >= kPerRank;
            const int32 place = pulled ? found - kPerRank : found, moved = min(fullest_slot.value, wanted);
            const int32 first = fullest_slot.value - moved;
            if (fullest_slot.number % 32 == lane) left[fullest_slot.number] = first;
            if (pulled && place % 32 == lane) experts[place] = expert;
            if (lane == 0) {
                args.shares[num_shares] = {slot, first, helper * kPerRank + place, next};
                memory.heads[slot] = num_shares;
            }
            ++num_shares, pulls += pulled, wanted -= moved;
        }
        const int32 given = room - wanted;
        most_pulls = max(most_pulls, pulls);
#pragma unroll
        for (int j = 0; j < kOfLane; ++j) {
            if (giver == lane + 32 * j) surplus[j] -= given, sends[j] += pulls;
            if (helper == lane + 32 * j) surplus[j] += given, helps[j] = false;
        }
    }
    int32 largest = surplus[0], most_sends = sends[0];
    if constexpr (kOfLane > 1) largest = max(largest, surplus[1]), most_sends = max(most_sends, sends[1]);
    most_pulls = max(most_pulls, __reduce_max_sync(~0u, most_sends));
    const int32 rows = mean + __reduce_max_sync(~0u, largest);
    const int64 least = max(int64{1}, static_cast<int64>(args.rows_per_pull) * most_pulls);
    const bool is_split = num_shares > 0 && (args.always || rows_before - rows >= least);
    if (lane == 0) {
        memory.is_split = is_split;
        args.summary[0] = rows_before;
        args.summary[1] = is_split ? rows : rows_before;
        args.summary[2] = is_split ? most_pulls : 0;
        args.summary[3] = is_split ? num_shares : 0;
    }
}

template <class Shape>
__device__ void split_batch(const SplitBatchArgs& args) {
    extern __shared__ __align__(16) unsigned char dynamic[];
    using Memory = SplitMemory<Shape>;
    static_assert(sizeof(Memory) <= Shape::shared_bytes, "dynamic shared memory");
    auto& memory = *reinterpret_cast<Memory*>(dynamic);
    constexpr int kWarps = Shape::threads / 32, kOfLane = (Shape::num_ranks + 31) / 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Loaded early: the warp that plans would wait for it alone.
    bool is_masked[kOfLane];
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) {
        const int rank = lane + 32 * j;
        is_masked[j] = warp == 0 && rank < Shape::num_ranks && args.masked[rank] != 0;
    }
    for (int expert = threadIdx.x; expert < Shape::num_experts; expert += Shape::threads)
        count_expert<Shape>(args, memory, expert);
    // From the last thread on, since the first ones have experts.
    for (int slot = Shape::threads - 1 - threadIdx.x; slot < Memory::kSlots; slot += Shape::threads) {
        const int32 expert = args.experts[slot];
        memory.experts[slot] = expert, memory.heads[slot] = -1;
        if (expert < 0) memory.left[slot] = memory.before[slot] = 0;
    }
    __syncthreads();
    for (int rank = warp; rank < Shape::num_ranks; rank += kWarps) {
        int32 load = 0;
        for (int i = lane; i < Shape::slots_per_rank; i += 32) load += memory.left[rank * Shape::slots_per_rank + i];
        load = __reduce_add_sync(~0u, load);
        if (lane == 0) memory.loads[rank] = load;
    }
    __syncthreads();
    if (warp == 0) split_loads<Shape>(args, memory, is_masked, lane);
    else
        for (int slot = threadIdx.x - 32; slot < Memory::kSlots; slot += Shape::threads - 32)
            args.before[slot] = memory.before[slot];
    __syncthreads();
    const bool is_split = memory.is_split;
    for (int slot = threadIdx.x; slot < Memory::kSlots; slot += Shape::threads) {
        args.slot_experts[slot] = max(kEmpty, is_split ? memory.experts[slot] : args.experts[slot]);
        args.heads[slot] = is_split ? memory.heads[slot] : -1;
    }
}
