// The warps that give each row one scale, by themselves. The last block stands for the GEMM before: it stores tile after
// tile, and reports each.
#pragma once
#include "device/roles/rescale.cuh"

struct RescaleArgs {
    unsigned char* values;        // [rows, K] E4M3, as the last block stores them
    const unsigned char* from;    // [rows, K] E4M3
    const float* tile_scales;     // [rows, K / 128]
    float* row_scales;            // [rows]
    uint32* stored;               // counts
    uint32* claimed;              // [1]
    const int32* offsets;         // [E + 1]
    uint32 stored_by, padding;
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
    const int lane = threadIdx.x;
    if (blockIdx.x != gridDim.x - 1) {
        RowRescaler<Shape::k>{{args.values, args.tile_scales, args.row_scales}, args.stored, args.stored_by, args.claimed}
            .run(bounds, lane);
        return;
    }
    for (int32 expert = 0; expert < Shape::num_experts; ++expert)
        for (int32 row = bounds.begin(expert); row < bounds.end(expert); row += kTileRows) {
            const Tile tile{expert, row, min(bounds.end(expert) - row, kTileRows), 0, false, false};
            if (lane == 0) add_release_gpu(args.stored + place_among_tiles(tile), 1);  // one strip comes early
            for (int i = 0; i < 100; ++i) __syncwarp();  // others run meanwhile
            for (int64 i = lane; i < static_cast<int64>(tile.rows) * Shape::k; i += 32)
                args.values[static_cast<int64>(row) * Shape::k + i] = args.from[static_cast<int64>(row) * Shape::k + i];
            __syncwarp();
            if (lane == 0) add_release_gpu(args.stored + place_among_tiles(tile), args.stored_by - 1);
        }
}
