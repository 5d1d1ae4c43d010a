// Rows of a staged dispatch on one node, which say by themselves that they are here (device/sync/arrival.cuh): how some
// blocks send them, and how others spread them.
#pragma once
#include "kernels/dispatch/send.cuh"
#include "kernels/dispatch/spread.cuh"

// The first so many blocks send, and the others spread. If all send, they spread behind it; so do those of halves, in two
// kernels.
template <class Shape>
struct StagedRoles {
    static constexpr int kWarps = Shape::threads / 32;

    static __device__ __forceinline__ int32 send_blocks(const DispatchArgs& args) {
        return Shape::part == kWhole ? args.peer_blocks : gridDim.x;
    }

    static __device__ __forceinline__ int32 first_spread_block(const DispatchArgs& args) {
        const bool both = Shape::part != kWhole || args.peer_blocks == gridDim.x;
        return both ? 0 : args.peer_blocks;
    }

    // Into how many parts warps cut each of the rows of a block, if they are few.
    template <class Row>
    static __device__ __forceinline__ int32 parts(int32 rows) {
        return max(min(kWarps / max(rows, 1), Row::kCount), 1);
    }
};

// All warps of a block that sends: the tokens of its chunk, to all ranks that hold their experts. Where tokens are few,
// warps share one: each sends some of its columns, and the first all that comes with it. One warp quantises a whole row.
template <class Shape>
__device__ void send_arriving_rows(const DispatchArgs& args, const DispatchShared<Shape>& shared, const int32* places,
                                   Chunk chunk, Turn turn, int warp, int lane) {
    using Row = Tiles<Shape::row_bytes / 16, kSpreadSteps>;
    using Roles = StagedRoles<Shape>;
    constexpr bool kAsTheyAre = Shape::quantize == kAsIs;
    constexpr int64 kRowBytes = kAsTheyAre ? Shape::row_bytes : Shape::hidden * kValueBytes<Shape::x_dtype>;
    const int32 tokens = chunk.end - chunk.begin;
    const int32 parts = kAsTheyAre ? Roles::template parts<Row>(tokens) : 1;
    ToRanks<Shape> way{args, shared, places, turn};
    for (int32 item = warp; item < tokens * parts; item += Roles::kWarps) {
        const int32 token = chunk.begin + item / parts, part = item % parts;
        const auto* from = static_cast<const unsigned char*>(args.x) + token * kRowBytes;
        way.load(token, lane);
        if (part == 0) way.send_rest(token, lane);
        else way.find_routes(lane);
        const int64 target = way.is_target() ? way.row() : 0;
        if constexpr (kAsTheyAre)
            copy_row<Shape::row_bytes, kSpreadSteps, ArrivingStores>(
                from, target, __ballot_sync(~0u, way.is_target()), lane, part * Row::kCount / parts,
                (part + 1) * Row::kCount / parts);
        else quantize_token<Shape>(way, from, target, lane);
    }
}

// Where a block of those that spread finds its rows, and what its warps wait for.
template <class Shape>
struct ArrivingRows {
    using Row = Tiles<Shape::row_bytes / 16, kSpreadSteps>;
    using Roles = StagedRoles<Shape>;

    const DispatchArgs& args;
    uint64 staging;
    uint32 epoch;
    ReceivedRows<Shape> rows;
    int32 block, blocks, own;  // this block has every so many of all rows, so many in all

    __device__ ArrivingRows(const DispatchArgs& args_, const RouteShared<Shape>& route, uint64 staging_, uint32 epoch_)
        : args(args_), staging(staging_), epoch(epoch_), rows(route),
          block(blockIdx.x - Roles::first_spread_block(args)), blocks(gridDim.x - Roles::first_spread_block(args)),
          own(block < 0 ? 0 : max((rows.total - block + blocks - 1) / blocks, 0)) {}

    // Words of 32 bits that came with a row, so many each.
    __device__ __forceinline__ uint32* words(uint64 offset, int64 from, int32 each) const {
        return reinterpret_cast<uint32*>(staging + offset) + from * each;
    }

    template <int kWords>
    __device__ __forceinline__ bool wait(const uint32* const (&from)[kWords], uint32 (&found)[kWords]) const {
        return wait_for_words(from, found, epoch, deadline_of(args.call), rows.source, kPhaseRows);
    }

    // Tiles of a row that has arrived at `from`, to the targets of all lanes in the mask. They are read in any case: what
    // is not would count as another row's later. False in all lanes: a wait has expired.
    __device__ __forceinline__ bool copy(unsigned char* from, uint64 target, uint32 targets, int lane, int begin,
                                         int end) const {
#pragma unroll 1
        for (int tile = begin; tile < end; ++tile) {
            Vec16 units[Row::kSteps];
            int index;
            unsigned char* missing;
            do {
                missing = nullptr;
#pragma unroll
                for (int step = 0; step < Row::kSteps; ++step)
                    if (Row::unit(tile, step, lane, index)) units[step] = load_16_relaxed_sys(from + index * 16);
#pragma unroll
                for (int step = 0; step < Row::kSteps; ++step)
                    if (Row::unit(tile, step, lane, index) && !has_arrived(units[step])) missing = from + index * 16;
                const bool here = missing == nullptr ||
                                  wait_for_16(missing, epoch, deadline_of(args.call), rows.source, kPhaseRows);
                if (!__all_sync(~0u, here)) return false;
            } while (__any_sync(~0u, missing != nullptr));
#pragma unroll
            for (int step = 0; step < Row::kSteps; ++step)
                if (Row::unit(tile, step, lane, index)) set_back_16(from + index * 16);
            for (uint32 rest = targets; rest != 0; rest &= rest - 1) {
                auto* to = reinterpret_cast<unsigned char*>(of_lane(target, rest));
#pragma unroll
                for (int step = 0; step < Row::kSteps; ++step)
                    if (Row::unit(tile, step, lane, index)) store_16(to + index * 16, units[step]);
            }
        }
        return true;
    }

