// Grouped FP8 GEMM: rows that are grouped by expert times each expert's weights, with block scales.
//
//   out[row, n] = sum over blocks k of a_scale[row, k] * b_scale[e, n / 128, k] * (a[row, k:] . b[e, n, k:])
//
// A block computes tiles of kTileRows x kTileColumns, one after another. Roles:
//   copying warp   streams tiles of a and b, 128 values of K at a time, through a ring of stages
//   scaling warp   the same for the scales of a, which lie row by row and so cannot come by TMA
//   two math warpgroups, 64 rows each: multiply a stage, 128 columns at a time, into a temporary; add it, scaled, to
//                  FP32 registers (the tensor core adds with about 14 bits); then round and store
// Tile order: expert by expert, within one all rows of a strip of columns: blocks that run at once share weights.
#pragma once
#include "device/ptx/memory.cuh"
#include "device/ptx/tensor.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/tile/values.cuh"

struct GroupedGemmArgs {
    TensorMap a;           // [rows, K] E4M3, boxes of 128 values x kTileRows rows, 128-byte swizzle
    TensorMap b;           // [E, N, K] E4M3, boxes of 128 values x 128 rows
    const float* a_scales; // [rows, K / 128]
    const float* b_scales; // [E, N / 128, K / 128]
    const int32* offsets;  // [E + 1] first row of each expert; device memory
    void* out;             // [rows, N] bfloat16
    uint64 spare[4];       // the maps make this a multiple of 64 bytes
};

constexpr int kBlock = 128;  // values of K with one scale, and columns with one weight scale
constexpr int kTileRows = 128, kTileColumns = 256;
constexpr int kMathThreads = 256, kProducerThreads = 128;

template <class Shape>
struct GemmShared {
    static constexpr int kStoreColumns = 64;                      // columns of a warpgroup's rows on their way out
    static constexpr int kStorePitch = kStoreColumns * 2 + 16;    // bytes; odd units of 16, against bank conflicts
    alignas(1024) unsigned char a[Shape::stages][kTileRows * kBlock];
    alignas(1024) unsigned char b[Shape::stages][kTileColumns * kBlock];
    alignas(16) unsigned char out[2][64 * kStorePitch];
    float a_scales[Shape::stages][kTileRows];
    alignas(8) uint64 full[Shape::stages];
    uint64 empty[Shape::stages];
    int32 offsets[Shape::num_experts + 1];
};

struct Tile {
    int32 expert, row, end, column;  // `end`: of the expert's rows
};

// The tiles of one block, in order.
template <class Shape>
struct TileSource {
    static constexpr int kStrips = (Shape::n + kTileColumns - 1) / kTileColumns;
    const int32* offsets;
    int32 tile;        // the next one, among all
    int32 expert = 0;  // of the next one, at most
    int32 before = 0;  // tiles of the experts before it

    __device__ explicit TileSource(const int32* offsets_) : offsets(offsets_), tile(blockIdx.x) {}

    __device__ bool next(Tile& found) {
        for (; expert < Shape::num_experts; ++expert) {
            const int32 row_tiles = (offsets[expert + 1] - offsets[expert] + kTileRows - 1) / kTileRows;
            const int32 tiles = row_tiles * kStrips;
            if (tile < before + tiles) {
                const int32 in_expert = tile - before;
                found = {expert, offsets[expert] + in_expert % row_tiles * kTileRows, offsets[expert + 1],
                         in_expert / row_tiles * kTileColumns};
                tile += gridDim.x;
                return true;
            }
            before += tiles;
        }
        return false;
    }
};

