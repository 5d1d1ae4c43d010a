// An epilogue for outputs of bfloat16 rows: each sum is rounded once.
//
// An *epilogue* says what becomes of the sums of a tile. It is a type that holds the run-time values it needs:
//
//   Columns          the order of the weights' columns that it expects (weights.cuh)
//   kRowBytes        bytes of a row of the output
//   kTileRowBytes    of them, those of one tile, which has kTileColumns before the epilogue
//   Staged           the Staging that it needs
//   kTransposed      each warpgroup stages its half of the columns of all rows, see transposed_epilogue.cuh
//   kUnrolled        blocks of K that the main loop can unroll beside it without spilling
//   Shared           what it keeps in shared memory, apart from what it stages
//   stage(staging, shared, sums, tile, number, group, thread)
//                    turns the sums of a warpgroup into staged rows, as Staged::Lines says, between
//                    wait_for_room(number) and publish(). `sums` is float[kChunks][64], as wgmma leaves it: both
//                    halves of the columns, or half `group`.
#pragma once
#include "device/ptx/wgmma.cuh"
#include "device/roles/staging.cuh"
#include "device/roles/weights.cuh"
#include "device/tile/values.cuh"

template <int kN>
struct Bf16Epilogue {
    using Columns = ColumnsInOrder;
    static constexpr bool kTransposed = false;
    static constexpr int kTileColumns = kRowsOfB, kTileRowBytes = kTileColumns * 2;
    using Staged = Staging<kGroupRows, kTileRowBytes>;
    static constexpr int64 kRowBytes = static_cast<int64>(kN) * 2;
    static constexpr int kUnrolled = 8;
    struct Shared {};

    template <int kChunks>
    __device__ __forceinline__ void stage(Staged& staging, Shared&, const float (&sums)[kChunks][64],
                                          const Tile&, uint32 number, int group, int thread) const {
        constexpr int kPitch = Staged::Lines::kPitch;
        const int lane = thread % 32;
        unsigned char* to = staging.rows[group] + (thread / 32 * 16 + lane % 16) * kPitch + lane / 16 * 16 +
                            first_byte<kChunks>(kTileRowBytes, group);
        staging.wait_for_room(number, group);
#pragma unroll
        for (int i = 0; i < kChunks * 8; ++i) {  // 16 columns at a time
            const float* from = sums[i / 8] + i % 8 * 8;
            store_matrices(to + i * 32, pack_pair<kBfloat16>(from[0], from[1]), pack_pair<kBfloat16>(from[2], from[3]),
                           pack_pair<kBfloat16>(from[4], from[5]), pack_pair<kBfloat16>(from[6], from[7]));
        }
        staging.publish(group, lane);
    }
};
