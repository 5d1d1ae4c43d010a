// SwiGLU on sums, weighted and quantised again: silu(gate) * up * weight, E4M3 with a scale per row and 128 values.
//
// Gates and ups alternate every 8 columns, so each thread has both of a value, and the 256 columns of a warpgroup's
// rows are one scale block of the output, spread over four lanes.
#pragma once
#include "device/tile/fp8.cuh"
#include "kernels/gemm/store.cuh"

template <class Shape>
__device__ __forceinline__ float swiglu(const GroupedGemmArgs& args, float gate, float up) {
    if constexpr (Shape::clamped != 0) {
        gate = fminf(gate, args.clamp);
        up = fmaxf(fminf(up, args.clamp), -args.clamp);
    }
    if constexpr (Shape::fast_math != 0) return __fdividef(gate, 1.0f + __expf(-gate)) * up;
    return divide_full(gate, 1.0f + expf(-gate)) * up;
}

// One row of this thread's: registers `first` and the next of every 4, columns 8j + 2 * (lane % 4) + {0, 1} of the
// output. Each value takes the place of its gate. Returns the largest in this warp.
template <class Shape, int kChunks>
__device__ __forceinline__ float activate_row(const GroupedGemmArgs& args, float (&sums)[kChunks][64], int first,
                                              int64 row, bool exists) {
    const float weight = exists && args.row_weights != nullptr ? args.row_weights[row] : 1.0f;
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunks * 8; ++i) {
        float* gates = sums[i / 8] + i % 8 * 8 + first;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            gates[e] = swiglu<Shape>(args, gates[e], gates[e + 4]) * weight;
            amax = fmaxf(amax, fabsf(gates[e]));
        }
    }
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
    return fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
}

template <class Shape, int kChunks>
__device__ __forceinline__ void leave_row(const GroupedGemmArgs& args, const float (&sums)[kChunks][64], int first,
                                          float amax, unsigned char* to, int64 scale_place, bool exists, int lane) {
    const Fp8Scale scale = fp8_scale<Shape::power_of_two != 0>(amax);
#pragma unroll
    for (int i = 0; i < kChunks * 8; ++i) {
        const float* values = sums[i / 8] + i % 8 * 8 + first;
        *reinterpret_cast<uint16*>(to + i * 8 + lane % 4 * 2) =
            pack_e4m3(values[0] * scale.factor, values[1] * scale.factor);
    }
    if (exists && lane % 4 == 0) args.out_scales[scale_place] = scale.scale;
}

// Both warpgroups have half of a scale block: the larger of their largest.
template <class Shape>
__device__ __forceinline__ void share_largest(GemmShared<Shape>& shared, float (&amax)[2], int group,
                                              int staged_row, int lane) {
    if (lane % 4 == 0) {
        shared.largest[group][staged_row] = amax[0];
        shared.largest[group][staged_row + 8] = amax[1];
    }
    sync_threads(1, 128 * kGroups);
    amax[0] = fmaxf(amax[0], shared.largest[group ^ 1][staged_row]);
    amax[1] = fmaxf(amax[1], shared.largest[group ^ 1][staged_row + 8]);
    sync_threads(1, 128 * kGroups);  // before the next tile's are written
}

template <class Shape, int kChunks>
__device__ __forceinline__ void leave_activations(const GroupedGemmArgs& args, GemmShared<Shape>& shared,
                                                  float (&sums)[kChunks][64], const Tile& tile, uint32 use, int group,
                                                  int thread) {
    constexpr int kPitch = GemmShared<Shape>::kPitch;
    constexpr int64 kScales = Shape::n / kTileColumns;
    const int lane = thread % 32, staged_row = thread / 32 * 16 + lane / 4;
    const int row = (kChunks == kHalves ? group * kGroupRows : 0) + staged_row;
    unsigned char* to = shared.out[group] + staged_row * kPitch + first_byte<Shape, kChunks>(group);
    const bool inside = tile.column < Shape::n;  // a pair of strips may reach beyond N
    const bool exists[2] = {inside && row < tile.rows, inside && row + 8 < tile.rows};
    wait_for_room(shared, use, group);
    float amax[2];
    if constexpr (kChunks < kHalves) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            amax[i] = activate_row<Shape>(args, sums, 2 * i, tile.row + row + 8 * i, exists[i]);
        share_largest(shared, amax, group, staged_row, lane);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if constexpr (kChunks == kHalves)  // one after the other: registers are short
            amax[i] = activate_row<Shape>(args, sums, 2 * i, tile.row + row + 8 * i, exists[i]);
        leave_row<Shape>(args, sums, 2 * i, amax[i], to + 8 * i * kPitch,
                         (tile.row + row + 8 * i) * kScales + tile.column / kTileColumns, exists[i], lane);
    }
    tell_storing_warps(shared, group, lane);
}
