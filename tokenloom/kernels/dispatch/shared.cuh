// What a block of the dispatch kernel keeps in shared memory.
#pragma once
#include "device/pipe/row_stream.cuh"
#include "device/sync/claims.cuh"
#include "device/sync/progress.cuh"
#include "kernels/dispatch/route.cuh"

enum Quantize : int { kAsIs = 0, kToFp8 = 1, kToFp8PowerOfTwo = 2 };

// How rows get to the places of their routes. What is not dedup is for layout expert.
enum Strategy : int {
    kDedup = 0,      // one for each rank, whose filling warps copy it to the places of further routes
    kAllGather = 1,  // filling warps copy it from where all tokens are
    kAllToAll = 2,   // one for each route
};

template <class Shape>
struct DispatchShared {
    using Stream = RowStream<Shape::row_bytes, Shape::stage_bytes, Shape::stages>;
    static constexpr bool kStreams = Shape::quantize == kAsIs && Shape::part != kReceive && !Places<Shape>::kArrives;
    static constexpr int kRings = kStreams ? Shape::send_warps : 1;
    union {
        typename Stream::Shared stream[kRings];
        RunningCounts<Shape> running;
    };
    typename Stream::Control control_of_stream[kRings];
    PeerWindow<Shape::num_ranks> control;  // of all ranks' control buffers,
    PeerWindow<Shape::num_ranks> data;     // and of the regions where they receive: here they are read fast
    Progress<Shape::send_warps> progress;
    RouteShared<Shape> route;
};
