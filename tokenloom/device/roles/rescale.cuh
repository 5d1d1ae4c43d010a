// The warps that give each row of activations one scale.
//
// A tile has 128 activations of a row and cannot know the others, so it stores codes with a scale of its own, which is a
// power of two. Once all tiles of the same rows are stored, a warp takes the largest of a row's scales, and multiplies
// each code by its tile's scale over that one. Digits stay what they are, unless a value falls below E4M3's least normal
// number: then it is rounded a second time.
//
// One warp of each block does this and nothing else. It takes its share of all rows and waits for them in the order of
// tiles; nobody who multiplies or stores ever waits for it.
#pragma once
#include "device/roles/expert_tiles.cuh"
#include "device/roles/gate.cuh"
#include "device/roles/store.cuh"
#include "device/tile/fp8.cuh"

template <int kN>
struct RowRescaler {
    static constexpr int kScales = kN / kTileColumns, kUnits = kN / 2 / 16;  // of a row: its tiles, and 16 codes each
    static constexpr int kScaleUnits = kUnits / kScales;
    static constexpr int kSteps = 2;  // units of a row that a lane has at once
    static constexpr uint32 kStoredBy = kStoreWarps * kClusterBlocks * kStripPairs<kN>;
    void* const& out;           // [rows, N / 2] E4M3
    const float* tile_scales;   // [rows, N / 256], powers of two
    float* const& row_scales;   // [rows]
    uint32* const& stored;      // counts as in gate.cuh: of stored strips, and then of rescaled shares too

    template <class Bounds>
    __device__ __forceinline__ void run(const Bounds& bounds, int lane) const {
        uint32 passed = 0;  // shares of the tiles before
        for (int32 expert = 0; expert < Bounds::kExperts; ++expert) {
            const int32 end = bounds.end(expert);
            for (int32 row = bounds.begin(expert); row < end; row += kTileRows) {
                const Tile tile{expert, row, min(end - row, kTileRows), 0, false, false};
                const int32 shares = rescaled_shares(tile);
                const uint32 first = (blockIdx.x + gridDim.x - passed % gridDim.x) % gridDim.x;
                passed += shares;
                if (first >= static_cast<uint32>(shares)) continue;
                uint32* count = stored + place_among_tiles(tile);
                wait_for_tiles(count, lane);
                for (int32 share = first; share < shares; share += gridDim.x) {
                    const int32 from = share * kRescaledRows;
                    rescale(tile.row + from, min(tile.rows - from, kRescaledRows), lane);
                    __syncwarp();
                    if (lane == 0) add_release_gpu(count, 1);
                }
            }
        }
    }

    // No deadline: who stores them runs already, and its own waits have one.
    static __device__ __forceinline__ void wait_for_tiles(const uint32* count, int lane) {
        if (lane == 0) {
            while (load_relaxed_sys(count) < kStoredBy) sleep_ns(100);
            fence_acquire_sys();
        }
        __syncwarp();
    }

    __device__ __forceinline__ void rescale(int64 row, int count, int lane) const {
        float largest[kRescaledRows];
#pragma unroll
        for (int r = 0; r < kRescaledRows; ++r) {
            largest[r] = 0.0f;
            if (r < count)
                for (int i = lane; i < kScales; i += 32)
                    largest[r] = fmaxf(largest[r], tile_scales[(row + r) * kScales + i]);
#pragma unroll
            for (int other = 1; other < 32; other *= 2)
                largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], other));
            if (r < count && lane == 0) row_scales[row + r] = largest[r];
        }
        for (int begin = lane; begin < kUnits; begin += 32 * kSteps) {
            Vec16 codes[kRescaledRows][kSteps];
            uint32 halvings[kRescaledRows][kSteps];  // 0: nothing changes
#pragma unroll
            for (int r = 0; r < kRescaledRows; ++r)
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    const int unit = begin + step * 32;
                    halvings[r][step] = 0;
                    if (r >= count || unit >= kUnits) continue;
                    const float own = tile_scales[(row + r) * kScales + unit / kScaleUnits];
                    halvings[r][step] = (__float_as_uint(largest[r]) - __float_as_uint(own)) >> 23;
                    if (halvings[r][step] != 0) codes[r][step] = load_16_once(place(row + r, unit));
                }
#pragma unroll
            for (int r = 0; r < kRescaledRows; ++r)
#pragma unroll
                for (int step = 0; step < kSteps; ++step)
                    if (halvings[r][step] != 0)
                        store_16(place(row + r, begin + step * 32), halve_e4m3(codes[r][step], halvings[r][step]));
        }
    }

    __device__ __forceinline__ unsigned char* place(int64 row, int unit) const {
        return static_cast<unsigned char*>(out) + (row * kUnits + unit) * 16;
    }
};
