// A warp adds rows that lie anywhere in this GPU's memory, weighted or not, sum after sum. The rows are streamed
// through its own ring of shared-memory stages.
//
// The terms of a sum are rows of one shape: lane i has the address of term i, and a mask has a bit for each lane with a
// term. Rows are cut into slices of one stage. Stages are loaded in the order in which they are added: slice after
// slice, in each the terms in the order of lanes. All stages but the one in use are in flight, and the next sum's are
// loaded before this one is added, so that latency costs no registers.
//
// A lane copies what it will add itself, so no lane waits for another. (Bulk copies need a leader and a barrier for
// each stage, which take longer than the sums: 8 warps read 36 GB/s, and these 58 GB/s, where each sum has two terms.)
#pragma once
#include "device/ptx/bulk.cuh"
#include "device/tile/rows.cuh"

// The terms of one sum, as each lane sees them.
struct Terms {
    uint64 address;   // of this lane's term
    float weight;     // of this lane's term, where sums are weighted
    uint32 lanes;     // that have a term
    int begin, end;   // the slices of the rows that are added, where warps share them
};

template <int kTermDtype, int kOutDtype, int kHidden, int kGroupValues, int kStages, bool kWeighted, bool kShared,
          class Stores = PlainStores>
struct TermStream {
    static constexpr int kGroups = kHidden / kGroupValues;
    static constexpr int kGroupBytes = kGroupValues * kValueBytes<kTermDtype>;
    static constexpr int kOutBytes = kGroupValues * kValueBytes<kOutDtype>;
    // A stage has up to 2 KB. More takes registers, and so do rows that end in the middle of a step.
    static constexpr int kMostSteps = (kGroups % 32 == 0 ? 64 : 48) / kGroupBytes;
    using Row = Tiles<kGroups, kMostSteps>;
    static constexpr int kSliceGroups = 32 * Row::kSteps;
    static constexpr int kStageBytes = kSliceGroups * kGroupBytes;
    static constexpr bool kSumOfOneIsACopy = !kWeighted && kTermDtype == kOutDtype;

    struct Shared {
        alignas(128) unsigned char stage[kStages][kStageBytes];
    };

    Shared& shared;
    int lane;
    uint32 num_loads = 0, num_used = 0;  // stages so far
    Terms loading{0, 0.0f, 0, 0, 0};     // the sum whose terms are loaded next,
    uint32 rest = 0;                     // its terms that are left in this slice,
    int slice = kShared ? 0 : Row::kCount;  // and the slice; at the end all are loaded

    __device__ TermStream(Shared& shared_, int lane_) : shared(shared_), lane(lane_) {}

    // What all lanes do, together: load while there is a free stage. `next` gives the sum after the one that is loaded
    // to its end, once for each; false if there is none, or it is not its turn.
    template <class Next>
    __device__ __forceinline__ void load_ahead(Next next) {
#pragma unroll 1
        while (num_loads - num_used < kStages) {
            if (slice == end_of(loading)) {
                if (!next(loading)) return;
                rest = loading.lanes;
                slice = rest != 0 ? begin_of(loading) : end_of(loading);
                continue;
            }
            const auto* from = reinterpret_cast<const unsigned char*>(of_lane(loading.address, rest));
            unsigned char* stage = shared.stage[num_loads % kStages];
            for_each_group(slice, [&](int, int in_slice, int index) {
#pragma unroll
                for (int i = 0; i < kGroupBytes / 16; ++i)
                    copy_16_async(stage + in_slice * kGroupBytes + 16 * i, from + index * kGroupBytes + 16 * i);
            });
            copies_commit();
            ++num_loads;
            rest &= rest - 1;
            if (rest == 0) {
                rest = loading.lanes;
                ++slice;
            }
        }
    }

