// An epilogue for sums of rows and channels that have one scale each: sum * (row's scale * channel's scale), then what
// another epilogue makes of it. bf16_epilogue.cuh says what an epilogue is.
#pragma once
#include "device/roles/bf16_epilogue.cuh"

template <int kN, class Inner>
struct RowScaledEpilogue {
    using Columns = typename Inner::Columns;
    using Shared = typename Inner::Shared;
    static constexpr int kTileRowBytes = Inner::kTileRowBytes, kUnrolled = Inner::kUnrolled;
    static constexpr int64 kRowBytes = Inner::kRowBytes;
    const Inner inner;
    const float* const& row_scales;      // [rows]
    const float* const& channel_scales;  // [E, N], in the order of the weights' rows

    template <class Staging, int kChunks>
    __device__ __forceinline__ void stage(Staging& staging, Shared& shared, float (&sums)[kChunks][64],
                                          const Tile& tile, uint32 number, int group, int thread) const {
        const int lane = thread % 32, first = kChunks == kHalves ? 0 : group;
        const int row = (kChunks == kHalves ? group * kGroupRows : 0) + thread / 32 * 16 + lane / 4;
        const float low = row < tile.rows ? row_scales[tile.row + row] : 0.0f;
        const float high = row + 8 < tile.rows ? row_scales[tile.row + row + 8] : 0.0f;
        const float* from =
            channel_scales + static_cast<int64>(tile.expert) * kN + tile.column + first * kBlock + lane % 4 * 2;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            if (tile.column + (first + chunk) * kBlock >= kN) continue;  // a pair of strips may reach past N
#pragma unroll
            for (int i = 0; i < 16; ++i) {  // 8 columns, of which this thread has two
                const float2 scales = *reinterpret_cast<const float2*>(from + chunk * kBlock + i * 8);
                sums[chunk][4 * i] *= low * scales.x;
                sums[chunk][4 * i + 1] *= low * scales.y;
                sums[chunk][4 * i + 2] *= high * scales.x;
                sums[chunk][4 * i + 3] *= high * scales.y;
            }
        }
        inner.stage(staging, shared, sums, tile, number, group, thread);
    }
};
