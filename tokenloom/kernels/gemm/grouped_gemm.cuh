// Grouped FP8 GEMM: rows that are grouped by expert times each expert's weights, with block scales.
//
//   out[row, n] = sum over blocks k of a_scale[row, k] * b_scale[e, n / 128, k] * (a[row, k:] . b[e, n, k:])
//
// With row scales it is a_scale[row] * b_scale[e, n] * (a[row] . b[e, n]).
//
// With SwiGLU, b has 8 rows of gates and 8 of ups in turn, and the output is quantised; with row scales it is bfloat16.
//
// Persistent, in clusters of two blocks. The roles are in device/roles; here they get their types and their threads.
#pragma once
#include "device/ptx/grid.cuh"
#include "device/roles/arrivals.cuh"
#include "device/roles/biased_bf16_epilogue.cuh"
#include "device/roles/claimed_tiles.cuh"
#include "device/roles/expert_tiles.cuh"
#include "device/roles/load.cuh"
#include "device/roles/math.cuh"
#include "device/roles/quantize.cuh"
#include "device/roles/store.cuh"
#include "device/roles/swiglu_fp8_epilogue.cuh"
#include "device/roles/transposed_math.cuh"

struct GroupedGemmArgs {
    TensorMap a;                 // [rows, K] E4M3, boxes of 128 values x 32 rows, swizzled; unless a_windows is used
    TensorMap b;                 // [E, N, K] E4M3, boxes of 128 values x 128 rows
    TensorMap a_scale_map;       // [rows, K / 128], boxes of 8 values x 128 rows; if K % 512 == 0
    const float* a_scales;       // [rows, K / 128]; row scales: [rows]
    const float* b_scales;       // [E, N / 128, K / 128]; row scales: [E, N], in the order of b's rows
    const int32* offsets;        // [E + 1] first row of each expert; device memory; unused with slots
    void* out;                   // [rows, N] bfloat16; SwiGLU: [rows, N / 2] E4M3, with row scales bfloat16; unused if
                                 // scattered
    float* out_scales;           // SwiGLU with block scales: [rows, N / 256]
    const float* row_weights;    // SwiGLU, biased: [rows], or null for ones
    float clamp;                 // SwiGLU, clamped: the most of a gate, and the largest magnitude of an up
    int32 capacity;              // slots: S, the places of each expert; expert e has rows e * S and on
    uint64* trace;               // traced: [blocks][kTraceRoles][kTracedTiles][2] nanoseconds
    const int32* counts;         // slots: [E] rows of each expert; device memory
    const float* bias;           // biased: [E, N], in the order of b's rows
    float alpha;                 // SwiGLU of another form: as in Activation
    float up_offset;
    // Of two GEMMs in turn, the first of which awaits its rows, and the second scatters its results:
    const TensorMap* a_windows;  // maps of rows, of [rows, K], see WindowRows
    const uint32* begun;         // [1] see device/roles/arrivals.cuh
    uint32* stored;              // counts of stored tiles, see device/roles/gate.cuh
    uint32 stored_by;            // scattered: warps that store a tile of rows
    uint32 unused;
    const uint32* arrived;       // awaited: [E][ranks] counts of rows, and
    const uint32* expected;      // what they are to become; see OpenWhenArrived
    Deadline deadline;           // of that wait; scattered: its word says whether a wait has expired
    const uint32* row_homes;     // scattered: [rows], see RowsToHomes, and
    const uint64* peers;         // [ranks] every rank's buffer,
    uint64 results;              // offset in it of rows of bfloat16
    uint32* claimed;             // claims: [1] count of claimed tiles, 0 before and after
    // Scattered, with row scales: what the first GEMM has stored is quantised, see device/roles/quantize.cuh
    unsigned char* activations;  // [rows, K] bfloat16, of which E4M3 becomes the first half of each row, with
    float* activation_scales;    // [rows], as a_scales says
    uint32* quantized;           // [1] claims of rows by warps; 0 before the call
    const unsigned char* four_bits;  // [E, N / 128, K / 128, 8704] weights instead of b, see device/roles/four_bits.cuh
    uint64 padding[4];           // to a multiple of the alignment of tensor maps
};

