// The warps that give each row of activations one scale (row_scales.cuh), of the second of two GEMMs in turn.
//
// Once the first GEMM has stored all tiles of some rows, a warp takes two of these rows and changes them. One warp of each
// block does this and nothing else. It claims rows in the order in which tiles are multiplied. So a block that waits for
// rows needs no other block to run: its own warp claims them, and the first GEMM waits for nobody.
#pragma once
#include "device/roles/expert_tiles.cuh"
#include "device/roles/gate.cuh"
#include "device/tile/row_scales.cuh"

template <int kWidth>
struct RowRescaler {
    TileScaledRows<kWidth> rows;
    uint32* const& stored;     // counts as in gate.cuh: of stored strips, and then of rescaled shares too
    const uint32& stored_by;   // warps that store a tile of rows
    uint32* const& claimed;    // [1] shares that a warp has; 0 before the call

    template <class Bounds>
    __device__ __forceinline__ void run(const Bounds& bounds, int lane) const {
        uint32 passed = 0, share = claim(lane);  // passed: shares of the tiles before
        for (int32 expert = 0; expert < Bounds::kExperts; ++expert) {
            const int32 end = bounds.end(expert);
            for (int32 row = bounds.begin(expert); row < end; row += kTileRows) {
                const Tile tile{expert, row, min(end - row, kTileRows), 0, false, false};
                const uint32 shares = rescaled_shares(tile);
                uint32* count = stored + place_among_tiles(tile);
                if (share - passed < shares) wait_for_tiles(count, lane);
                while (share - passed < shares) {
                    const int32 from = static_cast<int32>(share - passed) * kRescaledRows;
                    share = claim(lane);  // known when these rows are done
                    rows.template rescale<kRescaledRows>(tile.row + from, min(tile.rows - from, kRescaledRows), lane);
                    __syncwarp();
                    if (lane == 0) add_release_gpu(count, 1);
                }
                passed += shares;
            }
        }
    }

    __device__ __forceinline__ uint32 claim(int lane) const {
        uint32 share = 0;
        if (lane == 0) share = add_relaxed_gpu(claimed, 1);
        return __shfl_sync(~0u, share, 0);
    }

    // No deadline: the kernel that stores them runs already, and its own waits have one.
    __device__ __forceinline__ void wait_for_tiles(const uint32* count, int lane) const {
        if (lane == 0)
            while (load_acquire_gpu(count) < stored_by) sleep_ns(100);
        __syncwarp();
    }
};