// Stage and parity of the n-th use of a ring.
template <int kStages>
struct RingPosition {
    int stage = 0;
    uint32 parity = 0;
    __device__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

template <class Shape>
__device__ __forceinline__ void copy_tiles(const GroupedGemmArgs& args, GemmShared<Shape>& shared) {
    TileSource<Shape> tiles(shared.offsets);
    RingPosition<Shape::stages> at;
    for (Tile tile; tiles.next(tile);) {
        for (int k = 0; k < Shape::k; k += kBlock) {
            mbarrier_wait(&shared.empty[at.stage], at.parity ^ 1);
            uint64* full = &shared.full[at.stage];
            mbarrier_arrive_expect(full, (kTileRows + kTileColumns) * kBlock);
            tensor_load(shared.a[at.stage], &args.a, k, tile.row, full);
            for (int n = 0; n < kTileColumns; n += 128)
                tensor_load(shared.b[at.stage] + n * kBlock, &args.b, k, tile.column + n, tile.expert, full);
            at.advance();
        }
    }
}

template <class Shape>
__device__ __forceinline__ void copy_scales(const GroupedGemmArgs& args, GemmShared<Shape>& shared, int lane) {
    constexpr int kRowScales = Shape::k / kBlock;
    TileSource<Shape> tiles(shared.offsets);
    RingPosition<Shape::stages> at;
    for (Tile tile; tiles.next(tile);) {
        const float* scales[kTileRows / 32];
#pragma unroll
        for (int i = 0; i < kTileRows / 32; ++i)
            scales[i] = args.a_scales + static_cast<int64>(min(tile.row + i * 32 + lane, tile.end - 1)) * kRowScales;
        for (int k = 0; k < kRowScales; ++k) {
            mbarrier_wait(&shared.empty[at.stage], at.parity ^ 1);
#pragma unroll
            for (int i = 0; i < kTileRows / 32; ++i) copy_4_async(&shared.a_scales[at.stage][i * 32 + lane], scales[i] + k);
            mbarrier_arrive_after_copies(&shared.full[at.stage]);
            at.advance();
        }
    }
}

// 64 rows x 256 columns of a tile: registers 4j + {0, 1} are row lane / 4, columns 8j + 2 * (lane % 4) + {0, 1};
// 4j + {2, 3} the same columns 8 rows below. Two halves of 128 columns.
template <class Shape>
__device__ __forceinline__ void store_tile(const GroupedGemmArgs& args, GemmShared<Shape>& shared, const Tile& tile,
                                           const float (&sums)[2][64], int group, int thread) {
    constexpr int kColumns = GemmShared<Shape>::kStoreColumns, kPitch = GemmShared<Shape>::kStorePitch;
    constexpr int kUnits = kColumns * 2 / 16;  // 16-byte units of a row
    unsigned char* staged = shared.out[group];
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
    auto* out = static_cast<unsigned char*>(args.out);
#pragma unroll
    for (int part = 0; part < kTileColumns / kColumns; ++part) {
        const float* from = sums[part / 2] + part % 2 * 32;
        sync_threads(1 + group, 128);  // the part before has been read
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
            auto* words = reinterpret_cast<uint32*>(staged + row * kPitch + (8 * j + 2 * (lane % 4)) * 2);
            words[0] = pack_pair<kBfloat16>(from[4 * j], from[4 * j + 1]);
            words[8 * kPitch / 4] = pack_pair<kBfloat16>(from[4 * j + 2], from[4 * j + 3]);
        }
        sync_threads(1 + group, 128);
#pragma unroll
        for (int i = thread; i < 64 * kUnits; i += 128) {
            const int32 to_row = tile.row + group * 64 + i / kUnits, column = tile.column + part * kColumns + i % kUnits * 8;
            if (to_row < tile.end && column < Shape::n)
                store_16(out + (static_cast<int64>(to_row) * Shape::n + column) * 2,
                         *reinterpret_cast<const Vec16*>(staged + i / kUnits * kPitch + i % kUnits * 16));
        }
    }
}

