// The math warpgroups of recipe "row". They multiply 64 output columns each, as the rows of a product, with all rows of the
// tile, as its columns: so a tile with few rows takes less time. Sums come out transposed (transposed_epilogue.cuh).
//
// Scales are of whole rows and channels, so the tensor core adds up all of K. It keeps 13 bits below the largest term of a
// sum.
#pragma once
#include "device/roles/math.cuh"
#include "device/roles/transposed_epilogue.cuh"

// How operand A comes to the tensor core, by how it lies in a stage:
//
//   kUnrolled            blocks of K in a round of the main loop
//   kColumnStep          there is a loop for each multiple of it, as numbers of columns; at most kRowBox
//   start<kColumns>(ring, stage, b, sums, done)    begins the products of a block, and calls `done` once those of the
//                        block before are done. `b` tells where operand B is, as a descriptor does.
template <class Ring, class A = typename Ring::A>
struct RowsOfA;

// The tensor core reads it there.
template <class Ring>
struct RowsOfA<Ring, OperandA> {
    static constexpr int kUnrolled = 2, kColumnStep = 16;
    uint32 first;  // where this warpgroup's are in stage 0, as a descriptor tells it

    __device__ __forceinline__ explicit RowsOfA(const MathThread& self)
        : first(wgmma_tile(self.a + self.group * kGroupRows * OperandA::kRowBytes)) {}

    template <int kColumns, int kSums, class Done>
    __device__ __forceinline__ void start(const Ring&, int stage, uint32 b, float (&sums)[kSums], Done done) {
        const uint32 a = first + stage * (OperandA::kStageBytes >> 4);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) ProductOf<kColumns>::add(sums, a + 2 * step, b + 2 * step);
        wgmma_commit();
        wgmma_wait<1>();
        done();
    }
};

// Four bits are decoded in registers, step by step, while steps before are multiplied. Beside the sums of 128 columns there
// are registers for the steps of a whole block. Beside those of more, and where two blocks share an SM, there are only for
// two, and beside 256 columns for fewer loops: else the compiler lets each product wait (C7512).
template <class Ring>
struct RowsOfA<Ring, FourBitOperand> {
    static constexpr int kMostRows = Ring::B::kStageBytes / Ring::B::kRowBytes, kSteps = 4;
    static constexpr int kUnrolled = 1, kColumnStep = kMostRows > 160 ? 32 : 16;
    static constexpr int kHeld = kMostRows == 128 ? kSteps : 2;
    uint32 held[kHeld][4];
    const int group, thread;

    __device__ __forceinline__ explicit RowsOfA(const MathThread& self) : group(self.group), thread(self.thread) {}

    template <int kColumns, int kSums, class Done>
    __device__ __forceinline__ void start(const Ring& ring, int stage, uint32 b, float (&sums)[kSums], Done done) {
        const FourBitRows rows(ring.a[stage], group, thread);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint32(&now)[4] = held[step % kHeld];
            rows.decode(step, now);
            wgmma_fence();
            ProductOf<kColumns>::add_held(sums, now, b + 2 * step);
            wgmma_commit();
            wgmma_wait<kHeld - 1>();  // what is to be decoded next has been multiplied before
            if (step == kHeld - 2) done();
        }
    }
};

// All blocks of K of a tile of at most kColumns rows. A stage is free when the products of the next one have begun and its
// own are done. The last block of K comes behind the gate, so what the epilogue needs of each row can be read while its
// products are under way.
template <int kColumns, class Epilogue, class Ring, class At>
__device__ __forceinline__ typename Epilogue::Loaded multiply_columns(Ring& ring, const Epilogue& epilogue,
                                                                      const Tile& tile, const MathThread& self,
                                                                      const At& at, int blocks,
                                                                      float (&sums)[Epilogue::kSums]) {
    static_assert(Ring::kStages >= 2, "a stage is free when the next one is here");
    constexpr uint32 kStageB = Ring::B::kStageBytes >> 4;  // as descriptors count
    const uint32 first_b = wgmma_tile(self.b);
    const auto release = [&](int k) {
        if (self.lane < 2) mbarrier_arrive_there(self.empty + RingUse<Ring::kStages>(at.blocks + k).stage * 8);
    };
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) sums[i] = 0.0f;
    asm volatile("" : "+r"(blocks));  // a loop of one round that is optimised away leaves wgmma unordered (C7519)
    RowsOfA<Ring> rows(self);
#pragma unroll(RowsOfA<Ring>::kUnrolled)
    for (int k = 0; k < blocks; ++k) {
        const RingUse<Ring::kStages> use(at.blocks + k);
        mbarrier_wait(&ring.full[use.stage], use.parity);
        rows.template start<kColumns>(ring, use.stage, first_b + use.stage * kStageB, sums, [&] {
            if (k > 0) release(k - 1);
        });
    }
    const auto loaded = epilogue.load(tile, self.group, self.thread);
    wgmma_wait<0>();
    release(blocks - 1);
    return loaded;
}

// The same for any tile.
template <class Epilogue, class Ring, class At>
__device__ __forceinline__ typename Epilogue::Loaded multiply_transposed(Ring& ring, const Epilogue& epilogue,
                                                                         const Tile& tile, const MathThread& self,
                                                                         const At& at, int blocks,
                                                                         float (&sums)[Epilogue::kSums]) {
    constexpr int kMost = 2 * Epilogue::kSums, kStep = RowsOfA<Ring>::kColumnStep;
#define MULTIPLY(columns)                                                                    \
    case columns:                                                                            \
        if constexpr (columns < kMost && columns % kStep == 0)                               \
            return multiply_columns<columns>(ring, epilogue, tile, self, at, blocks, sums)
    switch ((tile.rows + kStep - 1) / kStep * kStep) {
        MULTIPLY(16);
        MULTIPLY(32);
        MULTIPLY(48);
        MULTIPLY(64);
        MULTIPLY(80);
        MULTIPLY(96);
        MULTIPLY(112);
        MULTIPLY(128);
        MULTIPLY(144);
        MULTIPLY(160);
        MULTIPLY(176);
        MULTIPLY(192);
        MULTIPLY(208);
        MULTIPLY(224);
        MULTIPLY(240);
        default: return multiply_columns<kMost>(ring, epilogue, tile, self, at, blocks, sums);
    }
#undef MULTIPLY
}

template <class Weights, class Ring, class Epilogue, class Staging, class Tiles, class Trace>
__device__ __forceinline__ void multiply_tiles_transposed(Ring& ring, const Epilogue& epilogue, Staging& staging,
                                                          typename Epilogue::Shared& shared, Tiles tiles,
                                                          const Trace& trace, int32 block, int group, int thread) {
    const MathThread self = math_thread(ring, block, group, thread);
    for (Position<Weights::kBlocks> at{0}; tiles.next(at.tiles()); at.advance()) {
        if (thread == 0) trace.mark(kMultiplies + group, at.tiles(), kBegins);
        float sums[Epilogue::kSums];
        const auto loaded =
            multiply_transposed(ring, epilogue, tiles.tile(block), self, at, Weights::kBlocks, sums);
        tiles.forget();  // the tile is found again, so that it takes no registers in the main loop
        if (thread == 0) trace.mark(kMultiplies + group, at.tiles(), kEnds);
        if (thread == 0) trace.mark(kStages + group, at.tiles(), kBegins);
        epilogue.stage(staging, shared, loaded, sums, tiles.tile(block), at.tiles(), group, thread);
        if (thread == 0) trace.mark(kStages + group, at.tiles(), kEnds);
    }
}
