// Gradients of gates, ups and weights, and the activations again, for the gradient of w2. A warp takes one row at a
// time. The terms of a weight's gradient are added in an order that depends on the width alone.
#pragma once
#include "kernels/activation/args.cuh"

template <class Shape>
__device__ void activate_backward(const ActivationArgs& args) {
    using Of = ActivationRow<Shape, Shape::interleaved || Shape::adjusted ? 2 : 4>;  // registers are scarce
    const int lane = threadIdx.x % 32;
    const int32 rows = *args.num_rows, warps = gridDim.x * (Shape::threads / 32);
    BiasOfRow<Of, Shape::biased != 0> biases{args.bias, {args.ends}};
    for (int64 row = blockIdx.x * (Shape::threads / 32) + threadIdx.x / 32; row < rows; row += warps) {
        const auto* hidden = static_cast<const unsigned char*>(args.hidden) + row * Of::kParts * Of::kBytes;
        const auto* grads = static_cast<const unsigned char*>(args.grad) + row * Of::kBytes;
        auto* grad_hidden = static_cast<unsigned char*>(args.grad_hidden) + row * Of::kParts * Of::kBytes;
        auto* activations = static_cast<unsigned char*>(args.activations) + row * Of::kBytes;
        const float weight = args.weights[row];
        const unsigned char* bias = biases.find(row);
        float grad_weight = 0.0f;
        for (int tile = 0; tile < Of::Row::kCount; ++tile) {
            typename Of::Packed gate[Of::Row::kSteps], up[Of::Row::kSteps], grad[Of::Row::kSteps];
            int index;
#pragma unroll
            for (int step = 0; step < Of::Row::kSteps; ++step)
                if (Of::Row::unit(tile, step, lane, index)) {
                    gate[step] = Of::load_hidden(hidden, index * Of::kPitch);
                    if constexpr (Shape::gated) up[step] = Of::load_hidden(hidden + Of::kSecondPart, index * Of::kPitch);
                    grad[step] = Of::load(grads, index);
                }
#pragma unroll
            for (int step = 0; step < Of::Row::kSteps; ++step) {
                if (!Of::Row::unit(tile, step, lane, index)) continue;
                typename Of::Values g = unpack(gate[step]), u = Of::second_part(g, up[step]), d = unpack(grad[step]), a;
                Of::add_bias(g, u, bias, index);
                Of::separate(g, u);
#pragma unroll
                for (int i = 0; i < Of::kValues; ++i) {
                    const GateAndUp taken = Of::product_takes(args, g.value[i], u.value[i]);
                    const auto f = Of::function(args, taken.gate);
                    const float value = f.value(), weighted = d.value[i] * weight;
                    a.value[i] = Shape::gated ? value * taken.up : value;
                    grad_weight += d.value[i] * a.value[i];
                    a.value[i] *= weight;
                    d.value[i] = (Shape::gated ? weighted * taken.up : weighted) * f.slope();
                    u.value[i] = weighted * value;
                    if (!taken.gate_passes) d.value[i] = 0.0f;
                    if (!taken.up_passes) u.value[i] = 0.0f;
                }
                Of::store(activations, index, a);
                Of::join(d, u);
                Of::store(grad_hidden, index * Of::kPitch, d);
                if constexpr (Shape::gated) Of::store(grad_hidden + Of::kSecondPart, index * Of::kPitch, u);
            }
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) grad_weight += __shfl_xor_sync(~0u, grad_weight, distance);
        if (lane == 0) args.grad_weights[row] = grad_weight;
    }
}
