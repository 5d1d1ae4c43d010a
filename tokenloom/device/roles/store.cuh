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
//   bool is_safe()          asked once a tile is there: whether its rows can be stored
//   uint32 place_of(row)    where a row of the output goes
//   unsigned char* row(own, begin, number)    the address of row `begin` + `number`, of 32; `own` is the place of the row
//                           whose number is the lane's. All lanes ask together.
//
// Rows follow each other, or go where the tokens are (arrivals.cuh).
template <int64 kRowBytes>
struct RowsInOrder {
    void* const& out;
    __device__ __forceinline__ bool is_safe() const { return true; }
    __device__ __forceinline__ uint32 place_of(int64) const { return 0; }
    __device__ __forceinline__ unsigned char* row(uint32, int64 begin, int number) const {
        return static_cast<unsigned char*>(out) + (begin + number) * kRowBytes;
    }
};

// What Epilogue staged for the block's tile `number`. Neighbouring lanes write the same row.
template <class Epilogue, class Staging, class Destination>
__device__ __forceinline__ void store_tile(Staging& staging, const Destination& to, const Tile& tile, uint32 number,
                                           int thread) {
    constexpr int kPitch = Staging::Lines::kPitch, kUnits = Staging::kRowBytes / 16;
    constexpr int kRowsAtOnce = 32 * kStoreWarps / kUnits, kBatch = kRowsAtOnce < 16 ? 4 : 2;
    static_assert(32 % (kBatch * kRowsAtOnce) == 0, "32 rows are whole batches");
    static_assert(kRowsAtOnce % Staging::Lines::kRowsAlike == 0, "a lane finds its unit at the same distance in all its rows");
    const int unit = thread % kUnits, lane = thread % 32, staged = Staging::Lines::place(thread / kUnits, unit);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
        const int first = Epilogue::kTransposed || tile.halves ? 0 : group * kGroupRows;
        const int rows = min(tile.rows - first, Staging::kRows);  // may be none
        const int64 begins = tile.row + first;
        mbarrier_wait(&staging.full[group], number & 1);
        const int64 in_row = static_cast<int64>(tile.column / Epilogue::kTileColumns) * Epilogue::kTileRowBytes +
                             (Epilogue::kTransposed ? group * Staging::kRowBytes : 0) + unit * 16;
        const bool ours = !tile.halves || unit / (kUnits / kHalves) == group;
        const bool exists = ours && in_row < Epilogue::kRowBytes;  // a pair of strips may reach past N
        uint32 next = lane < rows ? to.place_of(begins + lane) : 0;
        const int stored = to.is_safe() ? rows : 0;
#pragma unroll 1
        for (int begin = 0; begin < stored; begin += 32) {
            const uint32 own = next;
            if (begin + 32 + lane < rows) next = to.place_of(begins + begin + 32 + lane);  // while these are stored
#pragma unroll
            for (int step = 0; step < 32; step += kBatch * kRowsAtOnce) {
                const int row = step + thread / kUnits;
                const unsigned char* from = staging.rows[group] + (begin + step) * kPitch + staged;
                Vec16 values[kBatch];
#pragma unroll
                for (int i = 0; i < kBatch; ++i)
                    values[i] = *reinterpret_cast<const Vec16*>(from + i * kRowsAtOnce * kPitch);
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    unsigned char* place = to.row(own, begins + begin, row + i * kRowsAtOnce);
                    if (exists && begin + row + i * kRowsAtOnce < stored) store_16(place + in_row, values[i]);
                }
            }
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&staging.empty[group]);
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
