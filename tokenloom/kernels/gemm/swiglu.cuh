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

// One row of this thread's: registers `first` and the next of every 4. What it writes are columns 8j + 2 * (lane % 4)
// + {0, 1}; each value takes the place of its gate until the row's largest is known.
template <class Shape>
__device__ __forceinline__ void leave_row(const GroupedGemmArgs& args, float (&sums)[kHalves][64], int first,
                                          unsigned char* to, int64 row, bool exists, int column_block, int lane) {
    constexpr int kPairs = kHalves * 8;
    const float weight = exists && args.row_weights != nullptr ? args.row_weights[row] : 1.0f;
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        float* gates = sums[i / 8] + i % 8 * 8 + first;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            gates[e] = swiglu<Shape>(args, gates[e], gates[e + 4]) * weight;
            amax = fmaxf(amax, fabsf(gates[e]));
        }
    }
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
    const Fp8Scale scale = fp8_scale<Shape::power_of_two != 0>(amax);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        const float* values = sums[i / 8] + i % 8 * 8 + first;
        *reinterpret_cast<uint16*>(to + i * 8 + lane % 4 * 2) =
            pack_e4m3(values[0] * scale.factor, values[1] * scale.factor);
    }
    if (exists && lane % 4 == 0) args.out_scales[row * (Shape::n / kTileColumns) + column_block] = scale.scale;
}

template <class Shape>
__device__ __forceinline__ void leave_activations(const GroupedGemmArgs& args, GemmShared<Shape>& shared,
                                                  float (&sums)[kHalves][64], const Tile& tile, uint32 use,
                                                  int group, int thread) {
    constexpr int kPitch = GemmShared<Shape>::kPitch;
    const int lane = thread % 32, staged_row = thread / 32 * 16 + lane / 4, row = group * kGroupRows + staged_row;
    unsigned char* to = shared.out[group] + staged_row * kPitch;
    const int column_block = tile.column / kTileColumns;
    const bool inside = tile.column < Shape::n;  // a pair of strips may reach beyond N
    wait_for_room(shared, use, group);
    leave_row<Shape>(args, sums, 0, to, tile.row + row, inside && row < tile.rows, column_block, lane);
    leave_row<Shape>(args, sums, 2, to + 8 * kPitch, tile.row + row + 8, inside && row + 8 < tile.rows, column_block,
                     lane);
    tell_storing_warps(shared, group, lane);
}
