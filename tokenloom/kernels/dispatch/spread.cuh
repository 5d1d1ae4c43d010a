// The receiving part of a staged dispatch: rows go from where they arrived, by source, to their places on this rank.
#pragma once
#include "device/sync/claims.cuh"
#include "device/tile/rows.cuh"
#include "kernels/dispatch/results.cuh"

// How the scales of FP8 rows lie where they go.
enum ScaleLayout : int { kScaleRows = 0, kScaleColumns = 1, kScalePacked = 2 };

template <class Shape>
struct SpreadShared {
    int32 source_base[Shape::num_ranks][Shape::experts_per_rank];  // routes of an expert from the sources before this
};

// What each source has of the places of this rank's experts. Threads from the last one on, and without a barrier:
// others find the bases meanwhile, whose barriers cover this.
template <class Shape>
__device__ void find_source_bases(const DispatchArgs& args, SpreadShared<Shape>& spread, const AllCounts<Shape>& counts) {
    const int32 first = args.call.rank * Shape::experts_per_rank;
    for (int l = Shape::threads - 1 - threadIdx.x; l < Shape::experts_per_rank; l += Shape::threads) {
        int32 base = 0;
        for (int s = 0; s < Shape::num_ranks; ++s) {
            spread.source_base[s][l] = base;
            const int32 end = base + counts.routes(s, first + l);
            if (Shape::layout == kLayoutSlots && blockIdx.x == 0) {
                int32* range = args.slot_ranges + 2 * (l * Shape::num_ranks + s);
                range[0] = min(base, args.capacity);
                range[1] = min(end, args.capacity) - range[0];
            }
            base = end;
        }
    }
}

// Every block: all rows of all sources are in this rank's region.
template <class Shape>
__device__ bool wait_for_sources(const DispatchArgs& args, Turn turn, int32 blocks) {
    const Deadline deadline = deadline_of(args.call);
    const PeerSignals done = window_of<Shape::num_ranks>(args.call.peers).signals(args.call.rank, args.done_flags);
    bool here = true;
    for (int i = threadIdx.x; i < Shape::num_ranks * blocks; i += Shape::threads) {
        const int peer = i / blocks, block = i % blocks;
        here = here && (turn.leaves_out(peer) ||
                        done.from(peer * Shape::max_blocks).wait(block, turn.epoch, deadline, peer, kPhaseRows));
    }
    return __syncthreads_and(here);
}

// The scales of one row on their way, as the words that lie where they go: of FP32, or of four exponents.
template <class Shape, bool kHasAny = (Shape::scales_per_row > 0)>
struct RowScales {
    static constexpr int kScales = Shape::scales_per_row;
    static constexpr bool kPacked = Shape::scale_layout == kScalePacked;
    static constexpr int kWords = kPacked ? (kScales + 3) / 4 : kScales;
    static constexpr int kSteps = (kWords + 31) / 32;
    uint32 words[kSteps];

    __device__ __forceinline__ void load(const float* from, int lane) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const int i = step * 32 + lane;
            words[step] = 0;
            if constexpr (kPacked) {
#pragma unroll
                for (int b = 0; b < 4; ++b)
                    if (4 * i + b < kScales) words[step] |= (__float_as_uint(from[4 * i + b]) >> 23 & 0xff) << (8 * b);
            } else if (i < kScales) {
                words[step] = __float_as_uint(from[i]);
            }
        }
    }

    // For the place of each lane in the mask.
    __device__ __forceinline__ void store(const DispatchArgs& args, int32 place, uint32 places, int lane) const {
        auto* out = static_cast<uint32*>(args.out_scales);
        int64 first = static_cast<int64>(place) * kWords;
        int64 stride = 1;
        if constexpr (Shape::scale_layout != kScaleRows) {  // columns of the expert that has the place
            stride = args.capacity;
            first = place >= 0 ? (place / args.capacity * kWords * stride) + place % args.capacity : 0;
        }
        for (uint32 rest = places; rest != 0; rest &= rest - 1) {
            const int64 to = of_lane(first, rest);
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
                if (step * 32 + lane < kWords) out[to + (step * 32 + lane) * stride] = words[step];
        }
    }
};

template <class Shape>
struct RowScales<Shape, false> {
    __device__ __forceinline__ void load(const float*, int) {}
    __device__ __forceinline__ void store(const DispatchArgs&, int32, uint32, int) const {}
};

