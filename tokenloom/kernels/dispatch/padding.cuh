// Layout expert: rows between a group's last route and the next group are zero.
#pragma once
#include "device/tile/rows.cuh"
#include "kernels/dispatch/route.cuh"

// Warp number `warp` of `num_warps` in all blocks, with its share of each group's padding.
template <class Shape>
__device__ void clear_padding(const DispatchArgs& args, const RouteShared<Shape>& route, unsigned char* rows,
                              float* scales, int warp, int num_warps, int lane) {
    constexpr int kExperts = Shape::experts_per_rank;
    if (args.alignment == 1) return;
    for (int first = 0; first < kExperts; first += 32) {
        const int l = first + lane;
        int32 begin = 0, end = 0;
        if (l < kExperts) {
            begin = route.own_start[l] + route.expert_total[args.call.rank * kExperts + l];
            end = min(route.own_start[l + 1], args.capacity);
        }
        for (uint32 left = __ballot_sync(~0u, begin + warp < end); left != 0; left &= left - 1) {
            const int32 until = of_lane(end, left);
            for (int64 place = of_lane(begin, left) + warp; place < until; place += num_warps) {
                fill_row<Shape::row_bytes>(rows + place * Shape::row_bytes, 0, lane);
                for (int i = lane; i < Shape::scales_per_row; i += 32) scales[place * Shape::scales_per_row + i] = 0.0f;
            }
        }
    }
}
