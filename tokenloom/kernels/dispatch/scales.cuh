// The scales of FP8 rows: on their way, and where they lie then.
#pragma once
#include "device/tile/rows.cuh"
#include "kernels/dispatch/shared.cuh"

// How the scales of FP8 rows lie where they go.
enum ScaleLayout : int { kScaleRows = 0, kScaleColumns = 1, kScalePacked = 2 };

// A direct dispatch to slots whose scales do not lie as they arrive, beside rows: whoever has them here lays them.
template <class Shape>
constexpr bool kLaysScales = Places<Shape>::kDirect && Shape::scale_layout != kScaleRows;

// A row's scales, each lane's part of them.
template <class Shape>
struct RowScales {
    static constexpr int kOfLane = Shape::scales_per_row > 0 ? (Shape::scales_per_row + 31) / 32 : 1;
    float values[kOfLane];

    __device__ __forceinline__ void load(const float* from, int lane) {
#pragma unroll
        for (int i = 0; i < kOfLane; ++i)
            if (lane + 32 * i < Shape::scales_per_row) values[i] = from[lane + 32 * i];
    }

    template <class Stores = PlainStores>
    __device__ __forceinline__ void store(float* to, int lane) const {
#pragma unroll
        for (int i = 0; i < kOfLane; ++i)
            if (lane + 32 * i < Shape::scales_per_row)
                Stores::store(reinterpret_cast<uint32*>(to) + lane + 32 * i, __float_as_uint(values[i]));
    }
};

// The scales of one row, for the place of each lane in the mask.
template <class Shape>
__device__ __forceinline__ void spread_scales(const DispatchArgs& args, const RowScales<Shape>& scales, int32 place,
                                              uint32 places, int lane) {
    constexpr int kScales = Shape::scales_per_row, kWords = (kScales + 3) / 4;
    constexpr int kOfLane = RowScales<Shape>::kOfLane;
    for (uint32 rest = places; rest != 0; rest &= rest - 1) {
        const int64 to = of_lane(place, rest);
        const int32 slot = of_lane(place, rest) % args.capacity;
        const int64 column = to - slot;  // columns: of this expert
        if constexpr (Shape::scale_layout == kScaleRows) {
            scales.store(static_cast<float*>(args.out_scales) + to * kScales, lane);
        } else if constexpr (Shape::scale_layout == kScaleColumns) {
            auto* first = static_cast<float*>(args.out_scales) + column * kScales + slot;
#pragma unroll
            for (int i = 0; i < kOfLane; ++i)
                if (lane + 32 * i < kScales) first[(lane + 32 * i) * static_cast<int64>(args.capacity)] = scales.values[i];
        } else {
            auto* first = static_cast<uint32*>(args.out_scales) + column * kWords + slot;
#pragma unroll
            for (int i = 0; i < (kWords + 31) / 32; ++i) {
                const int word = lane + 32 * i;
                uint32 exponents = 0;
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    const int number = 4 * word + b;
                    float scale = 0.0f;
#pragma unroll
                    for (int j = 0; j < kOfLane; ++j) {
                        const float other = __shfl_sync(~0u, scales.values[j], number % 32);
                        if (number / 32 == j) scale = other;
                    }
                    if (number < kScales) exponents |= (__float_as_uint(scale) >> 23 & 0xff) << (8 * b);
                }
                if (word < kWords) first[word * static_cast<int64>(args.capacity)] = exponents;
            }
        }
    }
}
