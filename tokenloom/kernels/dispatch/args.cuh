// Arguments of the dispatch kernel. launch.py mirrors DispatchArgs; W, E, L, K are Shape::num_ranks and so on.
#pragma once
#include "device/tile/layout.cuh"
#include "device/transport/call.cuh"

struct DispatchArgs {
    Call call;
    // What every call is told anew lies side by side, so that the host writes it at once. This rank's input:
    const void* x;              // [T] rows of Shape::row_bytes, or of values to quantise
    const float* scales;        // [T][Shape::scales_per_row], if x is FP8
    const void* topk_ids;       // [T][K] int32 or int64
    const float* topk_weights;  // [T][K], or null
    // Results on this rank, beside the rows:
    int32* slots;           // [T][W]: which of the rows that go to rank r this token is, or -1; then [T][K] places
    int32* all_counts;      // [W][W + E]: rows per rank, routes per expert, of every source
    int32* num_rows;        // [1] clamped to the capacity; the next three lie behind it
    int32* source_counts;   // [W] clamped
    int32* expert_counts;   // [L] clamped
    int32* expert_offsets;  // [L + 1] clamped, layout expert only
    int32 num_tokens;
    int32 host_sequence;
    // Staged: rows and all that comes with them arrive at the offsets below, by source and in its order, [W * M] each;
    // row_places are then numbers within (source, expert). From there they go to tensors of this rank alone. What is sent
    // directly to slots has the ranges, and the scales unless they lie by rows, from here too.
    void* out_rows;        // in the layout's order
    void* out_scales;      // Shape::scale_layout
    int32* out_ids;        // [R][K]; R is dense, or that of layout rank
    float* out_weights;    // [R][K], or null
    int32* out_places;     // [R][K] (layouts expert, slots)
    int32* out_tokens;     // [R]
    int32* slot_ranges;    // [L][W][2] (layout slots)
    // What calls of one kind share.
    const void* gathered;       // strategy all_gather: rows of all ranks' tokens, [W][M], which copy engines brought here
    // In the control buffer.
    uint64 done_flags;  // uint32 [W][Shape::max_blocks]: block b of rank s has sent all its rows (layouts token, rank);
                        // between nodes [kTurns] times that
    uint64 row_flags;   // uint32 [W * M]: a received row is here (layout expert)
    // The data buffer: its address on every rank, and where things lie in its first region.
    const uint64* peers;  // [W] device memory
    uint64 rows;          // rows in the layout's order
    uint64 row_scales;    // float [][Shape::scales_per_row], in the same order
    uint64 row_ids;       // int32 [W * M][K] local experts of each received row, -1 elsewhere
    uint64 row_weights;   // float [W * M][K]
    uint64 row_places;    // int32 [W * M][K] place of each route (layout expert)
    uint64 row_tokens;    // int32 [W * M] the token at home that a received row is (all layouts but rank)
    uint64 region_bytes;  // from anything in the first region to the same in the second
    uint64 turn_bytes;    // staged: from one of kTurns regions to the next
    int32* block_counts;  // device memory: see count_routes.cuh. Its second flags: this block has written its slots
    int32* host_counts;   // null, or in pinned host memory: host_sequence, then these four, before rows are here
    int32 max_tokens;     // M
    int32 capacity;       // rows of the output, in layout slots of each expert; what does not fit is dropped
    int32 alignment;
    int32 ids_are_int64;
    int32 stop_on_overflow;  // exact sizes: send nothing if anything would be dropped
    int32 send_blocks;       // of the kernel that sends, on all ranks
    int32 peer_blocks;       // the first so many blocks send: direct, to other ranks, before they join the others
};

// A flag for each block, which has written its chunk's slots and places.
__device__ __forceinline__ uint32* slots_found(const DispatchArgs& args) {
    return reinterpret_cast<uint32*>(args.block_counts) + kMostBlocks;
}

// Where rows lie, and where they go first.
template <class Shape>
struct Places {
    static constexpr bool kOfRoutes = Shape::layout == kLayoutExpert || Shape::layout == kLayoutSlots;
    static constexpr bool kStaged = Shape::staged != 0;
    static constexpr bool kDirect = kOfRoutes && !kStaged;  // the sender knows the places of routes
    static constexpr bool kArrives = kStaged && Shape::node_ranks == Shape::num_ranks;  // rows say that they are here
    static constexpr int32 kShift = kArrives ? 1 : 0;  // what may be -1 travels so much larger: -1 says that it is absent
    static constexpr bool kFixed = Shape::layout == kLayoutRank || kStaged;  // of rows, as they arrive
    static constexpr int32 kDropped = 0x7fffffff;

    // Routes with places from here on were dropped.
    static __device__ __forceinline__ int32 end(const DispatchArgs& args) {
        return Shape::layout == kLayoutSlots ? kDropped : args.capacity;
    }

    // Layout slots: the place of a route, which has this number among those of a local expert.
    static __device__ __forceinline__ int32 slot(const DispatchArgs& args, int32 expert, int32 number) {
        return number < args.capacity ? expert * args.capacity + number : kDropped;
    }
};
