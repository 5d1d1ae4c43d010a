"""The roles of a GEMM serve a kernel that they were not written for."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest

from tests.kernels.test_kernels import check
from tests.support.small_kernels import needs_nvrtc
from tokenloom.jit import compiler
from tokenloom.jit.compiler import KernelSpec, Resources
from tokenloom.jit.kernel import TensorMap
from tokenloom.kernels.common import MAX_SHARED_BYTES, int32_fields, uint64_fields
from tokenloom.kernels.gemm import launch


class TwoGemmsArgs(ctypes.Structure):
    """Mirror of TwoGemmsArgs in SOURCE."""

    _fields_ = [
        ("a", TensorMap),
        ("a_scale_map", TensorMap),
        ("w1", TensorMap),
        ("h", TensorMap),
        ("h_scale_map", TensorMap),
        ("w2", TensorMap),
        *uint64_fields("a_scales", "w1_scales", "h_values", "h_scales", "w2_scales", "out", "order", "ready"),
        *int32_fields("num_tiles", "padding"),
        *uint64_fields("row_weights"),
        ("clamp", ctypes.c_float),
        *int32_fields("spare"),
        *uint64_fields("no_trace"),
        ("more", ctypes.c_uint64 * 4),
    ]


SOURCE = """
#include "device/roles/bf16_epilogue.cuh"
#include "device/roles/load.cuh"
#include "device/roles/math.cuh"
#include "device/roles/store.cuh"
#include "device/roles/swiglu_fp8_epilogue.cuh"

struct TwoGemmsArgs {
    TensorMap a, a_scale_map, w1, h, h_scale_map, w2;
    const float *a_scales, *w1_scales;
    void* h_values;
    float* h_scales;
    const float* w2_scales;
    void* out;
    const int32* order;   // [num_tiles][4]: expert, row, rows, column; the column has bit 0 set for GEMM2
    const uint32* ready;  // [num_tiles]: not 0 when the rows of a tile are there
    int32 num_tiles, padding;
    const float* row_weights;
    float clamp;
    int32 spare;
    uint64* no_trace;
    uint64 more[4];
};

constexpr int kHidden = 7168, kIntermediate = 2048;

// Tiles of both GEMMs, in the order of a list. Whoever loads waits for their rows.
template <bool kWaits>
struct ListedTiles {
    const TwoGemmsArgs& args;
    int32 at;

    __device__ explicit ListedTiles(const TwoGemmsArgs& of) : args(of), at(blockIdx.x / 2 - gridDim.x / 2) {}
    __device__ bool next(uint32) {
        at += gridDim.x / 2;
        if (at >= args.num_tiles) return false;
        if (kWaits)
            while (load_acquire_gpu(args.ready + at) == 0) {
            }
        return true;
    }
    __device__ bool second() const { return args.order[at * 4 + 3] & 1; }
    __device__ Tile tile(int32 block) const {
        const int32* found = args.order + at * 4;
        return {found[0], found[1], found[2], (found[3] & ~1) + block * kTileColumns, found[2] <= kGroupRows};
    }
    __device__ void before_block(int, int) const {}
    __device__ void forget() { asm volatile("" : "+r"(at)); }
};

// Tiles have one of two lengths of K, so there is one count for each thing.
struct MixedPosition {
    uint32 blocks, number, buffers;
    __device__ __forceinline__ uint32 tiles() const { return number; }
    __device__ __forceinline__ uint32 scale_buffers() const { return buffers; }
    __device__ __forceinline__ void advance(int more_blocks) {
        blocks += more_blocks;
        buffers += more_blocks / kScaleBlocks;
        ++number;
    }
};

using Swiglu = SwigluFp8Epilogue<2 * kIntermediate, false, false, true>;
using Plain = Bf16Epilogue<kHidden>;
using Rows1 = BlockScaledRows<kHidden>;
using Rows2 = BlockScaledRows<kIntermediate>;
using Weights1 = BlockScaledWeights<2 * kIntermediate, kHidden, Swiglu::Columns>;
using Weights2 = BlockScaledWeights<kHidden, kIntermediate, Plain::Columns>;

struct TwoGemmsShared {
    alignas(1024) OperandRing<3, BlockScaleRing> ring;
    Staging<Plain::kTileRowBytes> staging;
    Swiglu::Shared swiglu;
    Plain::Shared plain;
};