// All warps of all blocks: every received row to the places of its routes here, with all that came with it. Where rows
// are few, warps share them. Block 0, which has published the counts before, only takes what is left. All that is read
// of a row is in flight together.
template <class Shape>
__device__ void spread_rows(const DispatchArgs& args, const RouteShared<Shape>& route,
                            const SpreadShared<Shape>& spread, uint64 staging, Claims& claims, int warp, int lane) {
    using To = Places<Shape>;
    using Tile = RowTile<Shape::row_bytes, 7>;
    const auto staged = [&](uint64 offset) { return reinterpret_cast<const unsigned char*>(staging + offset); };
    const auto* ids = reinterpret_cast<const int32*>(staged(args.row_ids));
    const auto* weights = reinterpret_cast<const float*>(staged(args.row_weights));
    const auto* numbers = reinterpret_cast<const int32*>(staged(args.row_places));
    const auto* tokens = reinterpret_cast<const int32*>(staged(args.row_tokens));
    const auto* scales = reinterpret_cast<const float*>(staged(args.row_scales));
    const uint64 out = reinterpret_cast<uint64>(args.out_rows);
    const int32 first_block = gridDim.x > 1 ? 1 : 0, num_blocks = gridDim.x - first_block;
    const int32 num_warps = num_blocks * (Shape::threads / 32);
    int source = 0;
    int32 total = 0;
    for (int s = 0; s < Shape::num_ranks; ++s) total += route.received[s];
    const int32 parts = min(max(2 * num_warps / max(total, 1), 1), Tile::Row::kCount);
    for (int32 item = blockIdx.x < first_block ? num_warps + claims.take()
                                               : warp * num_blocks + blockIdx.x - first_block;
         item < total * parts; item = num_warps + claims.take()) {
        const int32 i = item / parts, part = item % parts;
        while (i >= route.received_base[source] + route.received[source]) ++source;
        const int64 from = static_cast<int64>(source) * args.max_tokens + (i - route.received_base[source]);
        const int64 row = Shape::layout == kLayoutRank ? from : i;  // among those that came
        const unsigned char* values = staged(args.rows) + from * Shape::row_bytes;
        const bool tells = part == 0 && (To::kOfRoutes || row < args.capacity);
        const bool has_weights = args.out_weights != nullptr;
        int32 expert = -1, number = 0, token = 0;
        float weight = 0.0f;
        if (lane < Shape::top_k) {
            const int64 route_from = from * Shape::top_k + lane;
            expert = ids[route_from];
            if (To::kOfRoutes) number = numbers[route_from];
            if (has_weights) weight = weights[route_from];
        }
        if (Shape::layout != kLayoutRank && lane == 0) token = tokens[from];
        RowScales<Shape> row_scales;
        row_scales.load(scales + from * Shape::scales_per_row, lane);
        Tile tile;
        tile.load(values, part, lane);
        int32 place = lane == 0 && row < args.capacity ? static_cast<int32>(row) : -1;
        if (lane < Shape::top_k && tells) {
            const int64 route_to = row * Shape::top_k + lane;
            args.out_ids[route_to] = expert;
            if (has_weights) args.out_weights[route_to] = weight;
        }
        if constexpr (To::kOfRoutes) {
            place = -1;
            if (expert >= 0) {
                const int32 in_expert = spread.source_base[source][expert] + number;
                if constexpr (Shape::layout == kLayoutSlots)
                    place = in_expert < args.capacity ? expert * args.capacity + in_expert : To::kDropped;
                else place = route.own_start[expert] + in_expert;
            }
            if (lane < Shape::top_k && tells) args.out_places[row * Shape::top_k + lane] = place;
        }
        if (Shape::layout != kLayoutRank && lane == 0 && tells) args.out_tokens[row] = token;
        const int32 end = Shape::layout == kLayoutSlots ? To::kDropped : args.capacity;
        const uint32 kept = __ballot_sync(~0u, place >= 0 && place < end);
        const uint64 target = out + static_cast<int64>(place) * Shape::row_bytes;
        tile.store(target, kept, part, lane);
#pragma unroll 1
        for (int further = part + parts; further < Tile::Row::kCount; further += parts) {
            tile.load(values, further, lane);
            tile.store(target, kept, further, lane);
        }
        if (part == 0) row_scales.store(args, place, kept, lane);
    }
}
