// The loading thread: values and scales of rows and weights by TMA, 128 values of K at a time, through the ring.
#pragma once
#include "device/ptx/cluster.cuh"
#include "device/roles/tiled_rows.cuh"

constexpr int kLoaderArrivals = 1;  // on a full stage; TMA adds the bytes that the arrival expects

// One tile. Both blocks of the cluster need the same rows, so each loads half of them for both: a stage is empty when
// the math warps of both blocks have read it.
template <class Ring, class Rows, class OnTma, class Weights, class At>
__device__ __forceinline__ void load_tile(Ring& ring, const Rows& rows, const OnTma& on_tma, const Weights& weights,
                                          const Tile& tile, const At& at, int32 block) {
    constexpr uint16 kBoth = 3;
    constexpr int kBlocks = Weights::kBlocks, kRowScaleBytes = sizeof(ring.a_scales[0]);
    static_assert(Rows::kBlocks == kBlocks, "rows and weights have the same K");
    const int groups = on_tma.have(tile) ? tile.groups() : 0;
    for (int k = 0; k < kBlocks; ++k) {
        const RingUse<Ring::kStages> use(at.blocks + k);
        mbarrier_wait(&ring.empty[use.stage], use.parity ^ 1);
        uint64* full = &ring.full[use.stage];
        // The scales of 8 blocks of K come with the first of them.
        const bool with_scales = kWideScales<kBlocks> && k % kScaleBlocks == 0;
        const int column_scale_bytes = with_scales ? min(kScaleBlocks, kBlocks - k) * 4 : 0;
        const int row_scale_bytes = with_scales && Rows::kScalesByTma ? kRowScaleBytes : 0;
        mbarrier_arrive_expect(full, groups * kGroupRows * RowOperand::kRowBytes + WeightOperand::kStageBytes +
                                         row_scale_bytes + kHalves * column_scale_bytes);
        if (with_scales) {
            const uint32 buffer = ScalePlace<kBlocks, Ring::kStages>(at, k).buffer;
            if constexpr (Rows::kScalesByTma) tensor_load(ring.a_scales[buffer], &rows.scale_map, k, tile.row, full);
            for (int half = 0; half < kHalves; ++half)
                bulk_load(ring.b_scales[buffer][half], weights.column_scales(tile, half) + k, column_scale_bytes, full);
        }
        for (int half = 0; half < kHalves; ++half)
            tensor_load(ring.b[use.stage] + half * kBlock * WeightOperand::kRowBytes, &weights.map, k * kBlock,
                        tile.column + half * kBlock, tile.expert, full);
        for (int group = 0; group < groups; ++group) {
            const int row = group * kGroupRows + block * RowOperand::kBoxRows;
            tensor_load_to_all(ring.a[use.stage] + row * RowOperand::kRowBytes, &rows.map, k * kBlock,
                               on_tma.first + tile.row + row, full, kBoth);
        }
    }
}

template <class Ring, class Rows, class Weights, class Tiles, class Trace>
__device__ __forceinline__ void load_tiles(Ring& ring, const Rows& rows, const Weights& weights, Tiles tiles,
                                           const Trace& trace, int32 block) {
    const auto on_tma = rows.on_tma();
    for (Position<Weights::kBlocks> at{0}; tiles.next(); at.advance()) {
        const Tile tile = tiles.tile(block);
        trace.mark(kLoads, at.tiles(), kBegins);
        load_tile(ring, rows, on_tma, weights, tile, at, block);
        trace.mark(kLoads, at.tiles(), kEnds);
    }
}
