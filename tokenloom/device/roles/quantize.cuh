// The warps that quantise rows of activations (quantized_row.cuh), of the second of two GEMMs in turn.
//
// Once the first GEMM has stored all tiles of some rows, warps quantise these rows in place. One warp of each block does
// this and nothing else. It claims rows in the order in which tiles are multiplied, several if they are narrow: one claim
// and one release for a few rows, which take as long as a narrow row itself. So a block that waits for
// rows needs no other block to run: its own warp claims them, and the first GEMM waits for nobody.
#pragma once
#include "device/roles/expert_tiles.cuh"
#include "device/roles/gate.cuh"
#include "device/tile/quantized_row.cuh"

template <int kWidth, class Cut>
struct RowQuantizer {
    unsigned char* const& rows;  // [rows][kWidth] bfloat16, of which E4M3 values become the first half
    float* const& scales;        // [rows]
    uint32* const& stored;       // counts as in gate.cuh: of stored strips, and then of quantised rows too
    const uint32& stored_by;     // warps that store a tile of rows
    uint32* const& claimed;      // [1] groups of kClaimed rows that a warp has; 0 before the call

    static constexpr uint32 kClaimed = kWidth <= 1024 ? 4 : 1;

    template <class Bounds>
    __device__ __forceinline__ void run(const Bounds& bounds, int lane) const {
        uint32 passed = 0, place = told(claim(lane)) * kClaimed;  // passed: rows of the tiles before
        for (int32 expert = 0; expert < Bounds::kExperts; ++expert) {
            const int32 begin = bounds.begin(expert), count = bounds.end(expert) - begin;
            for (int32 number = 0; number < Cut::tiles(count); ++number) {
                const Part part = Cut::part(count, number);
                const Tile tile{expert, begin + part.first, part.rows, 0, false, false};
                uint32* counted = stored + place_among_tiles(tile);
                if (place - passed < static_cast<uint32>(tile.rows)) wait_for_tiles(counted, lane);
                while (place - passed < static_cast<uint32>(tile.rows)) {
                    const int64 row = tile.row + static_cast<int32>(place - passed);
                    const uint32 of_claim = kClaimed - place % kClaimed, of_tile = tile.rows - (place - passed);
                    const uint32 taken = min(of_claim, of_tile);
                    const bool is_last = taken == of_claim;
                    const uint32 next = is_last ? claim(lane) : 0;  // comes while these rows are quantised
#pragma unroll 1
                    for (uint32 i = 0; i < taken; ++i) {
                        unsigned char* values = rows + (row + i) * kWidth * 2;
                        quantize_activations<kWidth>(values, values, scales + row + i, lane);
                    }
                    __syncwarp();
                    if (lane == 0) add_release_gpu(counted, taken);
                    place = is_last ? told(next) * kClaimed : place + taken;
                }
                passed += tile.rows;
            }
        }
    }

    // Lane 0 gets the number of a group of rows, among those of all tiles.
    __device__ __forceinline__ uint32 claim(int lane) const { return lane == 0 ? add_relaxed_gpu(claimed, 1) : 0; }
    static __device__ __forceinline__ uint32 told(uint32 place) { return __shfl_sync(~0u, place, 0); }

    // No deadline: the kernel that stores them runs already, and its own waits have one.
    __device__ __forceinline__ void wait_for_tiles(const uint32* count, int lane) const {
        if (lane == 0)
            while (load_acquire_gpu(count) < stored_by) sleep_ns(100);
        __syncwarp();
    }
};
