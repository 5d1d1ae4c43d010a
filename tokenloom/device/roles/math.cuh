// The math warpgroups of recipe "block": 64 rows x 256 columns each, or half of the columns if the expert has at most 64
// rows. They multiply 128 columns of a stage into a temporary and add it, scaled, to float32 registers. While one
// warpgroup adds, the other multiplies. Those of recipe "row" are in transposed_math.cuh.
#pragma once
#include "device/ptx/cluster.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/roles/trace.cuh"
#include "device/roles/weights.cuh"

constexpr int kMathArrivals = kClusterBlocks * kGroups * kGroupWarps;  // on an empty stage: each warp of both blocks

__device__ __forceinline__ void start_product(float (&product)[64], uint32 a, uint32 b) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) wgmma_e4m3(product, a + 2 * step, b + 2 * step, step);
    wgmma_commit();
}

// For one block of K: the scales of this thread's two rows, times those of a tile's halves (of its gates and its ups).
struct Scales {
    float low[2], high[2];

    template <class Ring, class Place>
    __device__ __forceinline__ void load(const Ring& ring, const Place& place, int row) {
        const float low_row = ring.scales.a[place.buffer][row][place.slot];
        const float high_row = ring.scales.a[place.buffer][row + 8][place.slot];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float columns = ring.scales.b[place.buffer][i][place.slot];
            low[i] = low_row * columns;
            high[i] = high_row * columns;
        }
    }
};

// Registers 4j + {0, 1} are row lane / 4, columns 8j + 2 * (lane % 4) + {0, 1}; 4j + {2, 3} are 8 rows below. If
// columns take turns, even j are gates and odd j ups.
template <class Columns>
__device__ __forceinline__ void add_scaled(float (&sums)[64], const float (&product)[64], const Scales& scales,
                                           int half) {
    // What the compiler knows stays known; what it does not costs one select instead of 64.
    const float low[2] = {Columns::kInTurns || half == 0 ? scales.low[0] : scales.low[1], scales.low[1]};
    const float high[2] = {Columns::kInTurns || half == 0 ? scales.high[0] : scales.high[1], scales.high[1]};
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        const int columns = Columns::kInTurns ? i / 4 % 2 : 0;
        sums[i] = __fmaf_rn(product[i], i & 2 ? high[columns] : low[columns], sums[i]);
    }
}

// One thread of a math warpgroup, and shared-memory addresses that it uses in every tile.
struct MathThread {
    int group, thread;  // its warpgroup, and its number in there
    int lane, row;      // row: of the warpgroup's 64, its first
    uint32 a, b;        // the first stage
    uint32 empty;       // the barriers on which it arrives: lane 0 on its own block's, lane 1 on the other's
};

template <class Ring>
__device__ __forceinline__ MathThread math_thread(Ring& ring, int32 block, int group, int thread) {
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
    const uint32 a = shared_address(ring.a[0]), b = shared_address(ring.b[0]);
    const uint32 empty = map_to_block(shared_address(ring.empty), block ^ (lane & 1));
    return {group, thread, lane, row, a, b, empty};
}

// The part of a tile that a warpgroup multiplies.
struct MathPart {
    uint32 a, b;     // descriptors of its rows and its columns in the first stage
    int row;         // this thread's first row of the tile
    int first_half;  // of the columns
};

// All blocks of K of a tile, kChunks times 128 of its columns, whose scales change with blocks of K.
template <class Weights, class Epilogue, class Ring, class At, int kChunks>
__device__ __forceinline__ void multiply_block_scaled(Ring& ring, const MathThread& self, const MathPart& part,
                                                      const At& at, int blocks, float (&sums)[kChunks][64]) {
    constexpr uint32 kStageA = OperandA::kStageBytes >> 4;  // as descriptors count
    constexpr uint32 kStageB = Ring::B::kStageBytes >> 4;
#pragma unroll(Epilogue::kUnrolled)
    for (int k = 0; k < blocks; ++k) {
        const RingUse<Ring::kStages> use(at.blocks + k);
        mbarrier_wait(&ring.full[use.stage], use.parity);
        Scales scales;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            float product[64];
            start_product(product, part.a + use.stage * kStageA,
                          part.b + use.stage * kStageB + chunk * (kStageB / kHalves));
            if (chunk == 0)  // while they multiply
                scales.load(ring, ScalePlace<Weights::kBlocks, Ring::kStages>(at, k), part.row);
            wgmma_wait<0>();
            if (chunk == kChunks - 1 && self.lane < 2) mbarrier_arrive_there(self.empty + use.stage * 8);
            add_scaled<typename Weights::Columns>(sums[chunk], product, scales, part.first_half + chunk);
        }
    }
}

