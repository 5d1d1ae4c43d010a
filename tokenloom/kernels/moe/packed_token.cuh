// A token as it is sent: values in E4M3, and behind them a scale for each 128 of them, or one for all.
#pragma once
#include "device/tile/fp8.cuh"

// How warps make one of a token of dtype Shape::x_dtype, or of values and scales that are given. A part is as much as a
// warp has loads for in flight.
template <class Shape>
struct PackedToken {
    static constexpr bool kQuantizes = Shape::quantize != 0, kOneScale = Shape::row_scales != 0;
    static constexpr int kScales = kOneScale ? 1 : Shape::hidden / kFp8Block;
    using Quantized = RowToQuantize<Shape::x_dtype, Shape::hidden>;
    using Copied = Tiles<Shape::hidden / 16, 4>;
    static constexpr int kParts = kQuantizes ? Quantized::Row::kCount : Copied::kCount;

    static __device__ __forceinline__ const unsigned char* values_of(const unsigned char* x, int64 token) {
        return x + token * Shape::hidden * kValueBytes<Shape::x_dtype>;
    }

    // One warp packs a part of a token, into global or shared memory.
    // largest: magnitude of the token, where it gets one scale.
    static __device__ __forceinline__ void pack(const unsigned char* x, const float* given_scales, int64 token,
                                                unsigned char* to, int part, int lane, float largest = 0.0f) {
        auto* values = reinterpret_cast<Vec16*>(to);
        auto* scales = reinterpret_cast<float*>(to + Shape::hidden);
        if constexpr (kQuantizes && kOneScale) {
            const Fp8Scale scale = fp8_scale<Shape::power_of_two != 0>(largest);
            Quantized::tile_by(scale.factor, values_of(x, token), part, lane,
                               [&](bool inside, int index, const Vec16& codes) {
                                   if (inside) values[index] = codes;
                               });
            if (part == 0 && lane == 0) *scales = scale.scale;
        } else if constexpr (kQuantizes) {
            const unsigned char* from = values_of(x, token);
            Quantized::template tile<Shape::power_of_two != 0>(
                from, part, lane, [&](bool inside, int index, const Vec16& codes, float scale) {
                    if (inside) values[index] = codes;
                    if (inside && lane % Quantized::kBlockLanes == 0) scales[index / Quantized::kBlockLanes] = scale;
                });
        } else {
            const unsigned char* from = x + token * Shape::hidden;
            Vec16 units[Copied::kSteps];
            int index;
#pragma unroll
            for (int step = 0; step < Copied::kSteps; ++step)
                if (Copied::unit(part, step, lane, index)) units[step] = load_16_once(from + index * 16);
#pragma unroll
            for (int step = 0; step < Copied::kSteps; ++step)
                if (Copied::unit(part, step, lane, index)) values[index] = units[step];
            if (part != 0) return;
            for (int i = lane; i < kScales; i += 32) scales[i] = given_scales[token * kScales + i];
        }
    }
};
