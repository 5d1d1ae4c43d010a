// Weighted activations: weight * f(gate) * up, or weight * f(x). A warp takes one row at a time.
#pragma once
#include "kernels/activation/args.cuh"

template <class Shape>
__device__ void activate_forward(const ActivationArgs& args) {
    using Of = ActivationRow<Shape, 8>;
    const int lane = threadIdx.x % 32;
    const int32 rows = *args.num_rows, warps = gridDim.x * (Shape::threads / 32);
    BiasOfRow<Of, Shape::biased != 0> biases{args.bias, {args.ends}};
    for (int64 row = blockIdx.x * (Shape::threads / 32) + threadIdx.x / 32; row < rows; row += warps) {
        const auto* hidden = static_cast<const unsigned char*>(args.hidden) + row * Of::kParts * Of::kBytes;
        auto* out = static_cast<unsigned char*>(args.activations) + row * Of::kBytes;
        const float weight = args.weights[row];
        const unsigned char* bias = biases.find(row);
        for (int tile = 0; tile < Of::Row::kCount; ++tile) {
            typename Of::Packed gate[Of::Row::kSteps], up[Of::Row::kSteps];
            int index;
#pragma unroll
            for (int step = 0; step < Of::Row::kSteps; ++step)
                if (Of::Row::unit(tile, step, lane, index)) {
                    gate[step] = Of::load_hidden(hidden, index * Of::kPitch);
                    if constexpr (Shape::gated) up[step] = Of::load_hidden(hidden + Of::kSecondPart, index * Of::kPitch);
                }
#pragma unroll
            for (int step = 0; step < Of::Row::kSteps; ++step) {
                if (!Of::Row::unit(tile, step, lane, index)) continue;
                typename Of::Values values = unpack(gate[step]);
                typename Of::Values ups = Of::second_part(values, up[step]);
                Of::add_bias(values, ups, bias, index);
                Of::separate(values, ups);
#pragma unroll
                for (int i = 0; i < Of::kValues; ++i) {
                    const GateAndUp taken = Of::product_takes(args, values.value[i], ups.value[i]);
                    const float value = Of::function(args, taken.gate).value();
                    values.value[i] = (Shape::gated ? value * taken.up : value) * weight;
                }
                Of::store(out, index, values);
            }
        }
    }
}
