// Adds weight * bias of its expert to each row, in place, each result rounded once. A warp takes one row at a time.
#pragma once
#include "kernels/bias/args.cuh"

template <class Shape>
__device__ void add_bias(const BiasArgs& args) {
    using Of = BiasRow<Shape>;
    const int lane = threadIdx.x % 32;
    const int32 rows = *args.num_rows, warps = gridDim.x * (Shape::threads / 32);
    ExpertOfRow expert{args.ends};
    for (int64 row = blockIdx.x * (Shape::threads / 32) + threadIdx.x / 32; row < rows; row += warps) {
        auto* values = static_cast<unsigned char*>(args.rows) + row * Of::kBytes;
        const auto* bias = static_cast<const unsigned char*>(args.bias) + expert.find(row) * Of::kBytes;
        const float weight = args.weights[row];
        for (int tile = 0; tile < Of::Row::kCount; ++tile) {
            typename Of::Packed packed[Of::Row::kSteps];
            int index;
#pragma unroll
            for (int step = 0; step < Of::Row::kSteps; ++step)
                if (Of::Row::unit(tile, step, lane, index)) packed[step] = Of::load(values, index);
#pragma unroll
            for (int step = 0; step < Of::Row::kSteps; ++step) {
                if (!Of::Row::unit(tile, step, lane, index)) continue;
                typename Of::Values sum = unpack(packed[step]);
                const typename Of::Values term = Of::bias(bias, index);
#pragma unroll
                for (int i = 0; i < Of::kValues; ++i) sum.value[i] += weight * term.value[i];
                store_group<Of::kDtype, Of::kValues>(values + index * 16, sum);
            }
        }
    }
}
