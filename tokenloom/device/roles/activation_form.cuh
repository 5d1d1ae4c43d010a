// Forms of gated activations, for the epilogues of a GEMM.
#pragma once
#include "device/tile/activation.cuh"
#include "device/tile/fp8.cuh"

// A *form* of activation: what becomes of a gate and an up, and the biases that come before.
//
//   kBiased, biases()     whether there are biases, and where: [E, N], in the order of the weights' columns
//   kOneByOne             values of its long function, computed side by side, would spill
//   activate(gate, up)
template <bool kFastMath>
struct PlainSwiglu {
    static constexpr bool kBiased = false;
    static constexpr bool kOneByOne = false;

    static __device__ __forceinline__ float activate(float gate, float up) {
        if constexpr (kFastMath) return __fdividef(gate, 1.0f + __expf(-gate)) * up;
        return divide_full(gate, 1.0f + expf(-gate)) * up;
    }
    static __device__ __forceinline__ const float* biases() { return nullptr; }
};

template <int kFunction, bool kFastMath, bool kHasBias>
struct GatedActivation {
    static constexpr bool kBiased = kHasBias;
    static constexpr bool kOneByOne = kFunction == kGelu;
    const float& alpha;        // as in Activation
    const float& up_offset;
    const float* const& bias;  // biased: [E, N], in the order of the weights' columns

    __device__ __forceinline__ float activate(float gate, float up) const {
        return FunctionAt<kFunction, kFastMath>(gate, alpha * gate).value() * (up + up_offset);
    }
    __device__ __forceinline__ const float* biases() const { return bias; }
};

// The same behind limits.
template <bool kClamped, class Form>
struct LimitedForm {
    static constexpr bool kBiased = Form::kBiased, kOneByOne = Form::kOneByOne;
    const float& clamp;  // the most of a gate, and the largest magnitude of an up
    Form form{};

    __device__ __forceinline__ float activate(float gate, float up) const {
        if constexpr (kClamped) {
            gate = min_or_nan(gate, clamp);
            up = max_or_nan(min_or_nan(up, clamp), -clamp);
        }
        return form.activate(gate, up);
    }
    __device__ __forceinline__ const float* biases() const { return form.biases(); }
};
