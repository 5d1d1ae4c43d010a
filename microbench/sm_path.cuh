// What one SM moves of its own GPU's memory, by technique: rows at random places, far more of them than caches hold.
#pragma once
#include "device/ptx/bulk.cuh"
#include "device/tile/values.cuh"

struct SmPathArgs {
    const unsigned char* from;  // [places] rows of Shape::row_bytes
    unsigned char* to;          // [places] rows
    uint32* never;              // where a sum of loads would go, so that none is left out
    int32 rows;                 // to move; of sums: to make
    int32 places;
};

enum Mode : int { kLoad = 0, kStore = 1, kCopy = 2, kBulkLoad = 3, kBulkCopy = 4, kSum = 5, kBulkSum = 6 };

__device__ __forceinline__ int64 place_of(uint32 x, int32 places) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return (x ^ x >> 16) % static_cast<uint32>(places);
}

// Rows that a warp takes: each is cut into pieces of 32 * Shape::steps units of 16 bytes.
template <class Shape>
struct Pieces {
    static constexpr int kBytes = Shape::steps * 512, kCount = Shape::row_bytes / kBytes;
    static_assert(kCount * kBytes == Shape::row_bytes, "whole pieces");
    const SmPathArgs& args;
    int first, stride;

    __device__ explicit Pieces(const SmPathArgs& args_)
        : args(args_),
          first(threadIdx.x / 32 * gridDim.x + blockIdx.x),
          stride(Shape::threads / 32 * gridDim.x) {}
    __device__ const unsigned char* source(int row, int term, int piece) const {
        return args.from + place_of(row * 8 + term, args.places) * Shape::row_bytes + piece * kBytes;
    }
    __device__ unsigned char* target(int row, int number, int piece) const {
        return args.to + place_of(row * 8 + number + 77, args.places) * Shape::row_bytes + piece * kBytes;
    }
};

// Loads into registers, stores from them: Shape::terms sources (0: none) and Shape::targets targets of each row.
template <class Shape>
__device__ void move_by_registers(const SmPathArgs& args, int lane) {
    const Pieces<Shape> pieces(args);
    uint32 found = 0;
    for (int row = pieces.first; row < args.rows; row += pieces.stride)
        for (int piece = 0; piece < pieces.kCount; ++piece) {
            Vec16 units[Shape::steps];
#pragma unroll
            for (int i = 0; i < Shape::steps; ++i)
                if (Shape::mode != kStore) units[i] = load_16_once(pieces.source(row, 0, piece) + (i * 32 + lane) * 16);
                else units[i] = Vec16{{1u, 2u, 3u, static_cast<uint32>(lane)}};
            if (Shape::mode == kLoad) {
#pragma unroll
                for (int i = 0; i < Shape::steps; ++i)
                    found ^= units[i].word[0] ^ units[i].word[1] ^ units[i].word[2] ^ units[i].word[3];
            }
            for (int target = 0; target < Shape::targets; ++target)
#pragma unroll
                for (int i = 0; i < Shape::steps; ++i)
                    store_16(pieces.target(row, target, piece) + (i * 32 + lane) * 16, units[i]);
        }
    if (found == 0x12345) *args.never = found;
}

// One thread of each warp moves rows through a ring by bulk copies.
template <class Shape>
__device__ void move_in_bulk(const SmPathArgs& args, unsigned char* ring, uint64* loaded) {
    const Pieces<Shape> pieces(args);
    constexpr int kStoring = Shape::targets == 0 ? 0 : Shape::stages / 2, kAhead = Shape::stages - kStoring;
    const int num_rows = pieces.first < args.rows ? (args.rows - pieces.first + pieces.stride - 1) / pieces.stride : 0;
    const int total = num_rows * pieces.kCount;
    const auto load = [&](int i) {
        if (i >= total) return;
        mbarrier_arrive_expect(&loaded[i % Shape::stages], pieces.kBytes);
        bulk_load(ring + i % Shape::stages * pieces.kBytes,
                  pieces.source(pieces.first + i / pieces.kCount * pieces.stride, 0, i % pieces.kCount), pieces.kBytes,
                  &loaded[i % Shape::stages]);
    };
    for (int i = 0; i < kAhead; ++i) load(i);
    for (int i = 0; i < total; ++i) {
        mbarrier_wait(&loaded[i % Shape::stages], i / Shape::stages & 1);
        for (int target = 0; target < Shape::targets; ++target)
            bulk_store(pieces.target(pieces.first + i / pieces.kCount * pieces.stride, target, i % pieces.kCount),
                       ring + i % Shape::stages * pieces.kBytes, pieces.kBytes);
        if (Shape::targets > 0) {
            bulk_commit();
            bulk_wait_read<kStoring>();
        }
        load(i + kAhead);
    }
    bulk_wait_written<0>();
}

