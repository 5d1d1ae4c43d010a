// Epilogues of GEMMs by themselves, for the emulator: sums come from memory, as wgmma would leave them in registers, and
// staged rows go to memory as they are. One block, the math warpgroups alone.
#pragma once
#include "device/roles/biased_bf16_epilogue.cuh"
#include "device/roles/swiglu_fp8_epilogue.cuh"
#include "device/roles/transposed_epilogue.cuh"

struct EpiloguesArgs {
    const float* sums;         // of one tile: [128][256], transposed [256][128]
    unsigned char* out;        // [rows of a tile][bytes of a tile's row]
    float* scales;             // [rows, N / 256]
    const float* row_weights;  // [rows]
    const float* bias;         // [experts, N]
    const float* row_scales;   // transposed: [rows]
    const float* channel_scales;  // transposed: [experts, N]
    float clamp, alpha, up_offset;
    int32 expert, row, rows, column;  // the tile
};

template <class Epilogue>
struct EpilogueShared {
    typename Epilogue::Staged staging;
    typename Epilogue::Shared epilogue;
};

// kChunks of the tile's halves for each warpgroup: both of its rows, or its half of the columns of all.
template <int kChunks, class Epilogue>
void run_epilogue(const EpiloguesArgs& args, const Epilogue& epilogue) {
    auto& shared = *reinterpret_cast<EpilogueShared<Epilogue>*>(emulated_shared());
    const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads, lane = thread % 32;
    if (threadIdx.x == 0) shared.staging.init(kStagingArrivals, 1);
    __syncthreads();
    const int first_row = kChunks == kHalves ? group * kGroupRows : 0, first_half = kChunks == kHalves ? 0 : group;
    float sums[kChunks][64];
    for (int i = 0; i < kChunks * 64; ++i) {
        const int row = first_row + thread / 32 * 16 + lane / 4 + (i & 2 ? 8 : 0);
        const int column = (first_half + i / 64) * kBlock + i % 64 / 4 * 8 + lane % 4 * 2 + i % 2;
        sums[i / 64][i % 64] = args.sums[row * kRowsOfB + column];
    }
    const Tile tile{args.expert, args.row, args.rows, args.column, kChunks != kHalves};
    epilogue.stage(shared.staging, shared.epilogue, sums, tile, 0, group, thread);
    mbarrier_wait(&shared.staging.full[group], 0);
    constexpr int kBytes = Epilogue::kTileRowBytes / kHalves * kChunks;
    const int from = kChunks == kHalves ? 0 : group * kBytes;
    for (int i = thread; i < kGroupRows * kBytes; i += kGroupThreads) {
        const int row = i / kBytes, byte = from + i % kBytes;
        args.out[(first_row + row) * Epilogue::kTileRowBytes + byte] =
            shared.staging.rows[group][Epilogue::Staged::Lines::place(row, byte / 16) + byte % 16];
    }
}

// Each warpgroup has its half of the columns, for all rows.
template <class Epilogue>
void run_transposed(const EpiloguesArgs& args, const Epilogue& epilogue) {
    auto& shared = *reinterpret_cast<EpilogueShared<Epilogue>*>(emulated_shared());
    const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads, lane = thread % 32;
    if (threadIdx.x == 0) shared.staging.init(kStagingArrivals, 1);
    __syncthreads();
    float sums[Epilogue::kSums];
    for (int i = 0; i < Epilogue::kSums; ++i) {
        const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
        const int column = group * kGroupRows + thread / 32 * 16 + lane / 4 + (i & 2 ? 8 : 0);
        sums[i] = args.sums[row * kRowsOfA + column];
    }
    const Tile tile{args.expert, args.row, args.rows, args.column, false};
    epilogue.stage(shared.staging, shared.epilogue, epilogue.load(tile, group, thread), sums, tile, 0, group, thread);
    mbarrier_wait(&shared.staging.full[group], 0);
    constexpr int kBytes = Epilogue::Staged::kRowBytes;
    for (int i = thread; i < tile.rows * kBytes; i += kGroupThreads) {
        const int row = i / kBytes, byte = i % kBytes;
        args.out[row * Epilogue::kTileRowBytes + group * kBytes + byte] =
            shared.staging.rows[group][Epilogue::Staged::Lines::place(row, byte / 16) + byte % 16];
    }
}

template <class Shape>
void epilogues(const EpiloguesArgs& args) {
    constexpr int kChunks = Shape::halves ? 1 : kHalves, kN = Shape::n, kRows = kRowsOfB;
    if constexpr (Shape::transposed && Shape::swiglu) {
        using Form = LimitedForm<Shape::clamped != 0, GatedActivation<Shape::function, true, Shape::biased != 0>>;
        run_transposed(args, TransposedActivationEpilogue<kN, kRows, Form, kGroups>{
                                 {args.row_scales, args.channel_scales, args.row_weights},
                                 {args.clamp, {args.alpha, args.up_offset, args.bias}}});
    } else if constexpr (Shape::transposed) {
        run_transposed(args, TransposedBf16Epilogue<kN, kRows, Shape::biased != 0, kGroups>{
                                 {args.row_scales, args.channel_scales, args.row_weights}, args.bias});
    } else if constexpr (Shape::swiglu && Shape::plain) {
        using Form = LimitedForm<Shape::clamped != 0, PlainSwiglu<true>>;
        run_epilogue<kChunks>(args,
                              SwigluFp8Epilogue<Shape::n, false, Form>{args.scales, args.row_weights, {args.clamp}});
    } else if constexpr (Shape::swiglu) {
        using Form = LimitedForm<Shape::clamped != 0, GatedActivation<Shape::function, true, Shape::biased != 0>>;
        run_epilogue<kChunks>(args, SwigluFp8Epilogue<Shape::n, false, Form>{
                                        args.scales, args.row_weights,
                                        {args.clamp, {args.alpha, args.up_offset, args.bias}}});
    } else if constexpr (Shape::biased) {
        run_epilogue<kChunks>(args, BiasedBf16Epilogue<Shape::n>{args.bias, args.row_weights});
    } else {
        run_epilogue<kChunks>(args, Bf16Epilogue<Shape::n>{});
    }
}
