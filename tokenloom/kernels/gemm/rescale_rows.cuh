// One scale for each row of what a GEMM with SwiGLU has quantised tile by tile, where no other kernel does that beside its
// own work.
#pragma once
#include "device/tile/row_scales.cuh"

struct RescaleRowsArgs {
    unsigned char* values;     // [rows][Shape::width] E4M3
    const float* tile_scales;  // [rows][Shape::width / 128], powers of two
    float* row_scales;         // [rows]
    const int32* offsets;      // [E + 1] rows of experts; unused with slots
    const int32* counts;       // slots: [E] rows of each expert,
    int64 num_rows;
    int32 num_experts;
    int32 capacity;            // which has so many places
};

template <class Shape>
__device__ void rescale_rows(const RescaleRowsArgs& args) {
    constexpr int kWarps = Shape::threads / 32;
    const TileScaledRows<Shape::width> rows{args.values, args.tile_scales, args.row_scales};
    for (int64 row = blockIdx.x * kWarps + threadIdx.x / 32; row < args.num_rows; row += gridDim.x * kWarps) {
        bool used;
        if constexpr (Shape::slots != 0) used = row % args.capacity < args.counts[row / args.capacity];
        else used = args.offsets[0] <= row && row < args.offsets[args.num_experts];
        if (used) rows.template rescale<1>(row, 1, threadIdx.x % 32);
    }
}
