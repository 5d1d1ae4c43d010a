// Epilogues of recipe "row", whose sums come out transposed: a warp has 16 columns of the output, for all rows of a tile.
//
//   Staged, Shared, kTransposed, kTileColumns, kTileRowBytes, kRowBytes    as in bf16_epilogue.cuh; Staged has half of
//                    a tile's row
//   kSums            of a thread
//   Loaded load(tile, group, thread)    what it needs of the tile's rows and of its columns, from global memory
//   stage(staging, shared, loaded, sums, tile, number, group, thread)
//                    turns the sums of a warpgroup into staged rows of its half of the tile's columns, between
//                    wait_for_room(number) and publish()
//
// Registers 4j + {0, 1} are the warp's column lane / 4, rows 8j + 2 * (lane % 4) + {0, 1} of the tile; 4j + {2, 3} are 8
// columns further.
#pragma once
#include "device/ptx/wgmma.cuh"
#include "device/roles/activation_form.cuh"
#include "device/roles/staging.cuh"
#include "device/roles/weights.cuh"
#include "device/tile/values.cuh"

constexpr int kGroupBarrier = 1;                       // where a math warpgroup meets, and the next number; 0 is __syncthreads
constexpr int kStepRows = 16;                          // of a tile, which are staged together

// Scales and weights. kWeighted: rows have weights, which may still be none.
//
// Each warpgroup has a copy of them in shared memory, or both share one (kCopies), to which both write the same values. They
// can share it where a tile has more blocks of K than the ring has stages: when one warpgroup is at the end of a tile, the
// other has released a block of it, so it has staged the tile before and reads those factors no more.
template <int kN, int kMostRows, bool kWeighted, int kCopies>
struct Factors {
    static constexpr int kThreadRows = (kMostRows + kGroupThreads - 1) / kGroupThreads;  // a thread of a warpgroup loads what belongs to them

    // Of these rows, and of this thread's two channels, which are 8 apart.
    struct OfThread {
        float scale[kThreadRows], weight[kThreadRows];
        float channel_scale[2], bias[2];
    };

    // Of all rows of a tile.
    struct Shared {
        alignas(8) float scale[kCopies][kMostRows];
        alignas(8) float weight[kCopies][kMostRows];
    };

    const float* const& row_scales;      // [rows]
    const float* const& channel_scales;  // [E, N], in the order of the weights' rows
    const float* const& row_weights;     // [rows], or null for ones

    // `biases`: [E, N], or null for none.
    __device__ __forceinline__ OfThread load(const Tile& tile, int group, int thread, const float* biases) const {
        OfThread found;
        const int64 first = channel(tile, group, thread);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            found.channel_scale[i] = channel_scales[first + i * 8];
            found.bias[i] = biases != nullptr ? biases[first + i * 8] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
            const int row = i * kGroupThreads + thread;
            found.scale[i] = row < tile.rows ? row_scales[tile.row + row] : 0.0f;
            found.weight[i] = kWeighted && row_weights != nullptr && row < tile.rows ? row_weights[tile.row + row] : 1.0f;
        }
        return found;
    }

    // Of this thread's first column; the second is 8 further. A pair of strips may reach past N: nobody stores those.
    static __device__ __forceinline__ int64 channel(const Tile& tile, int group, int thread) {
        const int column = (tile.column < kN ? tile.column : 0) + group * kGroupRows + thread / 32 * 16 + thread % 32 / 4;
        return static_cast<int64>(tile.expert) * kN + column;
    }

    // Behind wait_for_room: all warps of the group have staged the tile before, so nobody reads its factors any more.
    static __device__ __forceinline__ void share(Shared& shared, const OfThread& factors, int group, int thread) {
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
            const int row = i * kGroupThreads + thread;
            if (row >= kMostRows) continue;
            shared.scale[group % kCopies][row] = factors.scale[i];
            if (kWeighted) shared.weight[group % kCopies][row] = factors.weight[i];
        }
        sync_threads(kGroupBarrier + group, kGroupThreads);
    }

    // Of the rows of a step that this lane has, two in each half.
    struct OfRows {
        float2 scale[2], weight[2];
    };

    static __device__ __forceinline__ OfRows read(const Shared& shared, int step, int group, int lane) {
        const int copy = group % kCopies;
        OfRows found;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = step * kStepRows + half * 8 + lane % 4 * 2;
            found.scale[half] = *reinterpret_cast<const float2*>(shared.scale[copy] + row);
            found.weight[half] = kWeighted ? *reinterpret_cast<const float2*>(shared.weight[copy] + row) : float2{1.0f, 1.0f};
        }
        return found;
    }
};

// The output is bfloat16: each sum is rounded once. With a bias, the row's weight times it is added before.
template <int kN, int kMostRows, bool kBiased, int kCopies>
struct TransposedBf16Epilogue {
    static constexpr bool kTransposed = true;
    static constexpr int kTileColumns = kRowsOfA, kTileRowBytes = kTileColumns * 2;
    static constexpr int kSums = kMostRows / 2;  // of a thread
    using Staged = Staging<kMostRows, kTileRowBytes / kGroups, DenseLines>;
    static constexpr int64 kRowBytes = static_cast<int64>(kN) * 2;
    using From = Factors<kN, kMostRows, kBiased, kCopies>;
    using Loaded = typename From::OfThread;
    using Shared = typename From::Shared;
    const From from;
    const float* const& bias;  // biased: [E, N]

