// A warp copies and adds rows in global memory. Targets may be a peer's memory.
//
// A row is cut into tiles. In each, a lane has a few 16-byte loads of every row in flight, which hides the latency.
// Where several rows take part, lane i holds the address of row i, and a mask has a bit for each such lane.
#pragma once
#include "device/tile/values.cuh"

// A row of kUnits units, one for each lane and step: tiles of kSteps <= kMostSteps steps, all of the same size.
template <int kUnits, int kMostSteps>
struct Tiles {
    static constexpr int kAllSteps = (kUnits + 31) / 32;
    static constexpr int kCount = (kAllSteps + kMostSteps - 1) / kMostSteps;
    static constexpr int kSteps = (kAllSteps + kCount - 1) / kCount;
    static constexpr bool kEven = kCount * kSteps * 32 == kUnits;

    // Finds the unit of a lane at a step of a tile; false past the row's end.
    static __device__ __forceinline__ bool unit(int tile, int step, int lane, int& index) {
        index = (tile * kSteps + step) * 32 + lane;
        return kEven || index < kUnits;
    }

    // Into how many parts each of `rows` sums is cut, so that `warps` warps have work where rows are few.
    static __device__ __forceinline__ int32 parts(int32 rows, int32 warps) {
        return min(max(4 * warps / rows, 1), kCount);
    }
};

// What the lowest lane in the mask has.
template <class T>
__device__ __forceinline__ T of_lane(T value, uint32 lanes) {
    return __shfl_sync(~0u, value, __ffs(lanes) - 1);
}

// Copies one row to the targets of all lanes in the mask, or its tiles from `begin` to `end`, where warps share it. A lane has
// up to kMostSteps loads in flight.
template <int kRowBytes, int kMostSteps = 14, class Stores = PlainStores>
__device__ __forceinline__ void copy_row(const unsigned char* from, uint64 target, uint32 targets, int lane,
                                         int begin = 0, int end = Tiles<kRowBytes / 16, kMostSteps>::kCount) {
    using Row = Tiles<kRowBytes / 16, kMostSteps>;
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
        Vec16 units[Row::kSteps];
        int index;
#pragma unroll
        for (int step = 0; step < Row::kSteps; ++step)
            if (Row::unit(tile, step, lane, index)) units[step] = load_16_once(from + index * 16);
        for (uint32 rest = targets; rest != 0; rest &= rest - 1) {
            auto* to = reinterpret_cast<unsigned char*>(of_lane(target, rest));
#pragma unroll
            for (int step = 0; step < Row::kSteps; ++step)
                if (Row::unit(tile, step, lane, index)) Stores::store(to + index * 16, units[step]);
        }
    }
}

template <int kRowBytes, class Stores = PlainStores>
__device__ __forceinline__ void fill_row(unsigned char* to, uint32 word, int lane) {
    for (int i = lane; i < kRowBytes / 16; i += 32) Stores::store(to + i * 16, Vec16{{word, word, word, word}});
}

// A sum of up to kMostTerms rows of one shape and dtype, in the order of lanes, from loads into registers: kMostAtOnce
// terms are in flight together. (device/pipe/term_stream.cuh adds rows that pass through shared memory, weighted or not.)
// The steps of a tile take up to kMostRegisters, since variants spill with more. Where all terms of a row are in flight
// together, one step is added after the other; else each step needs registers for its sum too.
template <int kTermDtype, int kOutDtype, int kHidden, int kGroupValues, int kMostAtOnce, int kMostTerms,
          int kMostRegisters = 80>
struct RowSum {
    static constexpr bool kAllAtOnce = kMostTerms <= kMostAtOnce;
    static constexpr int kTermsAtOnce = kAllAtOnce ? kMostTerms : kMostAtOnce;
    static constexpr int kGroups = kHidden / kGroupValues;
    static constexpr int kTermBytes = kGroupValues * kValueBytes<kTermDtype>;
    static constexpr int kOutBytes = kGroupValues * kValueBytes<kOutDtype>;
    static constexpr int kStepRegisters = kTermsAtOnce * kTermBytes / 4 + (kAllAtOnce ? 0 : kGroupValues);
    static constexpr int kMostSteps = (kMostRegisters - (kAllAtOnce ? kGroupValues : 0)) / kStepRegisters;
    using Row = Tiles<kGroups, (kMostSteps > 1 ? kMostSteps : 1)>;
    using Packed = PackedGroup<kTermDtype, kGroupValues>;
    using Sum = Group<kGroupValues>;

    // The next terms of the mask, up to kTermsAtOnce.
    struct Batch {
        Packed packed[kTermsAtOnce][Row::kSteps];
        int count = 0;

        __device__ __forceinline__ Batch(uint32& rest, uint64 term, int tile, int lane) {
            int index;
#pragma unroll
            for (int t = 0; t < kTermsAtOnce; ++t) {
                if (rest == 0) continue;
                const auto* from = reinterpret_cast<const unsigned char*>(of_lane(term, rest));
                rest &= rest - 1;
                ++count;
#pragma unroll
                for (int step = 0; step < Row::kSteps; ++step)
                    if (Row::unit(tile, step, lane, index))
                        packed[t][step] = load_group_once<kTermDtype, kGroupValues>(from + index * kTermBytes);
            }
        }

        __device__ __forceinline__ void add_to(Sum& sum, int step) const {
#pragma unroll
            for (int t = 0; t < kTermsAtOnce; ++t)
                if (t < count) add_group(sum, unpack(packed[t][step]));
        }
    };

    // Adds part `part` of `parts` of the lanes' terms; +0 without terms.
    static __device__ __forceinline__ void add(unsigned char* to, uint64 term, uint32 terms, int part, int parts,
                                               int lane) {
        const Sum begin = filled_group<kGroupValues>(terms ? -0.0f : 0.0f);  // x + -0 is x for every x
        const auto store = [&](int tile, int step, const Sum& sum) {
            int index;
            if (Row::unit(tile, step, lane, index)) store_group<kOutDtype>(to + index * kOutBytes, sum);
        };
        for (int tile = part; tile < Row::kCount; tile += parts) {
            uint32 rest = terms;
            if constexpr (kAllAtOnce) {
                const Batch batch(rest, term, tile, lane);
#pragma unroll
                for (int step = 0; step < Row::kSteps; ++step) {
                    Sum sum = begin;
                    batch.add_to(sum, step);
                    store(tile, step, sum);
                }
            } else {
                Sum sum[Row::kSteps];
#pragma unroll
                for (int step = 0; step < Row::kSteps; ++step) sum[step] = begin;
                while (rest != 0) {
                    const Batch batch(rest, term, tile, lane);
#pragma unroll
                    for (int step = 0; step < Row::kSteps; ++step) batch.add_to(sum[step], step);
                }
#pragma unroll
                for (int step = 0; step < Row::kSteps; ++step) store(tile, step, sum[step]);
            }
        }
    }
};