template <class Shape>
__device__ void two_gemms(const TwoGemmsArgs& args) {
    extern __shared__ __align__(1024) unsigned char memory[];
    static_assert(sizeof(TwoGemmsShared) <= Shape::shared_bytes, "the test asks for what this needs");
    auto& shared = *reinterpret_cast<TwoGemmsShared*>(memory);
    const Rows1 rows1{{args.a}, args.a_scale_map, args.a_scales};
    const Rows2 rows2{{args.h}, args.h_scale_map, args.a_scales};
    const Weights1 weights1{args.w1, args.w1_scales};
    const Weights2 weights2{args.w2, args.w2_scales};
    const Swiglu swiglu{args.h_scales, args.row_weights, args.clamp};
    const Plain plain{};
    const Trace<false> trace{args.no_trace};
    const int32 block = cluster_rank();
    if (threadIdx.x == 0) {
        shared.ring.init(kLoaderArrivals, kMathArrivals);
        shared.staging.init(kStagingArrivals, kStoreArrivals);
        mbarrier_init_fence();
    }
    cluster_sync();
    const int group = __shfl_sync(~0u, threadIdx.x / kGroupThreads, 0);
    const int thread = threadIdx.x % kGroupThreads;
    MixedPosition at{0, 0, 0};
    if (group == kGroups) {
        keep_registers<72>();
        if (thread == 0) {
            for (ListedTiles<true> tiles(args); tiles.next(at.number);) {
                if (tiles.second()) {
                    load_tile(shared.ring, rows2, weights2, tiles, at, block);
                    at.advance(Weights2::kBlocks);
                } else {
                    load_tile(shared.ring, rows1, weights1, tiles, at, block);
                    at.advance(Weights1::kBlocks);
                }
            }
        } else if (thread >= 64) {
            const RowsInOrder<Swiglu::kRowBytes> to_h{args.h_values};
            const RowsInOrder<Plain::kRowBytes> home{args.out};
            for (ListedTiles<false> tiles(args); tiles.next(at.number); ++at.number) {
                if (tiles.second()) store_tile<Plain>(shared.staging, home, tiles.tile(block), at.number, thread - 64);
                else store_tile<Swiglu>(shared.staging, to_h, tiles.tile(block), at.number, thread - 64);
            }
        }
        __syncwarp();
    } else {
        take_registers<216>();
        const MathThread self = math_thread(shared.ring, block, group, thread);
        for (ListedTiles<false> tiles(args); tiles.next(at.number);) {
            if (tiles.second()) {
                compute_tile(shared.ring, weights2, plain, shared.staging, shared.plain, tiles, at, trace,
                                       block, self);
                at.advance(Weights2::kBlocks);
            } else {
                compute_tile(shared.ring, weights1, swiglu, shared.staging, shared.swiglu, tiles, at, trace,
                                       block, self);
                at.advance(Weights1::kBlocks);
            }
        }
    }
    cluster_sync();
}
"""


@dataclass(frozen=True)
class InlineSpec(KernelSpec):
    """A kernel whose text is here instead of in a file."""

    def source(self) -> str:
        return super().source().replace(f'#include "{self.path}"', SOURCE)


@needs_nvrtc
def test_numbers_are_the_same_on_both_sides() -> None:
    """Tensor maps, shared memory and traces are made with Python's copies of these constants."""
    numbers = {
        "kClusterBlocks": launch.CLUSTER,
        "kTileRows": launch.TILE_ROWS,
        "kTileColumns": launch.TILE_COLUMNS,
        "kBlock": launch.BLOCK,
        "kScaleBlocks": launch.SCALE_BLOCKS,
        "RowOperand::kBoxRows": launch.A_BOX_ROWS,
        "WeightOperand::kBoxRows": launch.B_BOX_ROWS,
        "kTraceRoles": len(launch.TRACE_ROLES),
        "kTracedTiles": launch.TRACED_TILES,
        "kGroupThreads * (kGroups + 1)": launch.THREADS,
        "Bf16Epilogue<256>::kTileRowBytes": launch.Bf16Epilogue.tile_row_bytes,
        "SwigluFp8Epilogue<256, 0, 0, 1>::kTileRowBytes": launch.SwigluFp8Epilogue.tile_row_bytes,
    }
    roles = [launch.TRACE_ROLES.index(name) for name in ("load", "multiply 0", "epilogue 0", "store", "start")]
    numbers |= dict(zip(("kLoads", "kMultiplies", "kStages", "kStores", "kStarts"), roles, strict=True))
    check(
        "kernels/gemm/grouped_gemm.cuh",
        *(f'static_assert({name} == {number}, "{name}");' for name, number in numbers.items()),
    )


@needs_nvrtc
@pytest.mark.slow  # 5 s of compiling
def test_two_gemms_in_one_kernel() -> None:
    """Both GEMMs of an expert behind one tile source: two lengths of K share the ring, two epilogues the staging; the
    loader waits for rows, and results go home. As exact about registers and wgmma as the kernels that ship."""
    spec = InlineSpec("two_gemms", "two_gemms", (), TwoGemmsArgs, 384, cluster=2, shared_bytes=MAX_SHARED_BYTES)
    _, log = compiler.compile_kernel(spec)
    assert "warning" not in log.lower(), log
    assert "C75" not in log, log
    needs = Resources.from_log(log)
    assert (needs.stack_bytes, needs.spill_bytes) == (0, 0), log
