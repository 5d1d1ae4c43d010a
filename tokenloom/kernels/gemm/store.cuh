// The way out. Math warpgroups leave their rows and columns of a tile in shared memory and go on; the storing warps write
// them where they belong.
#pragma once
#include "device/tile/values.cuh"
#include "kernels/gemm/tiles.cuh"

// Waits until what this warpgroup left before, for its `use`-th tile, has been read.
template <class Shape>
__device__ __forceinline__ void wait_for_room(GemmShared<Shape>& shared, uint32 use, int group) {
    mbarrier_wait(&shared.out_empty[group], use & 1 ^ 1);
}

template <class Shape>
__device__ __forceinline__ void tell_storing_warps(GemmShared<Shape>& shared, int group, int lane) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.out_full[group]);
}

// Of a row of a tile, where a warpgroup's columns begin.
template <class Shape, int kChunks>
__device__ __forceinline__ int first_byte(int group) {
    return kChunks == kHalves ? 0 : group * (GemmShared<Shape>::kOutBytes / kHalves);
}

// An output of bfloat16 rows: `sums` as wgmma leaves them, of all columns or of half `group`.
template <class Shape, int kChunks>
__device__ __forceinline__ void leave_rows(GemmShared<Shape>& shared, const float (&sums)[kChunks][64], uint32 use,
                                           int group, int thread) {
    const int lane = thread % 32;
    unsigned char* to = shared.out[group] + (thread / 32 * 16 + lane % 16) * GemmShared<Shape>::kPitch + lane / 16 * 16 +
                        first_byte<Shape, kChunks>(group);
    wait_for_room(shared, use, group);
#pragma unroll
    for (int i = 0; i < kChunks * 8; ++i) {  // 16 columns at a time
        const float* from = sums[i / 8] + i % 8 * 8;
        store_matrices(to + i * 32, pack_pair<kBfloat16>(from[0], from[1]), pack_pair<kBfloat16>(from[2], from[3]),
                       pack_pair<kBfloat16>(from[4], from[5]), pack_pair<kBfloat16>(from[6], from[7]));
    }
    tell_storing_warps(shared, group, lane);
}

template <class Shape>
__device__ __forceinline__ unsigned char* output_row(const GroupedGemmArgs& args, int64 row) {
    constexpr int64 kRowBytes = static_cast<int64>(Shape::n) * GemmShared<Shape>::kOutBytes / kTileColumns;
    if constexpr (Shape::scatters != 0) return reinterpret_cast<unsigned char*>(args.row_targets[row]);
    return static_cast<unsigned char*>(args.out) + row * kRowBytes;
}

// The storing warps; neighbouring lanes write the same row.
template <class Shape>
__device__ __forceinline__ void store_tiles(const GroupedGemmArgs& args, GemmShared<Shape>& shared, int32 block,
                                            int thread) {
    constexpr int kOutBytes = GemmShared<Shape>::kOutBytes;
    constexpr int64 kRowBytes = static_cast<int64>(Shape::n) * kOutBytes / kTileColumns;
    constexpr int kUnits = kOutBytes / 16, kRowsAtOnce = 32 * kStoreWarps / kUnits, kBatch = 4;
    const int unit = thread % kUnits;
    TileSource<Shape> tiles(shared);
    for (uint32 use = 0; tiles.next(); ++use) {
        const Tile tile = tiles.tile(block);
        if (thread == 0) trace<Shape>(args, kStores, use, 0);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            const int first = tile.halves ? 0 : group * kGroupRows;
            const int rows = min(tile.rows - first, kGroupRows);  // may be none
            mbarrier_wait(&shared.out_full[group], use & 1);
            const unsigned char* from = shared.out[group] + unit * 16;
            const int64 in_row = static_cast<int64>(tile.column / kTileColumns) * kOutBytes + unit * 16;
            const int64 first_row = tile.row + first;
            const bool ours = !tile.halves || unit / (kUnits / kHalves) == group;
            const int stored = ours && in_row < kRowBytes ? rows : 0;  // a pair of strips may reach beyond N
            for (int row = thread / kUnits; row < stored; row += kBatch * kRowsAtOnce) {
                Vec16 values[kBatch];
#pragma unroll
                for (int i = 0; i < kBatch; ++i)
                    values[i] = *reinterpret_cast<const Vec16*>(
                        from + min(row + i * kRowsAtOnce, kGroupRows - 1) * GemmShared<Shape>::kPitch);
#pragma unroll
                for (int i = 0; i < kBatch; ++i)
                    if (row + i * kRowsAtOnce < stored)
                        store_16(output_row<Shape>(args, first_row + row + i * kRowsAtOnce) + in_row, values[i]);
            }
            __syncwarp();
            if (thread % 32 == 0) mbarrier_arrive(&shared.out_empty[group]);
        }
        if (thread == 0) trace<Shape>(args, kStores, use, 1);
    }
}
