// Values of received routes, [R][K], to the rows of layout "expert" that the routes have, or from them. No rows are read
// or written: 8 bytes a route.
#pragma once
#include "device/ptx/types.cuh"

struct RowWeightsArgs {
    const int32* row_places;     // [>= R][K], place of each route of a received row; -1: none
    const int32* source_counts;  // [W], which make R
    const float* source;
    float* target;
    int64 routes;  // that have values: K times the rows of `source` (to_rows), or of `target`
    int32 places;  // rows that there may be
    int32 padding;
};

template <class Shape>
__device__ void row_weights(const RowWeightsArgs& args) {
    int64 received = 0;
    for (int s = 0; s < Shape::num_ranks; ++s) received += args.source_counts[s];
    received *= Shape::top_k;
    const int64 stride = gridDim.x * Shape::threads;
    for (int64 i = blockIdx.x * Shape::threads + threadIdx.x; i < args.routes; i += stride) {
        const int32 place = i < received ? args.row_places[i] : -1;
        const bool exists = place >= 0 && place < args.places;
        if constexpr (Shape::to_rows != 0) {
            if (exists) args.target[place] = args.source[i];
        } else {
            args.target[i] = exists ? args.source[place] : 0.0f;
        }
    }
}
