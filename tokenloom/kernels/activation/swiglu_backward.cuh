// Gradients of gates, ups and weights, and the activations again, for the gradient of w2. A warp takes one row at a
// time. The terms of a weight's gradient are added in an order that depends on the width alone.
#pragma once
#include "kernels/activation/args.cuh"

template <class Shape>
__device__ void swiglu_backward(const SwigluArgs& args) {
    using Of = SwigluRow<Shape, 4>;
    const int lane = threadIdx.x % 32;
    const int32 rows = *args.num_rows, warps = gridDim.x * (Shape::threads / 32);
    for (int64 row = blockIdx.x * (Shape::threads / 32) + threadIdx.x / 32; row < rows; row += warps) {
        const auto* gates = static_cast<const unsigned char*>(args.hidden) + row * 2 * Of::kBytes;
        const auto* grads = static_cast<const unsigned char*>(args.grad) + row * Of::kBytes;
        auto* grad_gates = static_cast<unsigned char*>(args.grad_hidden) + row * 2 * Of::kBytes;
        auto* activations = static_cast<unsigned char*>(args.activations) + row * Of::kBytes;
        const float weight = args.weights[row];
        float grad_weight = 0.0f;
        for (int tile = 0; tile < Of::Row::kCount; ++tile) {
            typename Of::Packed gate[Of::Row::kSteps], up[Of::Row::kSteps], grad[Of::Row::kSteps];
            int index;
#pragma unroll
            for (int step = 0; step < Of::Row::kSteps; ++step)
                if (Of::Row::unit(tile, step, lane, index)) {
                    gate[step] = Of::load(gates, index);
                    up[step] = Of::load(gates + Of::kBytes, index);
                    grad[step] = Of::load(grads, index);
                }
#pragma unroll
            for (int step = 0; step < Of::Row::kSteps; ++step) {
                if (!Of::Row::unit(tile, step, lane, index)) continue;
                typename Of::Values g = unpack(gate[step]), u = unpack(up[step]), d = unpack(grad[step]), a;
#pragma unroll
                for (int i = 0; i < Of::kValues; ++i) {
                    const float s = sigmoid<Of::kDtype>(g.value[i]), silu = g.value[i] * s;
                    const float weighted = d.value[i] * weight;
                    a.value[i] = silu * u.value[i];
                    grad_weight += d.value[i] * a.value[i];
                    a.value[i] *= weight;
                    d.value[i] = weighted * u.value[i] * (s * (1.0f + g.value[i] * (1.0f - s)));
                    u.value[i] = weighted * silu;
                }
                Of::store(activations, index, a);
                Of::store(grad_gates, index, d);
                Of::store(grad_gates + Of::kBytes, index, u);
            }
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) grad_weight += __shfl_xor_sync(~0u, grad_weight, distance);
        if (lane == 0) args.grad_weights[row] = grad_weight;
    }
}
