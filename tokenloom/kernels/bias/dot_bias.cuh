// Adds the dot product of each row with the bias of its expert to the row's sum. A warp takes one row at a time; the
// terms are added in an order that depends on the width alone.
#pragma once
#include "kernels/bias/args.cuh"

template <class Shape>
__device__ void dot_bias(const BiasArgs& args) {
    using Of = BiasRow<Shape>;
    const int lane = threadIdx.x % 32;
    const int32 rows = *args.num_rows, warps = gridDim.x * (Shape::threads / 32);
    ExpertOfRow expert{args.ends};
    for (int64 row = blockIdx.x * (Shape::threads / 32) + threadIdx.x / 32; row < rows; row += warps) {
        const auto* values = static_cast<const unsigned char*>(args.rows) + row * Of::kBytes;
        const auto* bias = static_cast<const unsigned char*>(args.bias) + expert.find(row) * Of::kBytes;
        float sum = 0.0f;
        for (int tile = 0; tile < Of::Row::kCount; ++tile) {
            typename Of::Packed packed[Of::Row::kSteps];
            int index;
#pragma unroll
            for (int step = 0; step < Of::Row::kSteps; ++step)
                if (Of::Row::unit(tile, step, lane, index)) packed[step] = Of::load(values, index);
#pragma unroll
            for (int step = 0; step < Of::Row::kSteps; ++step) {
                if (!Of::Row::unit(tile, step, lane, index)) continue;
                const typename Of::Values value = unpack(packed[step]), factor = Of::bias(bias, index);
#pragma unroll
                for (int i = 0; i < Of::kValues; ++i) sum += value.value[i] * factor.value[i];
            }
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        if (lane == 0) args.weights[row] += sum;
    }
}
