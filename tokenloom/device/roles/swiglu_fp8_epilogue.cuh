// An epilogue for sums that are gates and ups: silu(gate) * up * weight, or another gated activation, quantised to E4M3
// with one scale per row and 128 values. bf16_epilogue.cuh says what an epilogue is.
//
// Gates and ups take turns every 8 columns, so each thread has both of a value. The 256 columns of a row are one scale
// block of the output, which four lanes share.
#pragma once
#include "device/ptx/memory.cuh"
#include "device/roles/activation_form.cuh"
#include "device/roles/staging.cuh"
#include "device/roles/weights.cuh"
#include "device/tile/fp8.cuh"

constexpr int kMathBarrier = 1;  // where the math warpgroups meet; 0 is __syncthreads

template <int kN, bool kPowerOfTwo, class Form>
struct SwigluFp8Epilogue {
    using Columns = GatesAndUpsInTurns;
    static constexpr bool kTransposed = false;
    static constexpr int kTileColumns = kRowsOfB, kTileRowBytes = kTileColumns / 2;
    static_assert(kN % kTileColumns == 0, "whole scale blocks of the output");
    using Staged = Staging<kGroupRows, kTileRowBytes>;
    static constexpr int64 kRowBytes = kN / 2, kRowScales = kN / kTileColumns;
    static constexpr int kUnrolled = 4;
    struct Shared {
        float largest[kGroups][kGroupRows];  // activations of each row, if the warpgroups share its columns
    };
    float* const& scales;         // [rows, N / 256]
    const float* const& weights;  // [rows], or null for ones
    const Form form;

    // The bias of this thread's first gate in a row of the tile. Beyond N it is any other's: nobody stores those.
    template <int kChunks>
    __device__ __forceinline__ const float* first_bias(const Tile& tile, int group, int lane) const {
        if constexpr (!Form::kBiased) return nullptr;
        const int column = tile.column < kN ? tile.column : 0;
        return form.biases() + static_cast<int64>(tile.expert) * kN + column +
               (kChunks == kHalves ? 0 : group * kBlock) + lane % 4 * 2;
    }

    // One row of this thread: registers `first` and the next of every 4, columns 8j + 2 * (lane % 4) + {0, 1} of the
    // output. Each activation replaces its gate. Returns the largest magnitude that this warpgroup has of the row.
    template <int kChunks>
    __device__ __forceinline__ float activate_row(float (&sums)[kChunks][64], int first, int32 row, bool exists,
                                                  const float* bias) const {
        const float weight = exists && weights != nullptr ? weights[row] : 1.0f;
        float amax = 0.0f;
#pragma unroll
        for (int i = 0; i < kChunks * 8; ++i) {
            float* gates = sums[i / 8] + i % 8 * 8 + first;
            if constexpr (Form::kOneByOne) __syncwarp();  // values of long functions side by side would spill
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if constexpr (Form::kBiased) {
                    gates[e] += bias[i * 16 + e];
                    gates[e + 4] += bias[i * 16 + 8 + e];
                }
                gates[e] = form.activate(gates[e], gates[e + 4]) * weight;
                amax = fmaxf(amax, fabsf(gates[e]));
            }
        }
        amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
        return fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
    }

    template <int kChunks>
    __device__ __forceinline__ void stage_row(const float (&sums)[kChunks][64], int first, float amax,
                                              unsigned char* to, int64 scale_place, bool exists, int lane) const {
        const Fp8Scale scale = fp8_scale<kPowerOfTwo>(amax);
#pragma unroll
        for (int i = 0; i < kChunks * 8; ++i) {
            const float* values = sums[i / 8] + i % 8 * 8 + first;
            *reinterpret_cast<uint16*>(to + i * 8 + lane % 4 * 2) =
                pack_e4m3(values[0] * scale.factor, values[1] * scale.factor);
        }
        if (exists && lane % 4 == 0) scales[scale_place] = scale.scale;
    }

    // Each warpgroup has half of the scale block: both take the larger magnitude.
    static __device__ __forceinline__ void share_largest(Shared& shared, float (&amax)[2], int group, int staged_row,
                                                         int lane) {
        if (lane % 4 == 0) {
            shared.largest[group][staged_row] = amax[0];
            shared.largest[group][staged_row + 8] = amax[1];
        }
        sync_threads(kMathBarrier, kGroups * kGroupThreads);
        amax[0] = fmaxf(amax[0], shared.largest[group ^ 1][staged_row]);
        amax[1] = fmaxf(amax[1], shared.largest[group ^ 1][staged_row + 8]);
        sync_threads(kMathBarrier, kGroups * kGroupThreads);  // before the next tile's are written
    }

    template <int kChunks>
    __device__ __forceinline__ void stage(Staged& staging, Shared& shared, float (&sums)[kChunks][64],
                                          const Tile& tile, uint32 number, int group, int thread) const {
        constexpr int kPitch = Staged::Lines::kPitch;
        const int lane = thread % 32, staged_row = thread / 32 * 16 + lane / 4;
        const int row = (kChunks == kHalves ? group * kGroupRows : 0) + staged_row;
        unsigned char* to = staging.rows[group] + staged_row * kPitch + first_byte<kChunks>(kTileRowBytes, group);
        const bool inside = tile.column < kN;  // a pair of strips may reach past N
        const bool exists[2] = {inside && row < tile.rows, inside && row + 8 < tile.rows};
        const float* bias = first_bias<kChunks>(tile, group, lane);
        staging.wait_for_room(number, group);
        float amax[2];
        if constexpr (kChunks < kHalves) {
#pragma unroll
            for (int i = 0; i < 2; ++i) amax[i] = activate_row(sums, 2 * i, tile.row + row + 8 * i, exists[i], bias);
            share_largest(shared, amax, group, staged_row, lane);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if constexpr (kChunks == kHalves)  // one row after the other: registers are scarce
                amax[i] = activate_row(sums, 2 * i, tile.row + row + 8 * i, exists[i], bias);
            stage_row(sums, 2 * i, amax[i], to + 8 * i * kPitch,
                      (tile.row + row + 8 * i) * kRowScales + tile.column / kTileColumns, exists[i], lane);
        }
        staging.publish(group, lane);
    }
};