// The sums come out scaled.
template <class Weights, class Epilogue, class Ring, class At, int kChunks>
__device__ __forceinline__ void multiply_tile(Ring& ring, const MathThread& self, const MathPart& part, const At& at,
                                              float (&sums)[kChunks][64]) {
    int blocks = Weights::kBlocks;
    asm volatile("" : "+r"(blocks));  // a loop of one round that is optimised away leaves wgmma unordered (C7519)
#pragma unroll
    for (auto& chunk : sums)
#pragma unroll
        for (float& sum : chunk) sum = 0.0f;
    multiply_block_scaled<Weights, Epilogue>(ring, self, part, at, blocks, sums);
}

// A tile that has no rows for this warpgroup: it frees the stages at once.
template <class Weights, class Ring, class At>
__device__ __forceinline__ void skip_tile(Ring& ring, const MathThread& self, const At& at) {
    for (int k = 0; k < Weights::kBlocks; ++k) {
        const RingUse<Ring::kStages> use(at.blocks + k);
        mbarrier_wait(&ring.full[use.stage], use.parity);
        __syncwarp();  // or a lane that is late could miss two phases
        if (self.lane < 2) mbarrier_arrive_there(self.empty + use.stage * 8);
    }
}

// The tile and its addresses are computed again here, so that they take no registers in the main loop.
template <class Epilogue, class Staging, class Tiles, class At, class Trace, int kChunks>
__device__ __forceinline__ void stage_sums(const Epilogue& epilogue, Staging& staging,
                                           typename Epilogue::Shared& shared, float (&sums)[kChunks][64], Tiles& tiles,
                                           const At& at, const Trace& trace, int32 block, int group, int thread) {
    tiles.forget();
    asm volatile("" : "+r"(thread));
    if (thread == 0) trace.mark(kMultiplies + group, at.tiles(), kEnds);
    if (thread == 0) trace.mark(kStages + group, at.tiles(), kBegins);
    epilogue.stage(staging, shared, sums, tiles.tile(block), at.tiles(), group, thread);
    if (thread == 0) trace.mark(kStages + group, at.tiles(), kEnds);
}

// One tile of one warpgroup: multiplied, and staged by the epilogue.
template <class Weights, class Ring, class Epilogue, class Staging, class Tiles, class At, class Trace>
__device__ __forceinline__ void compute_tile(Ring& ring, const Epilogue& epilogue, Staging& staging, typename Epilogue::Shared& shared, Tiles& tiles,
                                             const At& at,
                                             const Trace& trace, int32 block, const MathThread& self) {
    const Tile tile = tiles.tile(block);
    if (self.thread == 0) trace.mark(kMultiplies + self.group, at.tiles(), kBegins);
    if (self.group >= tile.groups() && !tile.halves) {
        skip_tile<Weights>(ring, self, at);
        staging.wait_for_room(at.tiles(), self.group);
        staging.publish(self.group, self.lane);
    } else if (!tile.halves) {
        float sums[kHalves][64];
        const uint32 own_a = wgmma_tile(self.a + self.group * kGroupRows * OperandA::kRowBytes);
        const MathPart part{own_a, wgmma_tile(self.b), self.group * kGroupRows + self.row, 0};
        multiply_tile<Weights, Epilogue>(ring, self, part, at, sums);
        stage_sums(epilogue, staging, shared, sums, tiles, at, trace, block, self.group, self.thread);
    } else {
        float sums[1][64];
        const uint32 own_b = wgmma_tile(self.b + self.group * kBlock * Ring::B::kRowBytes);
        const MathPart part{wgmma_tile(self.a), own_b, self.row, self.group};
        multiply_tile<Weights, Epilogue>(ring, self, part, at, sums);
        stage_sums(epilogue, staging, shared, sums, tiles, at, trace, block, self.group, self.thread);
    }
}

template <class Weights, class Ring, class Epilogue, class Staging, class Tiles, class Trace>
__device__ __forceinline__ void multiply_tiles(Ring& ring, const Epilogue& epilogue, Staging& staging, typename Epilogue::Shared& shared, Tiles tiles,
                                               const Trace& trace, int32 block, int group, int thread) {
    const MathThread self = math_thread(ring, block, group, thread);
    for (Position<Weights::kBlocks> at{0}; tiles.next(at.tiles()); at.advance())
        compute_tile<Weights>(ring, epilogue, staging, shared, tiles, at, trace, block, self);
}