    __device__ __forceinline__ Loaded load(const Tile& tile, int group, int thread) const {
        return from.load(tile, group, thread, kBiased ? bias : nullptr);
    }

    __device__ __forceinline__ void stage(Staged& staging, Shared& shared, const Loaded& loaded,
                                          const float (&sums)[kSums], const Tile& tile, uint32 number, int group,
                                          int thread) const {
        using Lines = typename Staged::Lines;
        const int lane = thread % 32;
        const float low = loaded.channel_scale[0], high = loaded.channel_scale[1];
        unsigned char* to = staging.rows[group] + Lines::place(lane / 16 * 8 + lane % 8, thread / 32 * 2 + lane / 8 % 2);
        staging.wait_for_room(number, group);
        From::share(shared, loaded, group, thread);
        auto next = From::read(shared, 0, group, lane);
#pragma unroll
        for (int i = 0; i < kMostRows / kStepRows; ++i) {
            if (i * kStepRows >= tile.rows) break;
            const auto of_rows = next;
            if (i + 1 < kMostRows / kStepRows) next = From::read(shared, i + 1, group, lane);  // while these are multiplied
            uint32 packed[4];  // each 8 rows x 8 columns
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float* from_sums = sums + (i * kStepRows + half * 8) / 2;
                const float2 scale = of_rows.scale[half];
                float values[4] = {from_sums[0] * (scale.x * low), from_sums[1] * (scale.y * low),
                                   from_sums[2] * (scale.x * high), from_sums[3] * (scale.y * high)};
                if constexpr (kBiased) {
                    const float2 weight = of_rows.weight[half];
                    values[0] = __fmaf_rn(weight.x, loaded.bias[0], values[0]);
                    values[1] = __fmaf_rn(weight.y, loaded.bias[0], values[1]);
                    values[2] = __fmaf_rn(weight.x, loaded.bias[1], values[2]);
                    values[3] = __fmaf_rn(weight.y, loaded.bias[1], values[3]);
                }
                packed[2 * half] = pack_pair<kBfloat16>(values[0], values[1]);
                packed[2 * half + 1] = pack_pair<kBfloat16>(values[2], values[3]);
            }
            store_transposed(to + i * kStepRows * Lines::kPitch, packed[0], packed[1], packed[2], packed[3]);
        }
        staging.publish(group, lane);
    }
};

// Sums are gates and ups: the activation times the row's weight, in bfloat16. The rows get one scale each once they are
// whole (quantize.cuh). Gates and ups take turns every 8 columns, so each thread has both of a value.
template <int kN, int kMostRows, class Form, int kCopies>
struct TransposedActivationEpilogue {
    static constexpr bool kTransposed = true;
    static constexpr int kTileColumns = kRowsOfA, kTileRowBytes = kTileColumns;  // half as many values, of two bytes
    static constexpr int kSums = kMostRows / 2;  // of a thread
    using Staged = Staging<kMostRows, kTileRowBytes / kGroups, DenseLines>;
    static constexpr int64 kRowBytes = kN;
    using From = Factors<kN, kMostRows, true, kCopies>;
    using Loaded = typename From::OfThread;
    using Shared = typename From::Shared;
    const From from;
    const Form form;

    __device__ __forceinline__ Loaded load(const Tile& tile, int group, int thread) const {
        return from.load(tile, group, thread, Form::kBiased ? form.biases() : nullptr);
    }

    __device__ __forceinline__ void stage(Staged& staging, Shared& shared, const Loaded& loaded,
                                          const float (&sums)[kSums], const Tile& tile, uint32 number, int group,
                                          int thread) const {
        using Lines = typename Staged::Lines;
        const int lane = thread % 32;
        const float of_gate = loaded.channel_scale[0], of_up = loaded.channel_scale[1];
        staging.wait_for_room(number, group);
        From::share(shared, loaded, group, thread);
        asm volatile("" : "+r"(thread));  // the place is found again for each tile: it takes no register in the main loop
        unsigned char* to = staging.rows[group] + Lines::place(lane % 16, thread / 32);
        auto next = From::read(shared, 0, group, lane);
#pragma unroll
        for (int i = 0; i < kMostRows / kStepRows; ++i) {
            if (i * kStepRows >= tile.rows) break;
            const auto of_rows = next;
            if (i + 1 < kMostRows / kStepRows) next = From::read(shared, i + 1, group, lane);  // while these are multiplied
            uint32 packed[2];  // each 8 rows x 8 values
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if constexpr (Form::kOneByOne) __syncwarp();  // values of long functions side by side would spill
                const float* from_sums = sums + (i * kStepRows + half * 8) / 2;
                const float2 scale = of_rows.scale[half], weight = of_rows.weight[half];
                const float first = form.activate(from_sums[0] * (scale.x * of_gate) + loaded.bias[0],
                                                  from_sums[2] * (scale.x * of_up) + loaded.bias[1]);
                const float second = form.activate(from_sums[1] * (scale.y * of_gate) + loaded.bias[0],
                                                   from_sums[3] * (scale.y * of_up) + loaded.bias[1]);
                packed[half] = pack_pair<kBfloat16>(first * weight.x, second * weight.y);
            }
            store_transposed(to + i * kStepRows * Lines::kPitch, packed[0], packed[1]);
        }
        staging.publish(group, lane);
    }
};
