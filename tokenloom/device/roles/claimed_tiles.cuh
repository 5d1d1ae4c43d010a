// A tile source as in expert_tiles.cuh, whose pairs of tiles clusters claim one by one: SMs work at different rates,
// and tiles with few rows take less time.
//
// The loading thread of a cluster's first block claims the next pair while it loads a tile, and tells the other roles
// of both blocks on a board in shared memory. A cluster's first pair is its own number.
//
// Only this thread fences. Shared memory has no cache, so whoever has waited for a barrier of its own block reads the new
// values.
#pragma once
#include "device/ptx/bulk.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/memory.cuh"
#include "device/roles/expert_tiles.cuh"

struct TileBoard {
    static constexpr uint32 kSlots = 4;  // a tile is told when the one four before it is done
    int32 expert[kSlots];                // -1: there are no more tiles
    int32 pair[kSlots];                  // of tiles, among those of the expert
    alignas(8) uint64 full[kSlots];
    uint64 empty[kSlots];  // in the first block: all who were told are done with the tile

    // readers: warps of both blocks that are told; the second block's loader is one of them.
    __device__ __forceinline__ void init(uint32 readers) {
        for (uint32 slot = 0; slot < kSlots; ++slot) {
            mbarrier_init(&full[slot], 1);
            mbarrier_init(&empty[slot], readers);
        }
    }
};

// What a role is told. kOneThread: the role is one thread; else all lanes of its warps take part.
template <class Cut, class Bounds, bool kOneThread = false>
struct ToldTiles {
    TileBoard& board;
    const Bounds& bounds;
    uint32 number = 0;  // of this tile

    __device__ __forceinline__ uint32 slot() const { return number % TileBoard::kSlots; }
    __device__ __forceinline__ uint32 parity() const { return number / TileBoard::kSlots & 1; }

    __device__ __forceinline__ bool next(uint32 earlier) {
        if (earlier > 0) release((earlier - 1) % TileBoard::kSlots);
        return read(earlier);
    }

    __device__ __forceinline__ bool read(uint32 number_) {
        number = number_;
        mbarrier_wait(&board.full[slot()], parity());
        return board.expert[slot()] >= 0;
    }

    // As on an empty stage of the ring: what was read is in registers, and a fence would hold math warps up.
    __device__ __forceinline__ void release(uint32 slot_) {
        if (!kOneThread) __syncwarp();
        if (kOneThread || threadIdx.x % 32 == 0)
            mbarrier_arrive_there(map_to_block(shared_address(&board.empty[slot_]), 0));
    }

    __device__ __forceinline__ Tile tile(int32 block) const {
        return tile_of<Cut>(bounds, board.expert[slot()], board.pair[slot()], block);
    }

    __device__ __forceinline__ void forget() { asm volatile("" : "+r"(number)); }
};

// Of the loading thread.
template <class Cut, class Bounds>
struct ClaimingTiles {
    static constexpr int kClaims = 6, kTells = 2;  // so many blocks of K before a tile's end, if it has as many
    ToldTiles<Cut, Bounds, true> told;
    uint32* claimed;  // claims of all clusters; 0 before the launch, and behind it
    int32 block, expert = 0;
    int32 passed = 0;    // pairs of the experts before
    uint32 place_in_claims = 0;  // how many claims came before this cluster's latest one

    __device__ __forceinline__ ClaimingTiles(TileBoard& board, const Bounds& bounds, uint32* claimed_, int32 block_)
        : told{board, bounds}, claimed(claimed_), block(block_) {}

    __device__ __forceinline__ static uint32 clusters() { return gridDim.x / kClusterBlocks; }

    __device__ __forceinline__ bool next(uint32 number) {
        if (block != 0) return told.next(number);
        if (number == 0 && !tell(0, blockIdx.x / kClusterBlocks)) {
            claim();
            end();
        }
        return told.read(number);
    }

    // Before block k of K of this tile.
    __device__ __forceinline__ void before_block(int k, int blocks) {
        if (block != 0) return;
        if (k == max(blocks - kClaims, 0)) claim();
        if (k == max(blocks - kTells, 0) && !tell(told.number + 1, clusters() + place_in_claims)) end();
    }

    __device__ __forceinline__ void claim() { place_in_claims = add_relaxed_gpu(claimed, 1); }

    // Each cluster claims one pair that is not there. The last of these claims is the last of all.
    __device__ __forceinline__ void end() {
        const uint32 pairs = passed, found = pairs > clusters() ? pairs - clusters() : 0;
        if (place_in_claims == found + clusters() - 1) store_relaxed_sys(claimed, 0);
    }

    // Whether there is a pair of this place among all.
    __device__ __forceinline__ bool tell(uint32 number, uint32 place) {
        TileBoard& board = told.board;
        for (; expert < Bounds::kExperts; ++expert) {
            const int32 pairs = pairs_of<Cut>(told.bounds, expert);
            if (place < static_cast<uint32>(passed + pairs)) break;
            passed += pairs;
        }
        const bool found = expert < Bounds::kExperts;
        const uint32 slot = number % TileBoard::kSlots, round = number / TileBoard::kSlots;
        if (round > 0) mbarrier_wait(&board.empty[slot], (round - 1) & 1);
        for (int32 each = 0; each < kClusterBlocks; ++each) {
            store_there(map_to_block(shared_address(&board.expert[slot]), each), found ? expert : -1);
            store_there(map_to_block(shared_address(&board.pair[slot]), each), static_cast<int32>(place) - passed);
        }
        fence_acq_rel_cluster();
        for (int32 each = 0; each < kClusterBlocks; ++each)
            mbarrier_arrive_there(map_to_block(shared_address(&board.full[slot]), each));
        return found;
    }

    __device__ __forceinline__ Tile tile(int32 of_block) const { return told.tile(of_block); }
};
