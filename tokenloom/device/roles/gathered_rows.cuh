// Rows that lie wherever an index says. A warp copies them and their scales in place of TMA, which has no gather and
// takes 45 cycles for each row that it is asked for by itself. tiled_rows.cuh says what *rows* are.
#pragma once
#include "device/roles/tiled_rows.cuh"

template <int kK>
struct GatheredRows {
    static constexpr int kBlocks = kK / kBlock;
    static constexpr bool kScalesByTma = false, kSecondWarp = true, kWrittenByThreads = true;
    struct Shared {
        int32 gathered[kTileRows];  // which of `values` each row of this tile is
    };
    // Rows of the first tiles may have been copied to a place where TMA finds them in order.
    struct OnTma {
        int32 first = 0, rows = 0;
        __device__ __forceinline__ bool have(const Tile& tile) const { return tile.row + tile.rows <= rows; }
    };
    const WindowRows maps;               // of [any, K] E4M3: copied rows
    const TensorMap& scale_map;          // unused
    const unsigned char* const& values;  // [any, K] E4M3
    const float* const& scales;          // [any, K / 128]
    const int32* const& index;           // [rows]: which of `values` each row is
    const int32* const& copied;          // null, or [2] (first, n): rows 0..n-1 are also the maps', from `first` on

    __device__ __forceinline__ void prefetch() const {}

    __device__ __forceinline__ OnTma on_tma() const {
        OnTma found;
        if (copied == nullptr) return found;
        found.first = copied[0];
        found.rows = copied[1];
        return found;
    }

    // The gathering warp. It never waits for its own copies: a stage's barrier hears of them when they have arrived.
    template <class Ring, class Weights, class Tiles, class Trace>
    __device__ __forceinline__ void load_beside(Ring& ring, Shared& shared, const Weights& weights, Tiles tiles,
                                                const Trace& trace, int32 block, int lane, const AlwaysOpen&) const {
        const OnTma on_tma = this->on_tma();
        for (Position<kBlocks> at{0}; tiles.next(at.tiles()); at.advance()) {
            const Tile tile = tiles.tile(block);
            const int rows = on_tma.have(tile) ? 0 : tile.rows;  // whose values TMA does not find
            __syncwarp();
            for (int row = lane; row < tile.rows; row += 32) shared.gathered[row] = index[tile.row + row];
            __syncwarp();
            if (lane == 0) trace.mark(kGathers, at.tiles(), kBegins);
            for (int k = 0; k < kBlocks; ++k) {
                const RingUse<Ring::kStages> use(at.blocks + k);
                const ScalePlace<kBlocks, Ring::kStages> place(at, k);
                mbarrier_wait(&ring.empty[use.stage], use.parity ^ 1);
                gather_scales(ring, shared, place, k, tile.rows, lane);
                if (!kWideScales<kBlocks> && lane < kHalves)
                    copy_4_async(&ring.b_scales[place.buffer][lane][place.slot], weights.column_scales(tile, lane) + k);
                gather_values(ring, shared, use.stage, k, rows, lane);
                mbarrier_arrive_after_copies(&ring.full[use.stage]);
            }
            if (lane == 0) trace.mark(kGathers, at.tiles(), kEnds);
        }
    }

    // 128 values of K of a tile's rows, 16 bytes a lane, where the swizzle wants them. 8 lanes share a row.
    template <class Ring>
    __device__ __forceinline__ void gather_values(Ring& ring, const Shared& shared, int stage, int k, int rows,
                                                  int lane) const {
        const int unit = lane % 8;
        const unsigned char* from = values + k * kBlock;
#pragma unroll 4
        for (int row = lane / 8; row < rows; row += 4)
            copy_16_async(ring.a[stage] + row * kBlock + (unit ^ row % 8) * 16,
                          from + static_cast<int64>(shared.gathered[row]) * kK + unit * 16);
    }

    // The scales of blocks k..k+7 of all rows; of block k alone where rows of scales are not multiples of 16 bytes.
    template <class Ring, class Place>
    __device__ __forceinline__ void gather_scales(Ring& ring, const Shared& shared, const Place& place, int k, int rows,
                                                  int lane) const {
        if constexpr (kWideScales<kBlocks>) {
            const int first = k + lane % 2 * 4;
            if (k % kScaleBlocks != 0 || first >= kBlocks) return;
            for (int row = lane / 2; row < rows; row += 16)
                copy_16_async(&ring.a_scales[place.buffer][row][lane % 2 * 4],
                              scales + static_cast<int64>(shared.gathered[row]) * kBlocks + first);
        } else {
            for (int row = lane; row < rows; row += 32)
                copy_4_async(&ring.a_scales[place.buffer][row][place.slot],
                             scales + static_cast<int64>(shared.gathered[row]) * kBlocks + k);
        }
    }
};
