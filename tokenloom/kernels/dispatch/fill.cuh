// Layouts expert and slots: the places of further routes.
#pragma once
#include "device/tile/rows.cuh"
#include "kernels/dispatch/scales.cuh"

// Every row from another rank that has several routes here goes to their places too, as soon as it has arrived; by
// all_gather, to all of its places, once its ids are here; by all_to_all it is only waited for. Scales that do not lie
// beside rows are laid for all places. (Rows of this rank itself go to all of their places at once.)
// Warps claim groups of rows in the order in which sources send them, sources in turn.
template <class Shape>
__device__ bool fill_further_places(const DispatchArgs& args, const DispatchShared<Shape>& shared, uint32 epoch,
                                    int lane) {
    constexpr int kGroup = 32 / Shape::top_k;  // consecutive rows of one source, looked at together: lane (j, k)
    constexpr bool kGathered = Shape::strategy == kAllGather;
    static_assert(!kGathered || Shape::scales_per_row == 0, "scales travel with rows");
    const Deadline deadline = deadline_of(args.call);
    const PeerSignals flags = shared.control.signals(args.call.rank, args.row_flags);
    const auto* tokens = shared.data.template local<const int32>(args.call.rank, args.row_tokens);
    const auto* all_places = shared.data.template local<const int32>(args.call.rank, args.row_places);
    auto* rows = shared.data.template local<unsigned char>(args.call.rank, args.rows);
    auto* scales = shared.data.template local<float>(args.call.rank, args.row_scales);
    constexpr int kSources = Shape::num_ranks > 1 ? Shape::num_ranks - 1 : 1;
    const int in_group = lane / Shape::top_k;
    int32 longest = 0;
    for (int s = 0; s < Shape::num_ranks; ++s)
        if (s != args.call.rank) longest = max(longest, shared.route.received[s]);
    const int32 num_groups = (longest + kGroup - 1) / kGroup * (Shape::num_ranks - 1);
    Claims claims(args.call.claimed + 1, lane);
    for (int32 i = claims.take(); i < num_groups; i = claims.take()) {
        const int32 source = (args.call.rank + 1 + i % kSources) % Shape::num_ranks;
        const int32 in_source = i / kSources * kGroup + in_group;
        const int64 row = shared.route.received_base[source] + in_source;
        int32 place = -1, token = 0;
        bool here = true;
        if (in_group < kGroup && in_source < shared.route.received[source]) {
            here = flags.wait(row, epoch, deadline, source, kPhaseRows);
            if (here) place = all_places[row * Shape::top_k + lane % Shape::top_k];
            if (here && kGathered) token = tokens[row];
        }
        if (!__all_sync(~0u, here)) return false;
        __syncwarp();
        const uint32 fitting = __ballot_sync(~0u, place >= 0 && place < Places<Shape>::end(args));
        for (int j = 0; j < kGroup; ++j) {
            const uint32 of_row = fitting & (0xffffffffu >> (32 - Shape::top_k)) << (j * Shape::top_k);
            const uint32 further = Shape::strategy == kAllToAll ? 0 : kGathered ? of_row : of_row & (of_row - 1);
            if ((kLaysScales<Shape> ? of_row : further) == 0) continue;
            const int64 first = of_lane(place, of_row);
            const unsigned char* from = rows + first * Shape::row_bytes;
            if constexpr (kGathered)
                from = static_cast<const unsigned char*>(args.gathered) +
                       (static_cast<int64>(source) * args.max_tokens + of_lane(token, of_row)) * Shape::row_bytes;
            [[maybe_unused]] RowScales<Shape> its_scales;
            if constexpr (Shape::scales_per_row > 0) its_scales.load(scales + first * Shape::scales_per_row, lane);
            if constexpr (kLaysScales<Shape>) spread_scales<Shape>(args, its_scales, place, of_row, lane);
            copy_row<Shape::row_bytes>(
                from, reinterpret_cast<uint64>(rows) + static_cast<int64>(place) * Shape::row_bytes, further, lane);
            if constexpr (Shape::scales_per_row > 0 && !kLaysScales<Shape>) {
                for (uint32 rest = further; rest != 0; rest &= rest - 1)
                    its_scales.store(scales + static_cast<int64>(of_lane(place, rest)) * Shape::scales_per_row, lane);
            }
        }
    }
    return true;
}
