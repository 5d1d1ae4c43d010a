// Rows that lie in the order of the tiles, where TMA finds them; and a second loading warp, which some of them need.
//
// *Rows* say where the activations of a GEMM are:
//
//   kBlocks             blocks of K
//   kScalesByTma        the loader (load.cuh) brings the scales of rows
//   kSecondWarp         there is a second loading warp, for what the loader does not bring
//   maps, scale_map     how TMA finds values, see below, and with kScalesByTma the tensor map of scales
//   prefetch()          fetches the tensor maps ahead
//   load_beside(...)    the role of the second warp; each lane arrives once on a stage
#pragma once
#include "device/roles/gate.cuh"
#include "device/roles/trace.cuh"
#include "device/roles/weights.cuh"

constexpr int kSecondWarpArrivals = 32;  // on a full stage

// *Maps* say how TMA finds a box of a tile's values, for both blocks of a cluster:
//
//   prefetch()                                fetches tensor maps ahead
//   begin_tile(rows)                          by the loading thread, before it loads a tile of so many rows
//   load(to, x, first, row, rows, barrier)    the box at column `x` and row `row` of a tile, which has `rows` rows of a
//                                             matrix from its row `first` on
//
// Here what lies behind a tile's last row comes too. Nobody stores its products.
struct MatrixRows {
    const TensorMap& map;  // [any, K] E4M3

    __device__ __forceinline__ void prefetch() const { tensor_prefetch(&map); }
    __device__ __forceinline__ void begin_tile(int32) const {}
    __device__ __forceinline__ void load(void* to, int32 x, int32 first, int32 row, int32, uint64* barrier) const {
        tensor_load_to_all(to, &map, x, first + row, barrier, kBothBlocks);
    }
};

// Here a box has zeros behind the tile's last row, which need not be read, and take less power to multiply.
struct WindowRows {
    const TensorMap* const& maps;  // [rows of the largest tile]: row r of window w of map n - 1, [any, n, K], is row w + r of a matrix

    __device__ __forceinline__ void prefetch() const {}
    // The place of a map may have had another one, of a layer that is gone, which SMs still keep.
    __device__ __forceinline__ void begin_tile(int32 rows) const { tensor_map_fence(maps + (rows - 1)); }
    __device__ __forceinline__ void load(void* to, int32 x, int32 first, int32 row, int32 rows, uint64* barrier) const {
        tensor_load_to_all(to, maps + (rows - 1), x, row, first, barrier, kBothBlocks);
    }
};

template <int kK, class Maps = MatrixRows>
struct BlockScaledRows {
    static constexpr int kBlocks = kK / kBlock;
    static constexpr bool kScalesByTma = kWideScales<kBlocks>, kSecondWarp = !kScalesByTma, kScaledInBlocks = true;
    const Maps maps;             // of [rows, K] E4M3
    const TensorMap& scale_map;  // [rows, K / 128]
    const float* const& scales;  // the same, for the second warp

    __device__ __forceinline__ void prefetch() const {
        maps.prefetch();
        if (kScalesByTma) tensor_prefetch(&scale_map);
    }

    // Scales of a K that TMA cannot take, one value of each row at a time.
    template <class Ring, class Weights, class Tiles, class Gate = AlwaysOpen>
    __device__ __forceinline__ void load_beside(Ring& ring, const Weights& weights, Tiles tiles, int32 block, int lane,
                                                const Gate& gate = {}) const {
        constexpr int kLaneRows = kRowsOfA / 32;
        for (Position<kBlocks> at{0}; tiles.next(at.tiles()); at.advance()) {
            const Tile tile = tiles.tile(block);
            gate.wait(tile);
            const float* rows = scales + static_cast<int64>(tile.row) * kBlocks;
            const float* columns = weights.column_scales(tile, lane % kHalves);
            int32 from[kLaneRows];
#pragma unroll
            for (int i = 0; i < kLaneRows; ++i) from[i] = min(i * 32 + lane, tile.rows - 1) * kBlocks;
            for (int k = 0; k < kBlocks; ++k) {
                const RingUse<Ring::kStages> use(at.blocks + k);
                const ScalePlace<kBlocks, Ring::kStages> place(at, k);
                mbarrier_wait(&ring.empty[use.stage], use.parity ^ 1);
#pragma unroll
                for (int i = 0; i < kLaneRows; ++i)
                    copy_4_async(&ring.scales.a[place.buffer][i * 32 + lane][place.slot], rows + from[i] + k);
                if (lane < kHalves) copy_4_async(&ring.scales.b[place.buffer][lane][place.slot], columns + k);
                mbarrier_arrive_after_copies(&ring.full[use.stage]);
            }
        }
    }
};

// The scales of whole rows multiply whole sums; math warps read them.
template <int kK, class Maps = MatrixRows>
struct ScaledRows {
    static constexpr int kBlocks = kK / kBlock;
    static constexpr bool kScalesByTma = false, kSecondWarp = false, kScaledInBlocks = false;
    const Maps maps;  // of [rows, K] E4M3

    __device__ __forceinline__ void prefetch() const { maps.prefetch(); }
};