template <class Shape>
__device__ __forceinline__ void multiply_tiles(const GroupedGemmArgs& args, GemmShared<Shape>& shared, int group,
                                               int thread) {
    constexpr int kBlocks = Shape::k / kBlock, kColumnBlocks = Shape::n / kBlock;
    TileSource<Shape> tiles(shared.offsets);
    RingPosition<Shape::stages> at;
    const int lane = thread % 32, row = group * 64 + thread / 32 * 16 + lane / 4;
    for (Tile tile; tiles.next(tile);) {
        float sums[2][64];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 64; ++i) sums[half][i] = 0.0f;
        const int column_block = tile.column / kBlock;
        const float* b_scales = args.b_scales +
                                (static_cast<int64>(tile.expert) * kColumnBlocks + column_block) * kBlocks;
        const int second = column_block + 1 < kColumnBlocks ? kBlocks : 0;  // N may be no multiple of the tile
        float next_scale[2] = {b_scales[0], b_scales[second]};
        for (int k = 0; k < kBlocks; ++k) {
            const float b_scale[2] = {next_scale[0], next_scale[1]};
            if (k + 1 < kBlocks) {
                next_scale[0] = b_scales[k + 1];
                next_scale[1] = b_scales[second + k + 1];
            }
            mbarrier_wait(&shared.full[at.stage], at.parity);
            const float low = shared.a_scales[at.stage][row], high = shared.a_scales[at.stage][row + 8];
            const uint64 a = wgmma_descriptor(shared_address(shared.a[at.stage]) + group * 64 * kBlock);
            const uint64 b = wgmma_descriptor(shared_address(shared.b[at.stage]));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float product[64];
                wgmma_fence();
#pragma unroll
                for (int step = 0; step < 4; ++step)
                    wgmma_e4m3(product, a + 2 * step, b + half * (128 * kBlock >> 4) + 2 * step, step);
                wgmma_commit();
                wgmma_wait<0>();
                if (half == 1 && lane == 0) mbarrier_arrive(&shared.empty[at.stage]);
                const float low_scale = low * b_scale[half], high_scale = high * b_scale[half];
#pragma unroll
                for (int j = 0; j < 16; ++j) {
                    sums[half][4 * j] = __fmaf_rn(product[4 * j], low_scale, sums[half][4 * j]);
                    sums[half][4 * j + 1] = __fmaf_rn(product[4 * j + 1], low_scale, sums[half][4 * j + 1]);
                    sums[half][4 * j + 2] = __fmaf_rn(product[4 * j + 2], high_scale, sums[half][4 * j + 2]);
                    sums[half][4 * j + 3] = __fmaf_rn(product[4 * j + 3], high_scale, sums[half][4 * j + 3]);
                }
            }
            at.advance();
        }
        store_tile<Shape>(args, shared, tile, sums, group, thread);
    }
}

template <class Shape>
__device__ void grouped_gemm(const GroupedGemmArgs& args) {
    extern __shared__ __align__(1024) unsigned char memory[];
    static_assert(sizeof(GemmShared<Shape>) <= Shape::shared_bytes, "launch.py asks for what this needs");
    auto& shared = *reinterpret_cast<GemmShared<Shape>*>(memory);
    constexpr int kThreads = kMathThreads + kProducerThreads;
    constexpr int kProducerRegisters = 40, kMathRegisters = 232;
    static_assert(kProducerRegisters + 2 * kMathRegisters <= 504, "what the launch allots to three warpgroups");
    static_assert(Shape::k % kBlock == 0 && Shape::n % kBlock == 0, "whole scale blocks");
    for (int i = threadIdx.x; i <= Shape::num_experts; i += kThreads) shared.offsets[i] = args.offsets[i];
    if (threadIdx.x == 0) {
        for (int i = 0; i < Shape::stages; ++i) {
            mbarrier_init(&shared.full[i], 1 + 32);             // the copying lane, the scaling warp
            mbarrier_init(&shared.empty[i], kMathThreads / 32);  // a lane of each math warp
        }
        mbarrier_init_fence();
        tensor_prefetch(&args.a);
        tensor_prefetch(&args.b);
    }
    __syncthreads();
    const int group = threadIdx.x / 128;
    if (group == 2) {
        keep_registers<kProducerRegisters>();
        const int warp = threadIdx.x % 128 / 32;
        if (warp == 0 && threadIdx.x % 32 == 0) copy_tiles<Shape>(args, shared);
        if (warp == 1) copy_scales<Shape>(args, shared, threadIdx.x % 32);
    } else {
        take_registers<kMathRegisters>();
        multiply_tiles<Shape>(args, shared, group, threadIdx.x % 128);
    }
}
