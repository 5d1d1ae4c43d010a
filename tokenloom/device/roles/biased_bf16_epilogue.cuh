// An epilogue for outputs of bfloat16 rows with a bias: sum + weight * bias, rounded once. bf16_epilogue.cuh says what an
// epilogue is.
#pragma once
#include "device/roles/bf16_epilogue.cuh"

template <int kN>
struct BiasedBf16Epilogue {
    using Plain = Bf16Epilogue<kN>;
    using Columns = typename Plain::Columns;
    using Shared = typename Plain::Shared;
    using Staged = typename Plain::Staged;
    static constexpr bool kTransposed = Plain::kTransposed;
    static constexpr int kTileColumns = Plain::kTileColumns, kTileRowBytes = Plain::kTileRowBytes;
    static constexpr int kUnrolled = Plain::kUnrolled;
    static constexpr int64 kRowBytes = Plain::kRowBytes;
    const float* const& bias;     // [E, N]
    const float* const& weights;  // [rows], or null for ones

    __device__ __forceinline__ float weight(const Tile& tile, int row) const {
        return weights != nullptr && row < tile.rows ? weights[tile.row + row] : 1.0f;
    }

    template <int kChunks>
    __device__ __forceinline__ void stage(Staged& staging, Shared& shared, float (&sums)[kChunks][64],
                                          const Tile& tile, uint32 number, int group, int thread) const {
        const int lane = thread % 32, first = kChunks == kHalves ? 0 : group;
        const int row = (kChunks == kHalves ? group * kGroupRows : 0) + thread / 32 * 16 + lane / 4;
        const float low = weight(tile, row), high = weight(tile, row + 8);
        const float* from = bias + static_cast<int64>(tile.expert) * kN + tile.column + first * kBlock + lane % 4 * 2;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            if (tile.column + (first + chunk) * kBlock >= kN) continue;  // a pair of strips may reach past N
#pragma unroll
            for (int i = 0; i < 64; ++i) {
                const float term = from[chunk * kBlock + i / 4 * 8 + i % 2];
                sums[chunk][i] = __fmaf_rn(i & 2 ? high : low, term, sums[chunk][i]);
            }
        }
        Plain{}.stage(staging, shared, sums, tile, number, group, thread);
    }
};
