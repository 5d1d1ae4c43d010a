// What the blocks that send a MegaMoE's rows are told, and what they keep: see send_routes.cuh.
#pragma once
#include "device/roles/arrivals.cuh"
#include "device/roles/count_routes.cuh"
#include "device/sync/progress.cuh"
#include "kernels/moe/packed_token.cuh"

struct alignas(16) RowToSend {
    int32 place;   // where it goes
    int32 expert;  // E and more: a shared one
    int32 result;  // which of this rank's results comes of it: token * (K + S) + k
    float weight;
};

struct SendRoutesArgs {
    Call call;
    // What every call is told anew lies side by side, so that the host writes it at once.
    const unsigned char* x;     // [T][H] of Shape::x_dtype, or E4M3: of blocks that pack their tokens themselves
    const float* scales;        // with E4M3: [T][H / 128]; row scales: [T]
    const void* topk_ids;       // [T][K] int32 or int64
    const float* topk_weights;  // [T][K]
    int32* stats;               // null, or [L]: the number of routes is added
    int32 num_tokens;
    int32 ids_are_int64;
    // What receivers have, as offsets in their buffers. A place is an index into it.
    const uint64* peers;  // [W] every rank's buffer; device memory
    uint64 rows;          // [places][H] E4M3
    uint64 row_scales;    // float [places][H / 128]; row scales: [places]
    uint64 row_homes;     // uint32 [places]: where the result goes, see arrivals.cuh
    uint64 row_weights;   // float [places]
    uint64 arrived;       // uint32 [L + S][W]: rows of an expert from a rank that are here, of all calls
    // What this rank's GEMMs are told; see arrivals.cuh.
    int32* offsets;    // [L + S + 1] first place of each expert
    uint32* expected;  // [L + S][W] what `arrived` is to become
    uint32* begun;     // [1] the epoch once both are there; 0 before the call
    // Memory of this kernel alone, except `packed`, which pack_tokens writes.
    const unsigned char* packed;  // [T] this rank's tokens if pack_tokens.cuh has packed them
    int32* block_counts;          // see count_routes.cuh
    RowToSend* order;             // [M * K] routes, of each block in the order in which they leave
};

// What sending warps keep of tokens, and what they tell of them.
template <class Shape, bool kKeepsTokens = Shape::kept_tokens != 0>
struct Outbox;

// Where blocks have few tokens, they pack them here while they wait for counts, and load nothing.
template <class Shape>
struct Outbox<Shape, true> {
    alignas(128) unsigned char token[Shape::kept_tokens][Shape::packed_bytes];  // of the block's chunk
};

// Else each sending warp has a ring of rows between load and store.
template <class Shape>
struct Outbox<Shape, false> {
    struct Ring {
        alignas(128) unsigned char row[Shape::stages][Shape::packed_bytes];
        alignas(16) RowToSend what[Shape::stages];
        alignas(8) uint64 loaded[Shape::stages];
    };
    Ring ring[Shape::send_warps];
    Progress<Shape::send_warps> progress;
};

template <class Shape>
struct SendRoutesShared {
    static constexpr int kCounts = kRouteCounts<Shape>;
    Outbox<Shape> outbox;
    PeerWindow<Shape::num_ranks> data;  // all ranks' buffers: here they are read fast
    alignas(16) int32 header[header_words<kCounts>];  // what the last block announces
    int32 before[kCounts];  // of the tokens before this chunk
    int32 chunk[kCounts];
    int32 total[Shape::num_experts];  // routes of all ranks
    // Place of the chunk's first route of each expert. After find_places it is less by next[e], so a route's place is this
    // plus its number in the block.
    int32 place[Shape::num_experts];
    int32 next[Shape::num_experts];  // number, in this block, of the next route that is put in order
    int32 offsets[Shape::experts_per_rank + Shape::shared_experts + 1];
    int32 routes;  // of this chunk
};
