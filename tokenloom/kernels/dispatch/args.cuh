// What the dispatch kernel is told. launch.py mirrors DispatchArgs; W, E, L, K are Shape::num_ranks and so on.
#pragma once
#include "device/sync/symmetric.cuh"
#include "device/sync/wait.cuh"

struct DispatchArgs {
    // This rank's input.
    const void* x;              // [T] rows of Shape::row_bytes
    const float* scales;        // [T][Shape::scales_per_row], FP8 only
    const void* topk_ids;       // [T][K] int32 or int64
    const float* topk_weights;  // [T][K], or null
    // The symmetric buffer: its address on every rank, and where things lie in it.
    const uint64* peers;   // [W] device memory
    uint64 counts_flags;   // uint32 [W]: rank s has begun dispatch number (flag), and its counts are here
    uint64 done_flags;     // uint32 [W][Shape::max_blocks]: block b of rank s has sent all its rows
    uint64 counts;         // int32 [2][W][W + E]: by parity of the epoch and by source: rows per rank, routes per expert
    uint64 rows;           // [capacity or W * M] rows
    uint64 row_scales;     // float [W * M][Shape::scales_per_row], or in the layout's order
    uint64 row_ids;        // int32 [W * M][K] local experts of each received row, -1 elsewhere
    uint64 row_weights;    // float [W * M][K]
    uint64 row_places;     // int32 [W * M][K] place of each route, layout expert only
    // Results on this rank, beside the rows.
    int32* slots;           // [T][W]: which of the rows that go to rank r this token is, or -1
    int32* all_counts;      // [W][W + E], as in `counts`
    int32* num_rows;        // [1] clamped to the capacity
    int32* source_counts;   // [W] clamped
    int32* expert_counts;   // [L] clamped
    int32* expert_offsets;  // [L + 1] clamped, layout expert only
    uint32* needed_rows;    // pinned host memory: rows that the fullest rank needs, written if over the capacity
    // Order and deadlines.
    uint32* epoch;  // device memory: dispatches done so far
    FaultRecord* fault;
    uint32* fault_claimed;
    uint64 timeout_ns;
    int32 rank;
    int32 num_tokens;
    int32 max_tokens;  // M
    int32 capacity;    // rows of the output; what does not fit is dropped
    int32 alignment;
    int32 ids_are_int64;
    int32 stop_on_overflow;  // exact sizes: send nothing if anything would be dropped
};