// Sums of Shape::terms weighted rows of bfloat16 through a ring, by bulk copies of a leader or by copies of each lane.
template <class Shape>
__device__ void sum(const SmPathArgs& args, unsigned char* ring, uint64* loaded, int lane) {
    constexpr bool kBulk = Shape::mode == kBulkSum;
    constexpr int kAhead = kBulk ? Shape::stages : Shape::stages - 1;
    const Pieces<Shape> pieces(args);
    int next_row = pieces.first, next_piece = 0, next_term = 0, loads = 0, used = 0;
    const auto load = [&]() {
        if (next_row < args.rows) {
            unsigned char* stage = ring + loads % Shape::stages * pieces.kBytes;
            const unsigned char* from = pieces.source(next_row, next_term, next_piece);
            if (!kBulk) {
#pragma unroll
                for (int i = 0; i < Shape::steps; ++i)
                    copy_16_async(stage + (i * 32 + lane) * 16, from + (i * 32 + lane) * 16);
            } else if (lane == 0) {
                mbarrier_arrive_expect(&loaded[loads % Shape::stages], pieces.kBytes);
                bulk_load(stage, from, pieces.kBytes, &loaded[loads % Shape::stages]);
            }
            if (++next_term == Shape::terms) {
                next_term = 0;
                if (++next_piece == pieces.kCount) {
                    next_piece = 0;
                    next_row += pieces.stride;
                }
            }
        }
        ++loads;
        if (!kBulk) copies_commit();
    };
    for (int i = 0; i < kAhead; ++i) load();
    for (int row = pieces.first; row < args.rows; row += pieces.stride)
        for (int piece = 0; piece < pieces.kCount; ++piece) {
            Group<8> total[Shape::steps];
#pragma unroll
            for (int i = 0; i < Shape::steps; ++i) total[i] = filled_group<8>(-0.0f);
#pragma unroll 1
            for (int term = 0; term < Shape::terms; ++term, ++used) {
                if (kBulk) mbarrier_wait(&loaded[used % Shape::stages], used / Shape::stages & 1);
                else copies_wait<kAhead - 1>();
                const unsigned char* stage = ring + used % Shape::stages * pieces.kBytes;
#pragma unroll
                for (int i = 0; i < Shape::steps; ++i) {
                    PackedGroup<kBfloat16, 8> packed{{load_shared_16(stage + (i * 32 + lane) * 16)}};
                    auto group = unpack(packed);
                    scale_group(group, 1.0f + term);
                    add_group(total[i], group);
                }
                if (kBulk) __syncwarp();
                load();
            }
#pragma unroll
            for (int i = 0; i < Shape::steps; ++i)
                store_group<kBfloat16>(pieces.target(row, 0, piece) + (i * 32 + lane) * 16, total[i]);
        }
}

template <class Shape>
__device__ void sm_path(const SmPathArgs& args) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ uint64 all_loaded[Shape::threads / 32 * Shape::stages];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned char* ring = memory + warp * Shape::stages * Shape::steps * 512;
    uint64* loaded = all_loaded + warp * Shape::stages;
    if (lane < Shape::stages) mbarrier_init(&loaded[lane], 1);
    mbarrier_init_fence();
    __syncthreads();
    if constexpr (Shape::mode == kBulkLoad || Shape::mode == kBulkCopy) {
        if (lane == 0) move_in_bulk<Shape>(args, ring, loaded);
    } else if constexpr (Shape::mode == kSum || Shape::mode == kBulkSum) {
        sum<Shape>(args, ring, loaded, lane);
    } else {
        move_by_registers<Shape>(args, lane);
    }
}
