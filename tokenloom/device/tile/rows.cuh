// A warp copies, scales and adds rows in global memory; targets may be a peer's.
//
// A row is cut into tiles: in each, a lane has a few 16-byte loads in flight per row, which is what hides the latency.
// Where several rows take part, lane i holds the address (and the weight) of row i, and a mask says which lanes do.
#pragma once
#include "device/tile/values.cuh"

// A row of kUnits units, one per lane and step: tiles of kSteps steps, at most kMostSteps, all of the same size.
template <int kUnits, int kMostSteps>
struct Tiles {
    static constexpr int kAllSteps = (kUnits + 31) / 32;
    static constexpr int kCount = (kAllSteps + kMostSteps - 1) / kMostSteps;
    static constexpr int kSteps = (kAllSteps + kCount - 1) / kCount;
    static constexpr bool kEven = kCount * kSteps * 32 == kUnits;

    // Unit of a lane at a step of a tile; false beyond the row's end.
    static __device__ __forceinline__ bool unit(int tile, int step, int lane, int& index) {
        index = (tile * kSteps + step) * 32 + lane;
        return kEven || index < kUnits;
    }
};

template <class T>
__device__ __forceinline__ T of_lane(T value, uint32 lanes) {  // of the lowest lane in the mask
    return __shfl_sync(~0u, value, __ffs(lanes) - 1);
}

// One row to the targets of all lanes in the mask. A lane has up to kMostSteps loads in flight.
template <int kRowBytes, int kMostSteps = 14>
__device__ __forceinline__ void copy_row(const unsigned char* from, uint64 target, uint32 targets, int lane) {
    using Row = Tiles<kRowBytes / 16, kMostSteps>;
#pragma unroll 1
    for (int tile = 0; tile < Row::kCount; ++tile) {
        Vec16 units[Row::kSteps];
        int index;
#pragma unroll
        for (int step = 0; step < Row::kSteps; ++step)
            if (Row::unit(tile, step, lane, index)) units[step] = load_16_once(from + index * 16);
        for (uint32 rest = targets; rest != 0; rest &= rest - 1) {
            auto* to = reinterpret_cast<unsigned char*>(of_lane(target, rest));
#pragma unroll
            for (int step = 0; step < Row::kSteps; ++step)
                if (Row::unit(tile, step, lane, index)) store_16(to + index * 16, units[step]);
        }
    }
}

template <int kRowBytes>
__device__ __forceinline__ void fill_row(unsigned char* to, uint32 word, int lane) {
    for (int i = lane; i < kRowBytes / 16; i += 32) store_16(to + i * 16, Vec16{{word, word, word, word}});
}

// What rows of one shape and dtype are added up to, or become one by one. kTermsAtOnce terms are in flight together.
template <int kTermDtype, int kOutDtype, int kHidden, int kGroupValues, int kTermsAtOnce, bool kWeighted>
struct RowSum {
    static constexpr int kGroups = kHidden / kGroupValues;
    static constexpr int kTermBytes = kGroupValues * kValueBytes<kTermDtype>;
    static constexpr int kOutBytes = kGroupValues * kValueBytes<kOutDtype>;
    // A step takes registers for the terms in flight and for the sum; more than this many would spill.
    static constexpr int kMostRegisters = kWeighted ? 70 : 80;
    static constexpr int kStepRegisters = kTermsAtOnce * kTermBytes / 4 + kGroupValues;
    static constexpr int kMostSteps = kStepRegisters > kMostRegisters ? 1 : kMostRegisters / kStepRegisters;
    using Row = Tiles<kGroups, (kMostSteps < 4 ? kMostSteps : 4)>;
    using Packed = PackedGroup<kTermDtype, kGroupValues>;

    // The next kTermsAtOnce terms of the mask, as many as there are.
    struct Batch {
        Packed packed[kTermsAtOnce][Row::kSteps];
        float weight[kTermsAtOnce];
        uint32 lane_of[kTermsAtOnce];  // masks of one lane, or 0

        __device__ __forceinline__ void load(uint32& rest, uint64 term, float own_weight, int tile, int lane) {
            int index;
#pragma unroll
            for (int t = 0; t < kTermsAtOnce; ++t) {
                lane_of[t] = rest & -rest;
                if (rest == 0) continue;
                const auto* from = reinterpret_cast<const unsigned char*>(of_lane(term, rest));
                if constexpr (kWeighted) weight[t] = of_lane(own_weight, rest);
                rest &= rest - 1;
#pragma unroll
                for (int step = 0; step < Row::kSteps; ++step)
                    if (Row::unit(tile, step, lane, index))
                        packed[t][step] = load_group_once<kTermDtype, kGroupValues>(from + index * kTermBytes);
            }
        }

        __device__ __forceinline__ Group<kGroupValues> value(int t, int step) const {
            auto group = unpack(packed[t][step]);
            if constexpr (kWeighted) scale_group(group, weight[t]);
            return group;
        }
    };

    // The lanes' terms in their order: `begin(lanes)` with the mask of a term's lane, then `take(step, index, value)`
    // for each group of this lane in the tile.
    template <class Begin, class Take>
    static __device__ __forceinline__ void for_each_term(uint64 term, float weight, uint32 terms, int tile, int lane,
                                                         Begin begin, Take take) {
        int index;
        for (uint32 rest = terms; rest != 0;) {
            Batch batch;
            batch.load(rest, term, weight, tile, lane);
#pragma unroll
            for (int t = 0; t < kTermsAtOnce; ++t) {
                if (batch.lane_of[t] == 0) continue;
                begin(batch.lane_of[t]);
#pragma unroll
                for (int step = 0; step < Row::kSteps; ++step)
                    if (Row::unit(tile, step, lane, index)) take(step, index, batch.value(t, step));
            }
        }
    }

    // Part `part` of `parts` of the sum of the lanes' terms, in the order of lanes; without terms +0.
    static __device__ __forceinline__ void add(unsigned char* to, uint64 term, float weight, uint32 terms, int part,
                                               int parts, int lane) {
        for (int tile = part; tile < Row::kCount; tile += parts) {
            // x + -0 is x for every x: thus the sum starts from its first term.
            Group<kGroupValues> sum[Row::kSteps];
#pragma unroll
            for (int step = 0; step < Row::kSteps; ++step) sum[step] = filled_group<kGroupValues>(terms ? -0.0f : 0.0f);
            for_each_term(
                term, weight, terms, tile, lane, [](uint32) {},
                [&](int step, int, const Group<kGroupValues>& value) { add_group(sum[step], value); });
            int index;
#pragma unroll
            for (int step = 0; step < Row::kSteps; ++step)
                if (Row::unit(tile, step, lane, index)) store_group<kOutDtype>(to + index * kOutBytes, sum[step]);
        }
    }

    // Each term by itself, weighted and rounded, to its lane's target.
    static __device__ __forceinline__ void scale(uint64 target, uint64 term, float weight, uint32 terms, int lane) {
        for (int tile = 0; tile < Row::kCount; ++tile) {
            unsigned char* to = nullptr;
            for_each_term(
                term, weight, terms, tile, lane,
                [&](uint32 lanes) { to = reinterpret_cast<unsigned char*>(of_lane(target, lanes)); },
                [&](int, int index, const Group<kGroupValues>& value) {
                    store_group<kOutDtype>(to + index * kOutBytes, value);
                });
        }
    }
};
