// Weighted activations: weight * silu(gate) * up. A warp takes one row at a time.
#pragma once
#include "kernels/activation/args.cuh"

template <class Shape>
__device__ void swiglu_forward(const SwigluArgs& args) {
    using Of = SwigluRow<Shape, 8>;
    const int lane = threadIdx.x % 32;
    const int32 rows = *args.num_rows, warps = gridDim.x * (Shape::threads / 32);
    for (int64 row = blockIdx.x * (Shape::threads / 32) + threadIdx.x / 32; row < rows; row += warps) {
        const auto* gates = static_cast<const unsigned char*>(args.hidden) + row * 2 * Of::kBytes;
        auto* out = static_cast<unsigned char*>(args.activations) + row * Of::kBytes;
        const float weight = args.weights[row];
        for (int tile = 0; tile < Of::Row::kCount; ++tile) {
            typename Of::Packed gate[Of::Row::kSteps], up[Of::Row::kSteps];
            int index;
#pragma unroll
            for (int step = 0; step < Of::Row::kSteps; ++step)
                if (Of::Row::unit(tile, step, lane, index)) {
                    gate[step] = Of::load(gates, index);
                    up[step] = Of::load(gates + Of::kBytes, index);
                }
#pragma unroll
            for (int step = 0; step < Of::Row::kSteps; ++step) {
                if (!Of::Row::unit(tile, step, lane, index)) continue;
                typename Of::Values values = unpack(gate[step]);
                const typename Of::Values ups = unpack(up[step]);
#pragma unroll
                for (int i = 0; i < Of::kValues; ++i)
                    values.value[i] = values.value[i] * sigmoid<Of::kDtype>(values.value[i]) * ups.value[i] * weight;
                Of::store(out, index, values);
            }
        }
    }
}