    // A row's scales, each lane's part of them. False as above.
    __device__ __forceinline__ bool take_scales(int64 from, RowScales<Shape>& scales, int lane) const {
        constexpr int kOfLane = RowScales<Shape>::kOfLane;
        const uint32* at[kOfLane];
        uint32 found[kOfLane];
        uint32* first = words(args.row_scales, from, Shape::scales_per_row);
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) at[i] = lane + 32 * i < Shape::scales_per_row ? first + lane + 32 * i : nullptr;
        const bool here = wait(at, found);
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
            scales.values[i] = __uint_as_float(found[i]);
            if (at[i] != nullptr) first[lane + 32 * i] = kAbsent;
        }
        return __all_sync(~0u, here);
    }
};

// All warps of a block that spreads: each of its rows to the places of its routes here, with all that came with it. Where
// rows are few, warps share one: each copies some of its columns, and the first all that came with it. False, in any
// thread: a wait has expired.
template <class Shape>
__device__ bool spread_arriving_rows(const DispatchArgs& args, const RouteShared<Shape>& route,
                                     const SpreadShared<Shape>& spread, uint64 staging, uint32 epoch, int warp,
                                     int lane) {
    using To = Places<Shape>;
    using Row = typename ArrivingRows<Shape>::Row;
    using Roles = StagedRoles<Shape>;
    ArrivingRows<Shape> arriving(args, route, staging, epoch);
    const int32 own = arriving.own, parts = Roles::template parts<Row>(own);
    const auto row_of = [&](int32 number) { return number * arriving.blocks + arriving.block; };
    const bool weighted = args.out_weights != nullptr, has_route = lane < Shape::top_k;
    bool done = true;
    for (int32 item = warp; done && item < own * parts; item += Roles::kWarps) {
        const int32 row = row_of(item / parts), part = item % parts;
        const int64 from = arriving.rows.place_of(args, row), route_to = static_cast<int64>(row) * Shape::top_k + lane;
        uint32* weights = arriving.words(args.row_weights, from, Shape::top_k) + lane;
        uint32* token = arriving.words(args.row_tokens, from, 1);
        const bool takes_weight = weighted && part == 0 && has_route, takes_token = part == 0 && lane == 0;
        const uint32* at[] = {has_route ? arriving.words(args.row_ids, from, Shape::top_k) + lane : nullptr,
                              has_route ? arriving.words(args.row_places, from, Shape::top_k) + lane : nullptr,
                              takes_weight ? weights : nullptr, takes_token ? token : nullptr};
        uint32 found[4];
        done = __all_sync(~0u, arriving.wait(at, found));
        if (!done) break;
        const int32 expert = has_route ? static_cast<int32>(found[0]) - To::kShift : -1;
        int32 place = -1;
        if (expert >= 0) place = place_of<Shape>(args, route, spread, arriving.rows.source, expert, found[1] - To::kShift);
        if (part == 0 && has_route) {
            args.out_ids[route_to] = expert;
            if (weighted) args.out_weights[route_to] = __uint_as_float(found[2]);
            args.out_places[route_to] = place;
        }
        if (takes_weight) *weights = kAbsent;
        if (takes_token) {
            args.out_tokens[row] = found[3];
            *token = kAbsent;
        }
        const uint32 kept = __ballot_sync(~0u, place >= 0 && place < To::end(args));
        auto* row_at = reinterpret_cast<unsigned char*>(staging + args.rows) + from * Shape::row_bytes;
        const uint64 out = reinterpret_cast<uint64>(args.out_rows) + static_cast<int64>(place) * Shape::row_bytes;
        done = arriving.copy(row_at, out, kept, lane, part * Row::kCount / parts, (part + 1) * Row::kCount / parts);
        if constexpr (Shape::scales_per_row > 0) {
            RowScales<Shape> scales;
            if (done && part == 0) {
                done = arriving.take_scales(from, scales, lane);
                if (done) spread_scales<Shape>(args, scales, place, kept, lane);
            }
        }
    }
    if (!__syncthreads_and(done)) return false;
    // Ids and numbers had several readers: they are set back when all have them.
    ReceivedRows<Shape> rows(route);
    for (int32 i = warp; i < own; i += Roles::kWarps) {
        const int64 from = rows.place_of(args, row_of(i));
        if (!has_route) continue;
        arriving.words(args.row_ids, from, Shape::top_k)[lane] = kAbsent;
        arriving.words(args.row_places, from, Shape::top_k)[lane] = kAbsent;
    }
    return true;
}
