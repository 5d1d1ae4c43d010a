// The loading thread: values and scales of rows and weights by TMA, 128 values of K at a time, through the ring.
#pragma once
#include "device/ptx/cluster.cuh"
#include "device/roles/gate.cuh"
#include "device/roles/tiled_rows.cuh"

constexpr int kLoaderArrivals = 1;  // on a full stage; TMA adds the bytes that the arrival expects

// Boxes of a tile's activations: those of whole warpgroups, where activations are operand A.
template <class Weights>
__device__ __forceinline__ int row_boxes(const Tile& tile) {
    constexpr int kTogether = Weights::kOperandA ? kRowBox : kGroupRows;
    return (tile.rows + kTogether - 1) / kTogether * (kTogether / kRowBox);
}

// Waits until the stage of block k is empty, announces all bytes that it will hold, and loads its weights and their scales.
template <class Rows, class Ring, class Weights, class At>
__device__ __forceinline__ void load_weights(Ring& ring, const RingUse<Ring::kStages>& use, const Weights& weights,
                                             const Tile& tile, int boxes, const At& at, int k) {
    constexpr int kBlocks = Weights::kBlocks;
    mbarrier_wait(&ring.empty[use.stage], use.parity ^ 1);
    uint64* full = &ring.full[use.stage];
    const int bytes = boxes * kRowBoxBytes + Weights::kLoadedBytes;
    if constexpr (Weights::kScaledInBlocks) {
        constexpr int kRowScaleBytes = sizeof(ring.scales.a[0]);
        // The scales of 8 blocks of K come with the first of them.
        const bool with_scales = kWideScales<kBlocks> && k % kScaleBlocks == 0;
        const int column_scale_bytes = with_scales ? min(kScaleBlocks, kBlocks - k) * 4 : 0;
        const int row_scale_bytes = with_scales && Rows::kScalesByTma ? kRowScaleBytes : 0;
        mbarrier_arrive_expect(full, bytes + row_scale_bytes + kHalves * column_scale_bytes);
        if (with_scales) {
            const uint32 buffer = ScalePlace<kBlocks, Ring::kStages>(at, k).buffer;
            for (int half = 0; half < kHalves; ++half)
                bulk_load(ring.scales.b[buffer][half], weights.column_scales(tile, half) + k, column_scale_bytes, full);
        }
    } else mbarrier_arrive_expect(full, bytes);
    weights.load(ring, use.stage, tile, k, full);
}

// Behind load_weights: the rows of the same stage. Both blocks of the cluster need the same ones, so each loads every
// other box, for both: a stage is empty when the math warps of both blocks have read it.
template <class Weights, class Ring, class Rows, class At>
__device__ __forceinline__ void load_rows(Ring& ring, const RingUse<Ring::kStages>& use, const Rows& rows,
                                          const Tile& tile, int boxes, const At& at, int32 block, int k) {
    uint64* full = &ring.full[use.stage];
    if constexpr (Rows::kScalesByTma)
        if (k % kScaleBlocks == 0)
            tensor_load(ring.scales.a[ScalePlace<Rows::kBlocks, Ring::kStages>(at, k).buffer], &rows.scale_map, k,
                        tile.row, full);
    unsigned char* to = Weights::kOperandA ? ring.b[use.stage] : ring.a[use.stage];
    const int ours = (boxes + kClusterBlocks - 1 - block) / kClusterBlocks;
    for (int i = 0; i < ours; ++i) {  // counted from 0, so that TMA's coordinates stay in uniform registers
        const int box = i * kClusterBlocks + block;
        rows.maps.load(to + box * kRowBoxBytes, k * kBlock, tile.row, box * kRowBox, tile.rows, full);
    }
}

// One tile. Weights of as many stages as there are do not wait for its rows. Those of the last block of K do: with this
// thread's arrival there, math warps too come behind the gate, for what they read of the rows by themselves.
template <class Ring, class Rows, class Weights, class Tiles, class At, class Gate = AlwaysOpen>
__device__ __forceinline__ void load_tile(Ring& ring, const Rows& rows, const Weights& weights, Tiles& tiles,
                                          const At& at, int32 block, const Gate& gate = {}) {
    using Use = RingUse<Ring::kStages>;
    static_assert(Rows::kBlocks == Weights::kBlocks, "rows and weights have the same K");
    static_assert(Rows::kScaledInBlocks == Weights::kScaledInBlocks, "rows and weights are of one recipe");
    const Tile tile = tiles.tile(block);
    const int boxes = row_boxes<Weights>(tile);
    const int ahead = gate.is_open(tile) ? 0 : min(Ring::kStages, Weights::kBlocks - 1);
    for (int k = 0; k < ahead; ++k) load_weights<Rows>(ring, Use(at.blocks + k), weights, tile, boxes, at, k);
    gate.wait(tile);
    rows.maps.begin_tile(tile.rows);
    for (int k = 0; k < ahead; ++k) {
        tiles.before_block(k, Weights::kBlocks);
        load_rows<Weights>(ring, Use(at.blocks + k), rows, tile, boxes, at, block, k);
    }
    for (int k = ahead; k < Weights::kBlocks; ++k) {
        tiles.before_block(k, Weights::kBlocks);
        const Use use(at.blocks + k);
        load_weights<Rows>(ring, use, weights, tile, boxes, at, k);
        load_rows<Weights>(ring, use, rows, tile, boxes, at, block, k);
    }
}

template <class Ring, class Rows, class Weights, class Tiles, class Trace, class Gate = AlwaysOpen>
__device__ __forceinline__ void load_tiles(Ring& ring, const Rows& rows, const Weights& weights, Tiles tiles,
                                           const Trace& trace, int32 block, const Gate& gate = {}) {
    for (Position<Weights::kBlocks> at{0}; tiles.next(at.tiles()); at.advance()) {
        trace.mark(kLoads, at.tiles(), kBegins);
        load_tile(ring, rows, weights, tiles, at, block, gate);
        trace.mark(kLoads, at.tiles(), kEnds);
    }
}
