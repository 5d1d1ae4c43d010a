// The warps that give each row one scale, by themselves: codes and scales of tiles come from memory.
#pragma once
#include "device/roles/rescale.cuh"

struct RescaleArgs {
    void* out;            // [rows, N / 2] E4M3
    const float* tile_scales;   // [rows, N / 256]
    float* row_scales;    // [rows]
    uint32* stored;        // counts, as storing warps leave them
    const int32* offsets; // [E + 1]
};

template <int kNumExperts>
struct BoundsInMemory {
    static constexpr int32 kExperts = kNumExperts;
    const int32* offsets;
    __device__ int32 begin(int32 expert) const { return offsets[expert]; }
    __device__ int32 end(int32 expert) const { return offsets[expert + 1]; }
};

template <class Shape>
__device__ void rescale(const RescaleArgs& args) {
    const BoundsInMemory<Shape::num_experts> bounds{args.offsets};
    RowRescaler<Shape::n>{args.out, args.tile_scales, args.row_scales, args.stored}.run(bounds, threadIdx.x);
}
