// The way out: a math warp leaves its 16 rows of 128 columns in shared memory, in which neighbouring lanes then find
// neighbouring values of the output. Rows and columns that the output does not have are not stored.
#pragma once
#include "device/ptx/wgmma.cuh"
#include "device/tile/values.cuh"
#include "kernels/gemm16/tiles.cuh"

// Where a warp's rows go: 128 columns from `to` on, of which `columns` exist, in `rows` rows.
struct OutRows {
    unsigned char* to;
    int64 row_bytes;
    int rows, columns;
};

// `sums` as wgmma leaves them: 4j + {0, 1} are row lane / 4, columns 8j + 2 * (lane % 4) + {0, 1}; 4j + {2, 3} are 8 rows
// below. Rounded to bfloat16.
__device__ __forceinline__ void store_rows(unsigned char* staged, const float* sums, const OutRows& out, int lane) {
    constexpr int kRowBytes = kHalfColumns * 2, kUnits = kRowBytes / 16;
    const int row = lane % 16;
    __syncwarp();  // what was there has been read
#pragma unroll
    for (int i = 0; i < kUnits / 2; ++i) {  // 16 columns at a time; units are swapped against bank conflicts
        const int unit = (2 * i + lane / 16) ^ (row & 7);
        const float* from = sums + i * 8;
        store_matrices(staged + row * kRowBytes + unit * 16, pack_pair<kBfloat16>(from[0], from[1]),
                       pack_pair<kBfloat16>(from[2], from[3]), pack_pair<kBfloat16>(from[4], from[5]),
                       pack_pair<kBfloat16>(from[6], from[7]));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kWarpRows / 2; ++i) {
        const int from_row = 2 * i + lane / kUnits, unit = lane % kUnits;
        const Vec16 values =
            *reinterpret_cast<const Vec16*>(staged + from_row * kRowBytes + (unit ^ (from_row & 7)) * 16);
        if (from_row < out.rows && unit * 8 < out.columns)
            store_16(out.to + from_row * out.row_bytes + unit * 16, values);
    }
}

// What the output holds, to the sums.
__device__ __forceinline__ void add_stored(float* sums, const OutRows& out, int lane) {
    const int row = lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const int in_row = row + i % 2 * 8, in_columns = i / 2 * 8 + column;
        if (in_row >= out.rows || in_columns >= out.columns) continue;
        const float2 stored = unpack_pair<kBfloat16>(
            *reinterpret_cast<const uint32*>(out.to + in_row * out.row_bytes + in_columns * 2));
        sums[i * 2] += stored.x;
        sums[i * 2 + 1] += stored.y;
    }
}

// Gates become weighted activations, of pre-activations as they are stored.
__device__ __forceinline__ void activate(float* gates, const float* ups, float low_weight, float high_weight) {
#pragma unroll
    for (int i = 0; i < 64; i += 2) {
        const float2 gate = unpack_pair<kBfloat16>(pack_pair<kBfloat16>(gates[i], gates[i + 1]));
        const float2 up = unpack_pair<kBfloat16>(pack_pair<kBfloat16>(ups[i], ups[i + 1]));
        const float weight = i & 2 ? high_weight : low_weight;
        gates[i] = gate.x * sigmoid<kBfloat16>(gate.x) * up.x * weight;
        gates[i + 1] = gate.y * sigmoid<kBfloat16>(gate.y) * up.y * weight;
    }
}

// A warp's rows of a tile.
template <class Shape>
__device__ __forceinline__ void store_tile(const Gemm16Args& args, unsigned char* staged, float (&sums)[128],
                                           const Tile& tile, int warp, int lane) {
    const int64 row = (Shape::of_weights ? static_cast<int64>(tile.expert) * Shape::m : tile.first) + tile.row +
                      warp * kWarpRows;
    const int rows = tile.rows - warp * kWarpRows;
    constexpr int64 kRowBytes = Shape::n * 2;
    auto* to = static_cast<unsigned char*>(args.out) + row * kRowBytes + tile.column * 2;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
        OutRows out{to + half * kHalfColumns * 2, kRowBytes, rows, Shape::n - tile.column - half * kHalfColumns};
        if constexpr (Shape::swiglu != 0)
            out = {to + half * (Shape::n / 2) * 2, kRowBytes, rows, Shape::n / 2 - tile.column};
        if constexpr (Shape::adds != 0) add_stored(sums + half * 64, out, lane);
        store_rows(staged, sums + half * 64, out, lane);
    }
    if constexpr (Shape::swiglu != 0) {
        const float* weights = args.row_weights + row + lane / 4;
        const float low = lane / 4 < rows ? weights[0] : 0.0f, high = lane / 4 + 8 < rows ? weights[8] : 0.0f;
        activate(sums, sums + 64, low, high);
        auto* activations = static_cast<unsigned char*>(args.activations) + row * (kRowBytes / 2) + tile.column * 2;
        store_rows(staged, sums, {activations, kRowBytes / 2, rows, Shape::n / 2 - tile.column}, lane);
    }
}
