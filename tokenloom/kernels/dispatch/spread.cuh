// Rows of a staged dispatch go from where they arrived, by source, to their places on this rank.
#pragma once
#include "device/tile/rows.cuh"
#include "kernels/dispatch/results.cuh"
#include "kernels/dispatch/scales.cuh"

constexpr int kSpreadSteps = 7;  // of a lane's loads in flight: the fewer, the more warps can share a row

template <class Shape>
struct SpreadShared {
    int32 source_base[Shape::num_ranks][Shape::experts_per_rank];  // routes of an expert from the sources before this
};

// What each source has of the places of this rank's experts. Behind find_bases.
template <class Shape>
__device__ void find_source_bases(const DispatchArgs& args, SpreadShared<Shape>& spread, const AllCounts<Shape>& counts) {
    const int32 first = args.call.rank * Shape::experts_per_rank;
    for (int l = threadIdx.x; l < Shape::experts_per_rank; l += Shape::threads) {
        int32 base = 0;
        for (int s = 0; s < Shape::num_ranks; ++s) {
            spread.source_base[s][l] = base;
            base += counts.routes(s, first + l);
        }
    }
    __syncthreads();
}

// Received rows, in the order of their sources and of their numbers there. A thread asks for them in ascending order.
template <class Shape>
struct ReceivedRows {
    const RouteShared<Shape>& route;
    int32 total = 0;
    int source = 0;  // of the last row

    __device__ __forceinline__ explicit ReceivedRows(const RouteShared<Shape>& route_) : route(route_) {
        for (int s = 0; s < Shape::num_ranks; ++s) total += route.received[s];
    }

    // Where a row has arrived.
    __device__ __forceinline__ int64 place_of(const DispatchArgs& args, int32 row) {
        while (row >= route.received_base[source] + route.received[source]) ++source;
        return static_cast<int64>(source) * args.max_tokens + (row - route.received_base[source]);
    }
};

// The place of a route, from its number among those of its source to an expert of this rank.
template <class Shape>
__device__ __forceinline__ int32 place_of(const DispatchArgs& args, const RouteShared<Shape>& route,
                                          const SpreadShared<Shape>& spread, int source, int32 expert, int32 number) {
    number += spread.source_base[source][expert];
    return Shape::layout == kLayoutSlots ? Places<Shape>::slot(args, expert, number) : route.own_start[expert] + number;
}

// All warps of all blocks, layouts rank and token: every received row, with all that came with it, to its place, which in
// layout rank has the number that it arrived with.
template <class Shape>
__device__ void spread_places(const DispatchArgs& args, const RouteShared<Shape>& route, uint64 staging, int warp,
                              int lane) {
    const auto staged = [&](uint64 offset) { return reinterpret_cast<const unsigned char*>(staging + offset); };
    const auto* ids = reinterpret_cast<const int32*>(staged(args.row_ids));
    const auto* weights = reinterpret_cast<const float*>(staged(args.row_weights));
    const auto* tokens = reinterpret_cast<const int32*>(staged(args.row_tokens));
    const auto* scales = reinterpret_cast<const float*>(staged(args.row_scales));
    const uint64 out = reinterpret_cast<uint64>(args.out_rows);
    ReceivedRows<Shape> rows(route);
    for (int32 row = warp * gridDim.x + blockIdx.x; row < rows.total; row += gridDim.x * (Shape::threads / 32)) {
        const int64 from = rows.place_of(args, row), place = Shape::layout == kLayoutRank ? from : row;
        if (place >= args.capacity) break;  // layout token: behind this one, too
        if (lane < Shape::top_k) {
            const int64 route_from = from * Shape::top_k + lane, route_to = place * Shape::top_k + lane;
            args.out_ids[route_to] = ids[route_from];
            if (args.out_weights != nullptr) args.out_weights[route_to] = weights[route_from];
        }
        if (Shape::layout != kLayoutRank && lane == 0) args.out_tokens[place] = tokens[from];
        copy_row<Shape::row_bytes>(staged(args.rows) + from * Shape::row_bytes, out + place * Shape::row_bytes, 1,
                                   lane);
        for (int i = lane; i < Shape::scales_per_row; i += 32)
            static_cast<float*>(args.out_scales)[place * Shape::scales_per_row + i] =
                scales[from * Shape::scales_per_row + i];
    }
}

// All warps of all blocks: every received row to the places of its routes here, with all that came with it. Where rows are
// few, warps share one: each copies some of its columns, and the first all that came with it.
template <class Shape>
__device__ void spread_rows(const DispatchArgs& args, const RouteShared<Shape>& route,
                            const SpreadShared<Shape>& spread, uint64 staging, int warp, int lane) {
    using To = Places<Shape>;
    const auto staged = [&](uint64 offset) { return reinterpret_cast<const unsigned char*>(staging + offset); };
    const auto* ids = reinterpret_cast<const int32*>(staged(args.row_ids));
    const auto* weights = reinterpret_cast<const float*>(staged(args.row_weights));
    const auto* numbers = reinterpret_cast<const int32*>(staged(args.row_places));
    const auto* tokens = reinterpret_cast<const int32*>(staged(args.row_tokens));
    const auto* scales = reinterpret_cast<const float*>(staged(args.row_scales));
    const uint64 out = reinterpret_cast<uint64>(args.out_rows);
    ReceivedRows<Shape> rows(route);
    using Row = Tiles<Shape::row_bytes / 16, kSpreadSteps>;
    const int32 num_warps = gridDim.x * (Shape::threads / 32);
    const int32 parts = max(min(num_warps / max(rows.total, 1), Row::kCount), 1);
    for (int32 item = warp * gridDim.x + blockIdx.x; item < rows.total * parts; item += num_warps) {
        const int32 row = item / parts, part = item % parts;
        const int64 from = rows.place_of(args, row);
        int32 place = -1;
        if (lane < Shape::top_k) {
            const int64 route_from = from * Shape::top_k + lane, route_to = static_cast<int64>(row) * Shape::top_k + lane;
            const int32 expert = ids[route_from];
            if (expert >= 0)
                place = place_of<Shape>(args, route, spread, rows.source, expert, numbers[route_from]);
            if (part == 0) {
                args.out_ids[route_to] = expert;
                if (args.out_weights != nullptr) args.out_weights[route_to] = weights[route_from];
                args.out_places[route_to] = place;
            }
        }
        if (part == 0 && lane == 0) args.out_tokens[row] = tokens[from];
        const uint32 kept = __ballot_sync(~0u, place >= 0 && place < To::end(args));
        copy_row<Shape::row_bytes, kSpreadSteps>(
            staged(args.rows) + from * Shape::row_bytes, out + static_cast<int64>(place) * Shape::row_bytes, kept, lane,
            part * Row::kCount / parts, (part + 1) * Row::kCount / parts);
        if constexpr (Shape::scales_per_row > 0) {
            if (part != 0) continue;
            RowScales<Shape> its_scales;
            its_scales.load(scales + from * Shape::scales_per_row, lane);
            spread_scales<Shape>(args, its_scales, place, kept, lane);
        }
    }
}
