// Grouped FP8 GEMM: rows that are grouped by expert times each expert's weights, with block scales.
//
//   out[row, n] = sum over blocks k of a_scale[row, k] * b_scale[e, n / 128, k] * (a[row, k:] . b[e, n, k:])
//
// With SwiGLU, b has 8 rows of gates and 8 of ups in turn, and the output is quantised.
//
// Persistent, in clusters of two blocks. The roles are in device/roles; here they get their types and their threads.
#pragma once
#include "device/ptx/grid.cuh"
#include "device/roles/biased_bf16_epilogue.cuh"
#include "device/roles/claimed_tiles.cuh"
#include "device/roles/expert_tiles.cuh"
#include "device/roles/gathered_rows.cuh"
#include "device/roles/load.cuh"
#include "device/roles/math.cuh"
#include "device/roles/store.cuh"
#include "device/roles/swiglu_fp8_epilogue.cuh"

struct GroupedGemmArgs {
    TensorMap a;                  // [rows, K] E4M3, boxes of 128 values x 32 rows, swizzled; unless a_windows is used
    TensorMap b;                  // [E, N, K] E4M3, boxes of 128 values x 128 rows
    TensorMap a_scale_map;        // [rows, K / 128], boxes of 8 values x 128 rows; if K % 512 == 0 and not gathered
    const unsigned char* a_rows;  // gathered: [any, K] E4M3
    const float* a_scales;        // [rows, K / 128]; gathered: in the order of a_rows
    const int32* row_index;       // gathered: [rows], which of a_rows each row is
    const int32* copied;          // gathered: null, or [2] (first, n): rows 0..n-1 are also a's, from `first` on
    const float* b_scales;        // [E, N / 128, K / 128]
    const int32* offsets;         // [E + 1] first row of each expert; device memory; unused with slots
    void* out;                    // [rows, N] bfloat16; SwiGLU: [rows, N / 2] E4M3
    const uint64* row_targets;    // scattered: [rows], addresses of output rows, which may be other GPUs'
    float* out_scales;            // SwiGLU: [rows, N / 256]
    const float* row_weights;     // SwiGLU, biased: [rows], or null for ones
    float clamp;                  // SwiGLU, clamped: the most of a gate, and the largest magnitude of an up
    int32 capacity;               // slots: S, the places of each expert; expert e has rows e * S and on
    uint64* trace;                // traced: [blocks][kTraceRoles][kTracedTiles][2] nanoseconds
    int32 first_expert;           // the range of experts whose rows this launch multiplies
    int32 end_expert;
    const int32* counts;          // slots: [E] rows of each expert; device memory
    const float* bias;            // biased: [E, N], in the order of b's rows
    float alpha;                  // SwiGLU of another form: as in Activation
    float up_offset;
    uint32* stored;               // gathered, scattered: counts of stored tiles, see device/roles/gate.cuh
    const TensorMap* a_windows;   // gathered, scattered: maps of copied rows, of [rows, K], see WindowRows
    uint32* claimed;              // [1] count of claimed tiles, 0 before and after
    uint32 stored_by;             // scattered: warps that store a tile of rows
    uint32 padding[9];            // tensor maps are aligned to 64 bytes, and so is this
};

// The choices of a variant. Each is made once, here: what becomes of sums, where rows come from, where they go, and
// which rows are which expert's.
template <class Shape>
__device__ __forceinline__ auto epilogue_of(const GroupedGemmArgs& args) {
    constexpr bool kClamped = Shape::clamped != 0, kPowerOfTwo = Shape::power_of_two != 0;
    constexpr bool kFastMath = Shape::fast_math != 0, kBiased = Shape::biased != 0;
    if constexpr (Shape::swiglu != 0 && Shape::plain != 0)
        return SwigluFp8Epilogue<Shape::n, kClamped, kPowerOfTwo, kFastMath>{args.out_scales, args.row_weights,
                                                                             args.clamp};
    else if constexpr (Shape::swiglu != 0) {
        using Form = GatedActivation<Shape::function, kFastMath, kBiased>;
        return SwigluFp8Epilogue<Shape::n, kClamped, kPowerOfTwo, kFastMath, Form>{
            args.out_scales, args.row_weights, args.clamp, {args.alpha, args.up_offset, args.bias}};
    } else if constexpr (kBiased) return BiasedBf16Epilogue<Shape::n>{args.bias, args.row_weights};
    else return Bf16Epilogue<Shape::n>{};
}

template <class Shape>
__device__ __forceinline__ auto rows_of(const GroupedGemmArgs& args) {
    if constexpr (Shape::gathers != 0)
        return GatheredRows<Shape::k>{{args.a_windows}, args.a_scale_map, args.a_rows,
                                      args.a_scales,    args.row_index,   args.copied};
    else if constexpr (Shape::scatters != 0)
        return TiledRows<Shape::k, WindowRows>{{args.a_windows}, args.a_scale_map, args.a_scales};
    else return TiledRows<Shape::k>{{args.a}, args.a_scale_map, args.a_scales};
}

template <class Shape, int64 kRowBytes>
__device__ __forceinline__ auto destination_of(const GroupedGemmArgs& args) {
    if constexpr (Shape::scatters != 0) return RowsByAddress{args.row_targets};
    else return RowsInOrder<kRowBytes>{args.out};
}

// Of two GEMMs in turn the first gathers, and reports what it has stored. The second waits for that, and scatters.
template <class Shape>
__device__ __forceinline__ auto gate_of(const GroupedGemmArgs& args) {
    if constexpr (Shape::scatters != 0) return OpenWhenStored{args.stored, args.stored_by};
    else return AlwaysOpen{};
}

