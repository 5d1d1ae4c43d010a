// Arguments of the combine kernel, and what its blocks keep in shared memory. launch.py mirrors CombineArgs; W, E, K
// are Shape::num_ranks and so on.
#pragma once
#include "device/pipe/arriving_rows.cuh"
#include "device/pipe/row_stream.cuh"
#include "device/pipe/term_stream.cuh"
#include "device/sync/claims.cuh"
#include "device/sync/progress.cuh"
#include "device/tile/layout.cuh"
#include "device/tile/rows.cuh"
#include "device/transport/call.cuh"

struct CombineArgs {
    Call call;
    // What every call is told anew lies side by side, so that the host writes it at once.
    const void* y;             // rows in the dispatch's layout
    const int32* row_places;   // [R][K] place of each route of a received row (layout expert)
    const int32* row_tokens;   // [R] the token at home that a received row is (layout expert)
    const int32* slots;        // [T][W], from the dispatch: which of the rows that went to rank r, or -1
    const int32* all_counts;   // [W][W + E], from the dispatch
    const float* weights;      // of weighted variants (layout expert): [R][K] received, or [T][K] of home's own tokens
    const void* topk_ids;      // [T][K] as given to the dispatch (per route)
    void* out;                 // [T] rows of Shape::out_dtype
    int32 num_tokens;
    int32 capacity;  // rows of y; what lies beyond was dropped
    int32 ids_are_int64;
    int32 max_tokens;       // M; from here on, what calls of one kind share
    uint64 chunk_flags;     // in the control buffer: uint32 [W][max_chunks]: this chunk of rank r is here; eager between
                            // nodes: what its block has sent
    const uint64* peers;    // the data buffers
    uint64 combine_recv;    // in them, rows of Shape::wire_dtype: per rank [M * min(W, K)], by expert rank, then token;
                            // dense [W][M]; per route [M * K], by token and k. The first of combine_turns
    uint64 turn_bytes;      // from one of them to the next
    uint64 home_weights;    // from the beginning of each: float32 [W][M * K], weights that come from home
    int32 max_chunks;       // that one rank can send another
    int32 combine_turns;    // a power of two: calls take turns by their epochs
    uint64 own_sums;        // pre_reduce only: address of [M] rows for the sums of this rank's own tokens
    int32 send_blocks;      // eager between nodes: of the kernel that sends, on all ranks
    int32 push_blocks;      // the first so many blocks push rows: before they sum, or, if eager, instead; not if dense
};

// Which weights rows are multiplied by: none, those that came with the dispatch, or those that home sends in this call.
enum Weights : int { kNoWeights = 0, kReceivedWeights = 1, kHomeWeights = 2 };

// What a kernel does. Some blocks push while the others sum: an SM that sends into a full link has little of its path to
// memory left. In an eager kernel, which has few rows, all warps of a block push; in others one warp notifies.
template <class Shape>
struct CombineRoles {
    static constexpr int kWarps = Shape::threads / 32;
    static constexpr bool kSends = Shape::part != kReceive && Shape::dense == 0;
    static constexpr bool kSums = Shape::part != kSend;
    // Eager, on one node: rows say by themselves that they are here.
    static constexpr bool kArrives = Shape::eager != 0 && Shape::dense == 0 && Shape::node_ranks == Shape::num_ranks;
    // Else in registers.
    static constexpr bool kSumsInRings = kSums && !kArrives && Shape::node_ranks == Shape::num_ranks;
    static constexpr bool kChunks = kSends && Shape::eager == 0;  // rows go home in chunks, each with a flag

    // The first so many blocks push.
    static __device__ __forceinline__ int32 push_blocks(const CombineArgs& args) {
        return !kSends ? 0 : kSums && (kChunks || kArrives) ? args.push_blocks : gridDim.x;
    }

    // Blocks from here on sum without having pushed. Where rows arrive and all blocks push, all of them sum behind it.
    static __device__ __forceinline__ int32 first_sum_block(const CombineArgs& args) {
        const int32 push = push_blocks(args);
        return kArrives && push == gridDim.x ? 0 : push;
    }
};

// How the rows of one rank for another are cut into chunks: 1 << chunk_shift rows each, and the last ones, lone_rows or a
// few more, by themselves. launch.py has the reason.
template <class Shape>
struct Chunks {
    int32 rows, long_ones, rows_of_long;

    __device__ __forceinline__ explicit Chunks(int32 num_rows)
        : rows(num_rows),
          long_ones(max(num_rows - Shape::lone_rows, 0) >> Shape::chunk_shift),
          rows_of_long(long_ones << Shape::chunk_shift) {}

    __device__ __forceinline__ int32 count() const { return rows - rows_of_long + long_ones; }

    __device__ __forceinline__ int32 of_row(int32 row) const {
        return row < rows_of_long ? row >> Shape::chunk_shift : row - rows_of_long + long_ones;
    }

    __device__ __forceinline__ int32 begin(int32 chunk) const {
        return chunk < long_ones ? chunk << Shape::chunk_shift : chunk - long_ones + rows_of_long;
    }