// One of two GEMMs in turn.
template <class Shape>
constexpr bool kInTurn = Shape::awaits != 0 || Shape::scatters != 0;

// Rows of a are quantised before they are multiplied.
template <class Shape>
constexpr bool kQuantizes = Shape::row_scales != 0 && Shape::scatters != 0;

// The choices of a variant. Each is made once, here: what becomes of sums, where rows come from, where they go, and
// which rows are which expert's.
template <class Shape>
__device__ __forceinline__ auto form_of(const GroupedGemmArgs& args) {
    constexpr bool kClamped = Shape::clamped != 0, kFastMath = Shape::fast_math != 0;
    if constexpr (Shape::plain != 0) return LimitedForm<kClamped, PlainSwiglu<kFastMath>>{args.clamp};
    else {
        using Form = GatedActivation<Shape::function, kFastMath, Shape::biased != 0>;
        return LimitedForm<kClamped, Form>{args.clamp, {args.alpha, args.up_offset, args.bias}};
    }
}

template <class Shape>
__device__ __forceinline__ auto epilogue_of(const GroupedGemmArgs& args) {
    constexpr int kN = Shape::n, kRows = Shape::tile_rows;
    constexpr int kCopies = Shape::k / kBlock > Shape::stages ? 1 : kGroups;
    if constexpr (Shape::row_scales != 0) {
        if constexpr (Shape::swiglu != 0) {
            using Form = decltype(form_of<Shape>(args));
            return TransposedActivationEpilogue<kN, kRows, Form, kCopies>{
                {args.a_scales, args.b_scales, args.row_weights}, form_of<Shape>(args)};
        } else
            return TransposedBf16Epilogue<kN, kRows, Shape::biased != 0, kCopies>{
                {args.a_scales, args.b_scales, args.row_weights}, args.bias};
    } else if constexpr (Shape::swiglu != 0) {
        using Form = decltype(form_of<Shape>(args));
        return SwigluFp8Epilogue<kN, Shape::power_of_two != 0, Form>{args.out_scales, args.row_weights,
                                                                     form_of<Shape>(args)};
    } else if constexpr (Shape::biased != 0) return BiasedBf16Epilogue<kN>{args.bias, args.row_weights};
    else return Bf16Epilogue<kN>{};
}

template <class Shape>
__device__ __forceinline__ auto maps_of(const GroupedGemmArgs& args) {
    if constexpr (kInTurn<Shape>) return WindowRows{args.a_windows};
    else return MatrixRows{args.a};
}

template <class Shape>
__device__ __forceinline__ auto rows_of(const GroupedGemmArgs& args) {
    using Maps = decltype(maps_of<Shape>(args));
    if constexpr (Shape::row_scales != 0) return ScaledRows<Shape::k, Maps>{maps_of<Shape>(args)};
    else return BlockScaledRows<Shape::k, Maps>{maps_of<Shape>(args), args.a_scale_map, args.a_scales};
}

template <class Shape>
__device__ __forceinline__ auto weights_of(const GroupedGemmArgs& args) {
    constexpr bool kOnce = Shape::weights_once != 0;
    constexpr int kN = Shape::n, kK = Shape::k, kMostRows = Shape::tile_rows;
    if constexpr (Shape::four_bits != 0) return FourBitWeights<kN, kK, kMostRows, kOnce>{args.four_bits};
    else if constexpr (Shape::row_scales != 0) return ChannelScaledWeights<kN, kK, kMostRows, kOnce>{args.b};
    else {
        using Columns = typename decltype(epilogue_of<Shape>(args))::Columns;
        return BlockScaledWeights<Shape::n, Shape::k, Columns, kOnce>{args.b, args.b_scales};
    }
}

