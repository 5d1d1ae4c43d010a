// The scales of FP8 rows: on their way, and where they lie then.
#pragma once
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

    __device__ __forceinline__ void store(float* to, int lane) const {
#pragma unroll
        for (int i = 0; i < kOfLane; ++i)
            if (lane + 32 * i < Shape::scales_per_row) to[lane + 32 * i] = values[i];
    }
};

// The scales of one row, for the place of each lane in the mask.
template <class Shape>
__device__ __forceinline__ void spread_scales(const DispatchArgs& args, const float* from, int32 place, uint32 places,
                                              int lane) {
    constexpr int kScales = Shape::scales_per_row, kWords = (kScales + 3) / 4;
    for (uint32 rest = places; rest != 0; rest &= rest - 1) {
        const int64 to = of_lane(place, rest);
        const int32 slot = of_lane(place, rest) % args.capacity;
        const int64 column = to - slot;  // columns: of this expert
        if constexpr (Shape::scale_layout == kScaleRows) {
            for (int i = lane; i < kScales; i += 32) static_cast<float*>(args.out_scales)[to * kScales + i] = from[i];
        } else if constexpr (Shape::scale_layout == kScaleColumns) {
            for (int i = lane; i < kScales; i += 32)
                static_cast<float*>(args.out_scales)[column * kScales + i * static_cast<int64>(args.capacity) + slot] =
                    from[i];
        } else {
            for (int i = lane; i < kWords; i += 32) {
                uint32 word = 0;
#pragma unroll
                for (int b = 0; b < 4; ++b)
                    if (4 * i + b < kScales) word |= (__float_as_uint(from[4 * i + b]) >> 23 & 0xff) << (8 * b);
                static_cast<uint32*>(args.out_scales)[column * kWords + i * static_cast<int64>(args.capacity) + slot] =
                    word;
            }
        }
    }
}
