// Which tiles a cluster of two blocks computes. Items of work are claimed one by one: a block that starts late, because
// another kernel had its SM, takes fewer of them. A cluster leaves after a few, and another one comes: so a kernel of
// higher priority finds SMs soon.
//
// An item is two tiles of 128 rows, one above the other, of the same 256 columns. (With SwiGLU 128 gates and their ups.)
// Order: expert by expert; in bands of a few items' rows, so that clusters that run at once share rows and columns in the
// second-level cache.
#pragma once
#include "device/ptx/cluster.cuh"
#include "device/ptx/memory.cuh"
#include "kernels/gemm16/args.cuh"

struct Tile {
    int32 expert;
    int32 row, rows;  // of the output: the first, counted from the expert's first, and how many; of this block, maybe <= 0
    int32 column;     // the first; with SwiGLU of the gates
    int32 first;      // row of the operands: the expert's first
    int32 depth;      // of the inner dimension
};

template <class Shape>
struct Items {
    static constexpr int kBand = 8;  // pairs of tiles
    static constexpr int kColumns = Shape::swiglu ? Shape::n / 2 : Shape::n;
    static constexpr int kStrip = Shape::swiglu ? kHalfColumns : kTileColumns;
    static constexpr int kStrips = (kColumns + kStrip - 1) / kStrip;
    const int32* offsets;
    int32 expert = 0;
    int32 before = 0;  // items of earlier experts

    __device__ explicit Items(const Gemm16Shared<Shape>& shared) : offsets(shared.offsets) {}

    __device__ int32 expert_rows() const { return offsets[expert + 1] - offsets[expert]; }
    __device__ int32 pairs() const {
        const int32 rows = Shape::of_weights ? Shape::m : expert_rows();
        return (rows + 2 * kTileRows - 1) / (2 * kTileRows);
    }

    // The tile of a block in an item; items come in ascending order. False: there is no such item.
    __device__ bool find(int32 item, int32 block, Tile& tile) {
        while (expert < Shape::num_experts && item - before >= pairs() * kStrips) {
            before += pairs() * kStrips;
            ++expert;
        }
        if (expert == Shape::num_experts) return false;
        const int32 in_expert = item - before, band = in_expert / (kBand * kStrips);
        const int32 in_band = in_expert - band * kBand * kStrips, pairs_of_band = min(kBand, pairs() - band * kBand);
        tile.expert = expert;
        tile.row = ((band * kBand + in_band % pairs_of_band) * 2 + block) * kTileRows;
        tile.rows = min((Shape::of_weights ? Shape::m : expert_rows()) - tile.row, kTileRows);
        tile.column = in_band / pairs_of_band * kStrip;
        tile.first = offsets[expert];
        tile.depth = Shape::of_weights ? expert_rows() : Shape::k;
        return true;
    }
};

constexpr int32 kNoItem = 0x7fffffff;

// One thread of the cluster: claims items and tells both blocks, until it has told them that there are no more.
template <class Shape>
__device__ __forceinline__ void claim_items(const Gemm16Args& args, Gemm16Shared<Shape>& shared) {
    Items<Shape> items(shared);
    Tile tile;
    bool more = true;
    for (uint32 use = 0; more; ++use) {
        const RingUse<kItems> at(use);
        mbarrier_wait_cluster(&shared.item_empty[at.place], at.parity ^ 1);
        const int32 item = use < args.most_items ? add_relaxed_gpu(args.claimed, 1) : kNoItem;
        more = items.find(item, 0, tile);
        for (uint32 block = 0; block < 2; ++block) {
            store_there(map_to_block(shared_address(&shared.item[at.place]), block), item);
            mbarrier_arrive_release_there(map_to_block(shared_address(&shared.item_full[at.place]), block));
        }
    }
}

// What a warp, or the loading thread, learns of the items.
template <class Shape>
struct ClaimedTiles {
    Gemm16Shared<Shape>& shared;
    Items<Shape> items;
    int32 block;
    uint32 use = 0;

    __device__ ClaimedTiles(Gemm16Shared<Shape>& shared_, int32 block_)
        : shared(shared_), items(shared_), block(block_) {}

    // The threads of `mask` call it together; `tells` is true for one of them. The plain arrival orders no memory: the
    // word has been read, and one that waited for this warp's stores would cost a microsecond.
    __device__ bool next(Tile& tile, uint32 mask, bool tells) {
        const RingUse<kItems> at(use++);
        mbarrier_wait_cluster(&shared.item_full[at.place], at.parity);
        const int32 item = *static_cast<volatile int32*>(&shared.item[at.place]);
        __syncwarp(mask);
        if (tells) mbarrier_arrive_there(map_to_block(shared_address(&shared.item_empty[at.place]), 0));
        return items.find(item, block, tile);
    }
};