template <class Shape, int64 kRowBytes, class Shared>
__device__ __forceinline__ auto destination_of(const GroupedGemmArgs& args, const Shared& shared) {
    if constexpr (Shape::scatters != 0)
        return RowsToHomes<Shape::num_ranks>{args.row_homes, shared.peers, args.results, args.deadline.fault_claimed,
                                             kRowBytes};
    else return RowsInOrder<kRowBytes>{args.out};
}

// Of two GEMMs in turn the first takes rows as they arrive, and reports what it has stored. The second waits for that.
template <class Shape>
__device__ __forceinline__ auto gate_of(const GroupedGemmArgs& args, uint32 epoch) {
    if constexpr (Shape::awaits != 0)
        return OpenWhenArrived<Shape::num_ranks>{args.arrived, args.expected, args.deadline, epoch};
    else if constexpr (Shape::scatters != 0) return OpenWhenStored<kQuantizes<Shape>>{args.stored, args.stored_by};
    else return AlwaysOpen{};
}

template <class Shape>
__device__ __forceinline__ auto report_of(const GroupedGemmArgs& args) {
    if constexpr (Shape::awaits != 0) return ReportTiles{args.stored};
    else return NoReport{};
}

template <class Shape>
__device__ __forceinline__ auto bounds_of() {
    if constexpr (Shape::slots != 0) return BoundsInSlots<Shape::num_experts>{};
    else return BoundsByOffset<Shape::num_experts>{};
}

template <class Epilogue, class Bounds, class Weights, int kStages, int kRanks>
struct GemmShared {
    alignas(1024) OperandRing<kStages, typename Weights::ScaleRing, typename Weights::A, typename Weights::B> ring;
    typename Epilogue::Staged staging;
    typename Epilogue::Shared epilogue;
    Bounds bounds;
    TileBoard board;
    uint32 epoch;                        // of the call whose rows arrive
    uint64 peers[kRanks > 0 ? kRanks : 1];  // args.peers, if results are scattered
};

template <class Shape>
using CutOf = typename decltype(weights_of<Shape>(GroupedGemmArgs{}))::Cut;

// As all roles but the loader see them.
template <class Shape, class Shared>
__device__ __forceinline__ auto tiles_of(Shared& shared) {
    using Bounds = decltype(bounds_of<Shape>());
    using Cut = CutOf<Shape>;
    if constexpr (Shape::claims != 0) return ToldTiles<Cut, Bounds>{shared.board, shared.bounds};
    else return ExpertTiles<Cut, Bounds>(shared.bounds);
}

