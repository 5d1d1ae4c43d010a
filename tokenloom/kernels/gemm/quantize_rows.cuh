// Rows of activations of a GEMM of recipe "row" in E4M3, where no other kernel quantises them beside its own work.
#pragma once
#include "device/tile/quantized_row.cuh"

struct QuantizeRowsArgs {
    const unsigned char* rows;  // [rows][Shape::width] bfloat16
    unsigned char* values;      // [rows][Shape::width] E4M3
    float* scales;              // [rows]
    const int32* offsets;       // [E + 1] rows of experts; unused with slots
    const int32* counts;        // slots: [E] rows of each expert,
    int64 num_rows;
    int32 num_experts;
    int32 capacity;             // which has so many places
};

template <class Shape>
__device__ void quantize_rows(const QuantizeRowsArgs& args) {
    constexpr int kWarps = Shape::threads / 32, kWidth = Shape::width;
    for (int64 row = blockIdx.x * kWarps + threadIdx.x / 32; row < args.num_rows; row += gridDim.x * kWarps) {
        bool used;
        if constexpr (Shape::slots != 0) used = row % args.capacity < args.counts[row / args.capacity];
        else used = args.offsets[0] <= row && row < args.offsets[args.num_experts];
        if (used)
            quantize_activations<kWidth>(args.rows + row * kWidth * 2, args.values + row * kWidth, args.scales + row,
                                         threadIdx.x % 32);
    }
}