template <class Shape>
__device__ __forceinline__ auto report_of(const GroupedGemmArgs& args) {
    if constexpr (Shape::gathers != 0) return ReportTiles{args.stored};
    else return NoReport{};
}

template <class Shape>
__device__ __forceinline__ auto bounds_of() {
    if constexpr (Shape::slots != 0) return BoundsInSlots<Shape::num_experts>{};
    else return BoundsByOffset<Shape::num_experts>{};
}

template <class Rows, class Epilogue, class Bounds, int kStages>
struct GemmShared {
    alignas(1024) OperandRing<kStages> ring;
    Staging<Epilogue::kTileRowBytes> staging;
    typename Epilogue::Shared epilogue;
    typename Rows::Shared rows;
    ExpertTable<Bounds> experts;
    TileBoard board;
};

// As all roles but the loader see them.
template <class Shape, class Shared>
__device__ __forceinline__ auto tiles_of(Shared& shared) {
    using Bounds = decltype(bounds_of<Shape>());
    if constexpr (Shape::claims != 0) return ToldTiles<Shape::n, Bounds>{shared.board, shared.experts.bounds};
    else return ExpertTiles<Shape::n, Bounds>(shared.experts);
}

template <class Shape>
__device__ void grouped_gemm(const GroupedGemmArgs& args) {
    using Epilogue = decltype(epilogue_of<Shape>(args));
    using Rows = decltype(rows_of<Shape>(args));
    using Weights = Fp8Weights<Shape::n, Shape::k, typename Epilogue::Columns>;
    using Bounds = decltype(bounds_of<Shape>());
    using Shared = GemmShared<Rows, Epilogue, Bounds, Shape::stages>;
    const Epilogue epilogue = epilogue_of<Shape>(args);
    const Rows rows = rows_of<Shape>(args);
    const Weights weights{args.b, args.b_scales};
    const auto destination = destination_of<Shape, Epilogue::kRowBytes>(args);
    const Trace<Shape::traced != 0> trace{args.trace};
    extern __shared__ __align__(1024) unsigned char memory[];
    static_assert(sizeof(Shared) <= Shape::shared_bytes, "launch.py asks for what this needs");
    auto& shared = *reinterpret_cast<Shared*>(memory);

    // Warpgroups 0 and 1 multiply. Of the last one, warp 0 loads, warp 1 loads beside it, warps 2 and 3 store.
    constexpr int kThreads = kGroupThreads * (kGroups + 1);
    constexpr int kMathRegisters = 216, kOtherRegisters = 72;
    static_assert(kGroups * kMathRegisters + kOtherRegisters <= 504, "what the launch gives three warpgroups");
    const int32 block = cluster_rank();

    // What the kernel before it has read is there for the second of two GEMMs: that one began behind it.
    if constexpr (Shape::gathers != 0) {
        wait_for_earlier_kernels();
        let_next_kernel_begin();
    } else if constexpr (Shape::scatters != 0) let_next_kernel_begin();
    if constexpr (Shape::slots != 0) shared.experts.bounds.fill(args.counts, args.capacity, kThreads);
    else shared.experts.bounds.fill(args.offsets, kThreads);
    if (threadIdx.x == 0) {
        shared.experts.first_expert = args.first_expert;
        shared.experts.end_expert = args.end_expert;
        shared.ring.init(kLoaderArrivals + (Rows::kSecondWarp ? kSecondWarpArrivals : 0), kMathArrivals);
        shared.staging.init(kStagingArrivals, kStoreArrivals);
        shared.board.init(1 + kClusterBlocks * (Rows::kSecondWarp + kGroups * kGroupWarps + kStoreWarps));
        mbarrier_init_fence();
        rows.prefetch();
        tensor_prefetch(&weights.map);
    }
    cluster_sync();
    const int group = __shfl_sync(~0u, threadIdx.x / kGroupThreads, 0);  // the compiler then knows that it is uniform
    if (group == kGroups) {
        keep_registers<kOtherRegisters>();
        const int warp = threadIdx.x % kGroupThreads / 32, lane = threadIdx.x % 32;
        if (warp == 0 && lane == 0) {
            const auto gate = gate_of<Shape>(args);
            if constexpr (Shape::claims != 0)
                load_tiles(shared.ring, rows, weights,
                           ClaimingTiles<Shape::n, Bounds>(shared.board, shared.experts, args.claimed, block), trace,
                           block, gate);
            else load_tiles(shared.ring, rows, weights, tiles_of<Shape>(shared), trace, block, gate);
        }
        if constexpr (Rows::kSecondWarp)
            if (warp == 1)
                rows.load_beside(shared.ring, shared.rows, weights, tiles_of<Shape>(shared), trace, block, lane,
                                 gate_of<Shape>(args));
        if (warp >= kGroupWarps - kStoreWarps)
            store_tiles<Epilogue>(shared.staging, destination, tiles_of<Shape>(shared), trace, block,
                                  threadIdx.x % (32 * kStoreWarps), report_of<Shape>(args));
        __syncwarp();
    } else {
        take_registers<kMathRegisters>();
        multiply_tiles<Rows, Weights>(shared.ring, epilogue, shared.staging, shared.epilogue, tiles_of<Shape>(shared),
                                      trace, block, group, threadIdx.x % kGroupThreads);
    }
    if constexpr (Shape::scatters != 0) wait_for_earlier_kernels();  // whoever waits for this one waits for both
    cluster_sync();  // no block leaves while the other arrives on its barriers
}