template <class Shape>
__device__ void grouped_gemm(const GroupedGemmArgs& args) {
    using Epilogue = decltype(epilogue_of<Shape>(args));
    using Rows = decltype(rows_of<Shape>(args));
    using Weights = decltype(weights_of<Shape>(args));
    using Bounds = decltype(bounds_of<Shape>());
    using Shared = GemmShared<Epilogue, Bounds, Weights, Shape::stages, Shape::num_ranks>;
    const Epilogue epilogue = epilogue_of<Shape>(args);
    const Rows rows = rows_of<Shape>(args);
    const Weights weights = weights_of<Shape>(args);
    const Trace<Shape::traced != 0> trace{args.trace};
    if (threadIdx.x == 0) trace.mark(kStarts, 0, kBegins);
    extern __shared__ __align__(1024) unsigned char memory[];
    static_assert(sizeof(Shared) <= Shape::shared_bytes, "launch.py asks for what this needs");
    auto& shared = *reinterpret_cast<Shared*>(memory);
    const auto destination = destination_of<Shape, Epilogue::kRowBytes>(args, shared);

    // Warpgroups 0 and 1 multiply. Of the last one, warp 0 loads, warp 1 loads beside it or quantises, warps 2 and 3 store.
    constexpr int kThreads = kGroupThreads * (kGroups + 1);
    constexpr bool kAlone = Shape::blocks_per_sm == 1;  // on its SM
    constexpr int kMathRegisters = kAlone ? 216 : 88, kOtherRegisters = kAlone ? 72 : 64;
    static_assert(kGroups * kMathRegisters + kOtherRegisters <= (kAlone ? 504 : 240), "what the launch gives three warpgroups");
    const int32 block = cluster_rank();

    // Rows still arrive when the first of two GEMMs begins, and that one still runs when the second does.
    uint32 epoch = 0;
    if constexpr (kInTurn<Shape>) {
        epoch = wait_for_bounds(args.begun, shared.epoch);
        let_next_kernel_begin();
    }
    if constexpr (Shape::scatters != 0)
        if (threadIdx.x < Shape::num_ranks) shared.peers[threadIdx.x] = args.peers[threadIdx.x];
    if constexpr (Shape::slots != 0) shared.bounds.fill(args.counts, args.capacity, kThreads);
    else shared.bounds.fill(args.offsets, kThreads);
    if (threadIdx.x == 0) {
        shared.ring.init(kLoaderArrivals + (Rows::kSecondWarp ? kSecondWarpArrivals : 0), kMathArrivals);
        shared.staging.init(kStagingArrivals, kStoreArrivals);
        shared.board.init(1 + kClusterBlocks * (Rows::kSecondWarp + kGroups * kGroupWarps + kStoreWarps));
        mbarrier_init_fence();
        rows.prefetch();
        weights.prefetch();
    }
    cluster_sync();
    if (threadIdx.x == 0) trace.mark(kStarts, 0, kEnds);
    const int group = __shfl_sync(~0u, threadIdx.x / kGroupThreads, 0);  // the compiler then knows that it is uniform
    if (group == kGroups) {
        keep_registers<kOtherRegisters>();
        const int warp = __shfl_sync(~0u, threadIdx.x % kGroupThreads / 32, 0), lane = threadIdx.x % 32;
        if (warp == 0 && is_elected()) {
            const auto gate = gate_of<Shape>(args, epoch);
            if constexpr (Shape::claims != 0)
                load_tiles(shared.ring, rows, weights,
                           ClaimingTiles<CutOf<Shape>, Bounds>(shared.board, shared.bounds, args.claimed, block), trace,
                           block, gate);
            else load_tiles(shared.ring, rows, weights, tiles_of<Shape>(shared), trace, block, gate);
        }
        if constexpr (Rows::kSecondWarp)
            if (warp == 1)
                rows.load_beside(shared.ring, weights, tiles_of<Shape>(shared), block, lane,
                                 gate_of<Shape>(args, epoch));
        if constexpr (kQuantizes<Shape>)
            if (warp == 1)
                RowQuantizer<Shape::k, CutOf<Shape>>{args.activations, args.activation_scales, args.stored,
                                                    args.stored_by, args.quantized}
                    .run(shared.bounds, lane);
        if (warp >= kGroupWarps - kStoreWarps)
            store_tiles<Epilogue>(shared.staging, destination, tiles_of<Shape>(shared), trace, block,
                                  threadIdx.x % (32 * kStoreWarps), report_of<Shape>(args));
        __syncwarp();
    } else {
        take_registers<kMathRegisters>();
        const int thread = threadIdx.x % kGroupThreads;
        if constexpr (Shape::row_scales != 0)
            multiply_tiles_transposed<Weights>(shared.ring, epilogue, shared.staging, shared.epilogue,
                                               tiles_of<Shape>(shared), trace, block, group, thread);
        else
            multiply_tiles<Weights>(shared.ring, epilogue, shared.staging, shared.epilogue, tiles_of<Shape>(shared),
                                    trace, block, group, thread);
    }
    if constexpr (kInTurn<Shape>) wait_for_earlier_kernels();  // whoever waits for this one waits for those before it
    cluster_sync();  // no block leaves while the other arrives on its barriers
}
