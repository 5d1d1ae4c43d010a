// One scale for each row of activations, whose tiles were quantised one by one.
//
// A tile has 128 values of a row and cannot know the others, so its codes have a scale of their own, a power of two. The
// row's scale is the largest of these, and each code is multiplied by its tile's scale over that one. Digits stay what they
// are, unless a value falls below E4M3's least normal number: then it is rounded a second time.
#pragma once
#include "device/tile/fp8.cuh"

template <int kWidth>  // values of a row
struct TileScaledRows {
    static constexpr int kScales = kWidth / kFp8Block, kUnits = kWidth / 16, kScaleUnits = kUnits / kScales;
    static constexpr int kLoads = (kScales + 31) / 32;
    unsigned char* values;     // [rows][kWidth] E4M3
    const float* tile_scales;  // [rows][kScales]
    float* row_scales;         // [rows]

    // One warp: `count` rows, of at most kRows. All loads of the rows are on their way together.
    template <int kRows>
    __device__ __forceinline__ void rescale(int64 row, int count, int lane) const {
        constexpr int kSteps = 4 / kRows;  // units of a row that a lane has at once: registers are few beside a GEMM
        float scales[kRows][kLoads], largest[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                const int number = i * 32 + lane;
                scales[r][i] = r < count && number < kScales ? tile_scales[(row + r) * kScales + number] : 0.0f;
            }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            largest[r] = scales[r][0];
#pragma unroll
            for (int i = 1; i < kLoads; ++i) largest[r] = fmaxf(largest[r], scales[r][i]);
#pragma unroll
            for (int other = 1; other < 32; other *= 2)
                largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], other));
        }
        for (int begin = 0; begin < kUnits; begin += 32 * kSteps) {
            Vec16 codes[kRows][kSteps];
            uint32 halvings[kRows][kSteps];  // 0: nothing changes
#pragma unroll
            for (int r = 0; r < kRows; ++r)
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    const int unit = begin + step * 32 + lane, number = min(unit / kScaleUnits, kScales - 1);
                    float own = __shfl_sync(~0u, scales[r][0], number % 32);
#pragma unroll
                    for (int i = 1; i < kLoads; ++i) {
                        const float later = __shfl_sync(~0u, scales[r][i], number % 32);
                        if (number / 32 == i) own = later;
                    }
                    const bool inside = r < count && unit < kUnits;
                    halvings[r][step] = inside ? (__float_as_uint(largest[r]) - __float_as_uint(own)) >> 23 : 0;
                    if (halvings[r][step] != 0) codes[r][step] = load_16_once(place(row + r, unit));
                }
#pragma unroll
            for (int r = 0; r < kRows; ++r)
#pragma unroll
                for (int step = 0; step < kSteps; ++step)
                    if (halvings[r][step] != 0)
                        store_16(place(row + r, begin + step * 32 + lane),
                                 halve_e4m3(codes[r][step], halvings[r][step]));
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r)
            if (r < count && lane == 0) row_scales[row + r] = largest[r];
    }

    __device__ __forceinline__ unsigned char* place(int64 row, int unit) const {
        return values + (row * kUnits + unit) * 16;
    }
};
