// The warps that quantise rows, by themselves. The last block stands for the GEMM before: it stores tile after tile, and
// reports each.
#pragma once
#include "device/roles/quantize.cuh"

struct QuantizeArgs {
    unsigned char* rows;        // [rows, K] bfloat16, as the last block stores them
    const unsigned char* from;  // [rows, K] bfloat16
    float* scales;              // [rows]
    uint32* stored;             // counts
    uint32* claimed;            // [1]
    const int32* offsets;       // [E + 1]
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
__device__ void quantize(const QuantizeArgs& args) {
    using Cut = EvenCut<2 * Shape::k, Shape::tile_rows>;
    constexpr int64 kRowBytes = Shape::k * 2;
    const BoundsInMemory<Shape::num_experts> bounds{args.offsets};
    const int lane = threadIdx.x;
    if (blockIdx.x != gridDim.x - 1) {
        RowQuantizer<Shape::k, Cut>{args.rows, args.scales, args.stored, args.stored_by, args.claimed}.run(bounds, lane);
        return;
    }
    for (int32 expert = 0; expert < Shape::num_experts; ++expert) {
        const int32 begin = bounds.begin(expert), count = bounds.end(expert) - begin;
        for (int32 number = 0; number < Cut::tiles(count); ++number) {
            const Part part = Cut::part(count, number);
            const Tile tile{expert, begin + part.first, part.rows, 0, false, false};
            if (lane == 0) add_release_gpu(args.stored + place_among_tiles(tile), 1);  // one strip comes early
            for (int i = 0; i < 100; ++i) __syncwarp();  // others run meanwhile
            for (int64 i = tile.row * kRowBytes + lane; i < (tile.row + tile.rows) * kRowBytes; i += 32)
                args.rows[i] = args.from[i];
            __syncwarp();
            if (lane == 0) add_release_gpu(args.stored + place_among_tiles(tile), args.stored_by - 1);
        }
    }
}