    // Adds the terms of the oldest sum that was loaded, in the order of lanes, and stores the sum to `to`.
    template <class Next>
    __device__ __forceinline__ void add(const Terms& terms, unsigned char* to, Next next) {
        if (kSumOfOneIsACopy && (terms.lanes & (terms.lanes - 1)) == 0) {
            each_alone(terms, [&](uint32) { return to; }, next);
            return;
        }
#pragma unroll 1
        for (int tile = begin_of(terms); tile < end_of(terms); ++tile) {
            // x + -0 is x for every x, so the sum starts from its first term.
            Group<kGroupValues> sum[Row::kSteps];
#pragma unroll
            for (int step = 0; step < Row::kSteps; ++step) sum[step] = filled_group<kGroupValues>(-0.0f);
#pragma unroll 1
            for (uint32 left = terms.lanes; left != 0; left &= left - 1) {
                const float weight = kWeighted ? of_lane(terms.weight, left) : 1.0f;
                const unsigned char* stage = await();
                for_each_group(tile, [&](int step, int in_slice, int) {
                    add_group(sum[step], value(stage, in_slice, weight));
                });
                release(next);
            }
            for_each_group(tile, [&](int step, int, int index) {
                store_group<kOutDtype, kGroupValues, Stores>(to + index * kOutBytes, sum[step]);
            });
        }
    }

    // Weights and rounds each term of that sum by itself, and stores it to its lane's target.
    template <class Target, class Next>
    __device__ __forceinline__ void each_alone(const Terms& terms, Target target, Next next) {
#pragma unroll 1
        for (int tile = begin_of(terms); tile < end_of(terms); ++tile) {
#pragma unroll 1
            for (uint32 left = terms.lanes; left != 0; left &= left - 1) {
                const float weight = kWeighted ? of_lane(terms.weight, left) : 1.0f;
                unsigned char* to = target(left);
                const unsigned char* stage = await();
                for_each_group(tile, [&](int, int in_slice, int index) {
                    if constexpr (kSumOfOneIsACopy) {
#pragma unroll
                        for (int i = 0; i < kOutBytes / 16; ++i)
                            Stores::store(to + index * kOutBytes + 16 * i,
                                          load_shared_16(stage + in_slice * kOutBytes + 16 * i));
                    } else {
                        store_group<kOutDtype, kGroupValues, Stores>(to + index * kOutBytes, value(stage, in_slice, weight));
                    }
                });
                release(next);
            }
        }
    }

   private:
    // Warps that share no rows have constants here.
    static __device__ __forceinline__ int begin_of(const Terms& terms) { return kShared ? terms.begin : 0; }
    static __device__ __forceinline__ int end_of(const Terms& terms) { return kShared ? terms.end : Row::kCount; }

    // The oldest stage. Each is a group of copies; where fewer than usual came after it, this waits for some of those.
    __device__ __forceinline__ const unsigned char* await() {
        const uint32 newer = num_loads - num_used - 1;
        if (newer == kStages - 1) copies_wait<kStages - 1>();
        else if (newer >= kStages / 2) copies_wait<kStages / 2>();
        else copies_wait<0>();
        return shared.stage[num_used % kStages];
    }

    // This lane has read its part of the stage: the memory takes the next load.
    template <class Next>
    __device__ __forceinline__ void release(Next next) {
        ++num_used;
        load_ahead(next);
    }

    // This lane's groups of a tile: take(step, number within the slice, number within the row).
    template <class Take>
    __device__ __forceinline__ void for_each_group(int tile, Take take) {
        int index;
#pragma unroll
        for (int step = 0; step < Row::kSteps; ++step)
            if (Row::unit(tile, step, lane, index)) take(step, step * 32 + lane, index);
    }

    __device__ __forceinline__ Group<kGroupValues> value(const unsigned char* stage, int in_slice, float weight) {
        PackedGroup<kTermDtype, kGroupValues> packed;
#pragma unroll
        for (int i = 0; i < kGroupBytes / 16; ++i)
            packed.part[i] = load_shared_16(stage + in_slice * kGroupBytes + 16 * i);
        auto group = unpack(packed);
        if constexpr (kWeighted) scale_group(group, weight);
        return group;
    }
};
