// The functions of activations, each with its slope.
#pragma once
#include "device/ptx/types.cuh"

enum Function : int { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kRelu2 = 4 };

// The lesser and the greater of two; NaN if one of them is.
__device__ __forceinline__ float min_or_nan(float a, float b) {
    float least;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
    return least;
}

__device__ __forceinline__ float max_or_nan(float a, float b) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
}

// Fast is the hardware's approximations: within a few units in the last place of float32.
template <bool kFast>
__device__ __forceinline__ float sigmoid(float x) {
    if constexpr (kFast) return __fdividef(1.0f, 1.0f + __expf(-x));
    else return __fdiv_rn(1.0f, 1.0f + expf(-x));
}

// f at x; NaN gives NaN. `scaled` is alpha * x, for the sigmoid of silu.
template <int kFunction, bool kFast>
struct FunctionAt {
    float x, scaled;
    float part;  // what value and slope share: x times it is the value

    __device__ __forceinline__ FunctionAt(float at, float scaled_at) : x(at), scaled(scaled_at) {
        if constexpr (kFunction == kSilu) part = sigmoid<kFast>(scaled);
        else if constexpr (kFunction == kGelu) part = 0.5f * erfcf(x * -0.70710678f);  // 1 + erf(..) loses small ones
        else if constexpr (kFunction == kGeluTanh) part = sigmoid<kFast>(kTwice * x * (1.0f + kCubic * x * x));
        else part = 0.0f;
    }
    __device__ __forceinline__ float value() const {
        if constexpr (kFunction == kRelu) return positive();
        else if constexpr (kFunction == kRelu2) return positive() * positive();
        else return x * part;
    }
    __device__ __forceinline__ float slope() const {
        if constexpr (kFunction == kSilu) return part * (1.0f + scaled * (1.0f - part));
        else if constexpr (kFunction == kGelu) return part + x * 0.39894228f * exponential(-0.5f * x * x);
        else if constexpr (kFunction == kGeluTanh)
            return part + x * part * (1.0f - part) * kTwice * (1.0f + 3.0f * kCubic * x * x);
        else if constexpr (kFunction == kRelu) return x > 0.0f ? 1.0f : 0.0f;
        else return 2.0f * positive();
    }

private:
    static constexpr float kTwice = 1.59576912f, kCubic = 0.044715f;  // 2 sqrt(2 / pi): a sigmoid is (1 + tanh) / 2

    __device__ __forceinline__ float positive() const { return x <= 0.0f ? 0.0f : x; }
    static __device__ __forceinline__ float exponential(float power) { return kFast ? __expf(power) : expf(power); }
};
