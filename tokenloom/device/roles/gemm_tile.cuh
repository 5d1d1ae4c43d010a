// What the roles of a grouped GEMM agree on: the sizes of a tile, what a tile is, and how far a role has come.
//
// A product multiplies operand A, of which each warpgroup has 64 rows, with operand B, which both share. With block scales
// A are activations and B weights. With row scales it is the other way round: B may be narrower, so a tile with few
// activations takes less time.
//
// Blocks work in clusters of two, which take the same rows and neighbouring columns. A role gets its tiles from a *tile
// source*, an object that each thread of the role holds for itself:
//
//   bool next(uint32 number)   goes to the cluster's next tile, before which there were `number`; false after the last
//   Tile tile(int32 block)     the tile of one block of the cluster
//   void forget()              makes the compiler find the tile again, so that it holds no registers in between
//   void before_block(k, blocks)   the loader is at block k of K of a tile
//
// All roles of both blocks must see the same tiles in the same order. `next` may wait, say for rows that a tile needs.
// expert_tiles.cuh and claimed_tiles.cuh have some.
//
// Objects that roles are given (rows, weights, epilogue, destination) refer to the kernel's arguments instead of
// copying them. Arguments are constant memory: a value is read where it is used, and takes no register meanwhile.
#pragma once
#include "device/ptx/types.cuh"

constexpr int kClusterBlocks = 2;
constexpr uint16 kBothBlocks = 3;  // a bit for each
constexpr int kGroups = 2;      // math warpgroups of a block
constexpr int kGroupRows = 64;  // of operand A, which one warpgroup multiplies
constexpr int kRowsOfA = kGroups * kGroupRows;
constexpr int kBlock = 128;  // values of K of a stage, that share a row's scale; columns that share a weight scale
constexpr int kHalves = 2;   // of operand B; with block scales they are multiplied one after the other
constexpr int kRowsOfB = kHalves * kBlock;  // with row scales there may be fewer
constexpr int kLeastStep = 32;  // rows from the beginning of a tile to that of the next
constexpr int kGroupThreads = 128, kGroupWarps = kGroupThreads / 32;
constexpr int kScaleBlocks = 8;  // blocks of K whose scales are loaded together

struct Tile {
    int32 expert, row, rows, column;
    bool halves;  // each warpgroup takes half of the columns instead of half of the rows: the expert has few rows
    bool rereads;  // other tiles of the expert read the same weights later

    // Warpgroups that have rows to multiply.
    __device__ __forceinline__ int groups() const { return (rows + kGroupRows - 1) / kGroupRows; }
};

// How far a role has come, as one count. For kernels whose tiles all have kBlocks blocks of K; a kernel that mixes
// lengths of K brings a type with the same members.
template <int kBlocks>
struct Position {
    static constexpr uint32 kScaleBuffers = (kBlocks + kScaleBlocks - 1) / kScaleBlocks;  // that a tile fills
    uint32 blocks;  // of K, before this tile

    __device__ __forceinline__ uint32 tiles() const { return blocks / kBlocks; }
    __device__ __forceinline__ uint32 scale_buffers() const { return tiles() * kScaleBuffers; }
    __device__ __forceinline__ void advance() { blocks += kBlocks; }
};
