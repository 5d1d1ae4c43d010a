// The storing warps: rows of a tile go from shared memory to where a destination says.
#pragma once
#include "device/ptx/memory.cuh"
#include "device/roles/gate.cuh"
#include "device/roles/staging.cuh"
#include "device/roles/trace.cuh"

constexpr int kStoreWarps = 2;
constexpr int kStoreArrivals = kStoreWarps;  // on an empty buffer of the staging: each warp

// A *destination* says where rows of the output go:
//
//   bool is_safe()                             asked once a tile is there: whether its rows can be stored
//   rows<kStep>(begin, first, count, lane)     for rows begin.. of the output, `count` of them, of which the warp stores
//                                              first, first + kStep, ...: an object that knows where they go
//   unsigned char* row<kStep>(number)          of that object: the address of one of these; all lanes ask for the same
//
// Rows follow each other, or go where the tokens are (arrivals.cuh).
template <int64 kRowBytes>
struct RowsInOrder {
    void* const& out;
    __device__ __forceinline__ bool is_safe() const { return true; }

    struct Rows {
        unsigned char* begin;

        template <int>
        __device__ __forceinline__ unsigned char* row(int number) const {
            return begin + number * kRowBytes;
        }
    };

    template <int>
    __device__ __forceinline__ Rows rows(int64 begin, int, int, int) const {
        return {static_cast<unsigned char*>(out) + begin * kRowBytes};
    }
};

// What Epilogue staged for the block's tile `number`. Neighbouring lanes write the same row.
template <class Epilogue, class Staging, class Destination>
__device__ __forceinline__ void store_tile(Staging& staging, const Destination& to, const Tile& tile, uint32 number,
                                           int thread) {
    constexpr int kPitch = kStagingPitch<Epilogue::kTileRowBytes>, kUnits = Epilogue::kTileRowBytes / 16;
    constexpr int kRowsAtOnce = 32 * kStoreWarps / kUnits, kBatch = 4;
    const int unit = thread % kUnits;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
        const int first = tile.halves ? 0 : group * kGroupRows;
        const int rows = min(tile.rows - first, kGroupRows);  // may be none
        mbarrier_wait(&staging.full[group], number & 1);
        const unsigned char* from = staging.rows[group] + unit * 16;
        const int64 in_row = static_cast<int64>(tile.column / kTileColumns) * Epilogue::kTileRowBytes + unit * 16;
        const bool ours = !tile.halves || unit / (kUnits / kHalves) == group;
        const bool exists = ours && in_row < Epilogue::kRowBytes;  // a pair of strips may reach past N
        const auto places = to.template rows<kRowsAtOnce>(tile.row + first, thread / kUnits, rows, thread % 32);
        const int stored = to.is_safe() ? rows : 0;
        for (int row = thread / kUnits; row < stored; row += kBatch * kRowsAtOnce) {
            Vec16 values[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
                values[i] = *reinterpret_cast<const Vec16*>(
                    from + min(row + i * kRowsAtOnce, kGroupRows - 1) * kPitch);
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
                if (row + i * kRowsAtOnce < stored) {
                    unsigned char* place = places.template row<kRowsAtOnce>(row + i * kRowsAtOnce);
                    if (exists) store_16(place + in_row, values[i]);
                }
        }
        __syncwarp();
        if (thread % 32 == 0) mbarrier_arrive(&staging.empty[group]);
    }
}

template <class Epilogue, class Staging, class Destination, class Tiles, class Trace, class Report = NoReport>
__device__ __forceinline__ void store_tiles(Staging& staging, const Destination& to, Tiles tiles, const Trace& trace,
                                            int32 block, int thread, const Report& report = {}) {
    for (uint32 number = 0; tiles.next(number); ++number) {
        if (thread == 0) trace.mark(kStores, number, kBegins);
        const Tile tile = tiles.tile(block);
        store_tile<Epilogue>(staging, to, tile, number, thread);
        report.stored(tile);
        if (thread == 0) trace.mark(kStores, number, kEnds);
    }
}