    // Beyond the last one there are chunks without rows.
    __device__ __forceinline__ int32 num_rows(int32 chunk) const {
        return chunk < long_ones ? 1 << Shape::chunk_shift : chunk < count() ? 1 : 0;
    }
};

template <class Shape>
struct CombineRows {
    static constexpr bool kArrives = CombineRoles<Shape>::kArrives;
    static constexpr bool kByExpert = Shape::layout == kLayoutExpert;
    static constexpr bool kCopies =
        !kByExpert && Shape::y_dtype == Shape::wire_dtype && Shape::dense == 0 && Shape::eager == 0;
    // Rows for this rank's own tokens do not travel: they are added from where they are. (Rows of halves travel, since
    // y may have changed before the second half. So do rows that are sums: a sum within a sum lacks registers. Between
    // nodes all partial sums of a node meet on one rank.)
    static constexpr bool kOwnStay = !kByExpert && Shape::y_dtype == Shape::wire_dtype && Shape::dense == 0 &&
                                     Shape::part == kWhole && Shape::node_ranks == Shape::num_ranks;
    static constexpr int kYBytes = Shape::hidden * kValueBytes<Shape::y_dtype>;
    static constexpr int kWireBytes = Shape::hidden * kValueBytes<Shape::wire_dtype>;
    static constexpr int kOutBytes = Shape::hidden * kValueBytes<Shape::out_dtype>;
    static constexpr bool kWeighted = Shape::weights != kNoWeights;
    static constexpr bool kWeightsFromHome = Shape::weights == kHomeWeights;
    using Stores = typename IfArrives<kArrives, ArrivingStores, PlainStores>::Type;
    using Push = TermStream<Shape::y_dtype, Shape::wire_dtype, Shape::hidden, Shape::group, Shape::stages, kWeighted,
                            Shape::eager != 0, Stores>;
    using Copy = RowStream<kWireBytes, Shape::stage_bytes, Shape::stages>;
    // A token has rows on no more ranks than it has experts.
    static constexpr int kMostTerms =
        Shape::per_route != 0 || Shape::top_k < Shape::num_ranks ? Shape::top_k : Shape::num_ranks;
    using Sum = typename IfArrives<
        kArrives, ArrivingSum<Shape::wire_dtype, Shape::out_dtype, Shape::hidden, Shape::group, kMostTerms>,
        TermStream<Shape::wire_dtype, Shape::out_dtype, Shape::hidden, Shape::group, Shape::sum_stages, false,
                   true>>::Type;
    static constexpr uint32 kNan = kNanWord<Shape::wire_dtype>;  // what comes home for dropped rows
};

// The ring of a warp that pushes sums, or rows as they are.
template <class Rows, bool kCopies = Rows::kCopies>
struct PushRing {
    using Shared = typename Rows::Push::Shared;
    struct Control {};
};

template <class Rows>
struct PushRing<Rows, true> {
    using Shared = typename Rows::Copy::Shared;
    using Control = typename Rows::Copy::Control;
};

// Of a rank that sends nothing home, whatever the dispatch has counted.
constexpr int32 kNoRows = -1;

template <class Shape>
struct CombineShared {
    using Roles = CombineRoles<Shape>;
    using Ring = PushRing<CombineRows<Shape>>;
    static constexpr int kRings = Roles::kSends ? Shape::push_warps : 1;
    union {  // a block sums when it has pushed
        typename Ring::Shared push[kRings];
        typename CombineRows<Shape>::Sum::Shared sum[Roles::kSumsInRings ? Roles::kWarps : 1];
    };
    typename Ring::Control control_of_push[kRings];
    PeerWindow<Shape::num_ranks> control;  // of all ranks' buffers, as in the args: here they are read fast
    PeerWindow<Shape::num_ranks> data;
    uint64 combine_recv;  // in them: that of this call
    alignas(16) int32 header[kHeaderWords];
    Progress<Shape::push_warps> progress;
    int32 received_base[Shape::num_ranks];  // first received row that came from rank s
    int32 received[Shape::num_ranks];       // how many of them travel
    int32 home_base[Shape::num_ranks];      // where this rank's rows begin in the buffer of home rank s
    int32 own_base[Shape::num_ranks];       // where rank r's rows begin in this rank's buffer
    int32 own[Shape::num_ranks];            // how many there are; kNoRows of masked ranks
};

// Where the weights of a home rank lie, behind what comes home in a call.
template <class Shape>
__device__ __forceinline__ uint64 weights_from(const CombineArgs& args, uint64 combine_recv, int32 home) {
    return combine_recv + args.home_weights +
           static_cast<uint64>(home) * args.max_tokens * Shape::top_k * sizeof(float);
}

// The first row for a home rank, among the received rows (layout rank: among the places).
template <class Shape>
__device__ __forceinline__ int64 first_row(const CombineArgs& args, const CombineShared<Shape>& shared, int32 home) {
    return Shape::layout == kLayoutRank ? static_cast<int64>(home) * args.max_tokens : shared.received_base[home];
}
