"""Every kind of kernel variant compiles for Hopper without a GPU, and stays within what an SM has."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.kernels import variants
from tests.kernels.played_peer import num_chunks
from tests.kernels.variants import BF16, FP16, FP32, VARIANTS
from tests.support.slow import left_out, mostly_slow
from tests.support.small_kernels import needs_nvrtc
from tokenloom.backends.peers import buffers
from tokenloom.cli import kernel_cache
from tokenloom.errors import InvalidArgument, KernelCompileError
from tokenloom.jit import compiler
from tokenloom.jit.compiler import KernelSpec, Resources
from tokenloom.kernels import common
from tokenloom.kernels.combine import launch as combine
from tokenloom.kernels.combine.launch import CombineVariant, PreReduceVariant
from tokenloom.kernels.common import MAX_BLOCKS, Variant, rail
from tokenloom.kernels.dispatch import launch as dispatch
from tokenloom.kernels.dispatch.launch import DispatchVariant
from tokenloom.plan import FP8_BLOCK, Plan
from tokenloom.runtime import kernel_reports

REGISTERS_PER_SM = 65536
REGISTER_UNIT = 8
"""Registers of a thread are handed out in such units."""
DEVICE_FOLDERS = ("ptx", "sync", "tile", "pipe", "transport", "roles")
"""Headers include from their own folder and those before it."""


QUICK = {
    "dispatch, expert bf16",
    "dispatch, expert fp8 with scales",
    "dispatch, token fp32",
    "dispatch, token torch.bfloat16 to fp8, power of two",
    "dispatch, all_to_all, bf16",
    "combine, expert bf16, weighted",
    "combine, rank bf16 over fp32",
    "combine, per route, bf16, weighted",
    "combine, reduce_scatter, bf16",
    "pre_reduce, reduce_scatter, bf16",
    "row_weights, to rows, 8 ranks",
    "barrier, 8 ranks",
    "gemm, smallest, swiglu, awaits",
    "activate_forward, bf16, 8",
    "activate_backward, bf16, 8",
    "activate_backward, i2048 bf16, silu, interleaved, adjusted, biased",
    "add_bias, h264 bf16",
    "dot_bias, h264 bf16",
    "send_routes, large, shared",
    "send_routes, large, bf16",
    "pack_tokens, h7168 bf16",
    "sum_routes, large",
    "slots_of_routes, 256 experts, split",
    "split_batch, 34 slots of 8 ranks",
}
"""One of each kernel, and of the ways through it."""


MOVERS = [
    form for form, variant in VARIANTS.items() if type(variant) in (DispatchVariant, CombineVariant, PreReduceVariant)
]
"""Kernels that move rows between ranks of one node."""
QUICK_MOVERS = ["dispatch, expert bf16", "combine, expert bf16, weighted"]
SHORT_OF_REGISTERS = [
    f"combine, per route, {which}" for which in ("bf16, weighted", "top-1, weighted", "weights from home")
]
"""Those that spill on Blackwell, in blocks of 640 threads, a few words each."""


def shape_of(form: str) -> Iterator[tuple[str, str, int]]:
    """Every number that the form is compiled with."""
    spec = VARIANTS[form].spec()
    return ((spec.name, key, value) for key, value in spec.shape)


def way_of(form: str) -> Iterator[tuple[str, str, int]]:
    """The numbers that choose its code."""
    ways = ("layout", "strategy", "quantize", "per_route", "weights", "eager", "part", "y_dtype", "wire_dtype")
    return (each for each in shape_of(form) if each[1] in ways)


@needs_nvrtc
@pytest.mark.parametrize("form", mostly_slow(VARIANTS, QUICK, left_out(VARIANTS, shape_of, QUICK)))
def test_it_compiles_within_limits(form: str) -> None:
    """No spill, no stack frame (local arrays indexed at run time), no warning, no wgmma that was serialised (C75xx),
    and as many registers and as much shared memory as one block can have."""
    spec = VARIANTS[form].spec()
    cubin, log = compiler.compile_kernel(spec)
    assert cubin
    assert "warning" not in log.lower(), log
    assert not re.search(r"C75\d\d", log), log
    needs = Resources.from_log(log)
    assert (needs.stack_bytes, needs.spill_bytes) == (0, 0), log
    assert needs.registers > 0
    registers = -(-needs.registers // REGISTER_UNIT) * REGISTER_UNIT
    assert registers * spec.threads * spec.blocks_per_sm <= REGISTERS_PER_SM, log
    if spec.name == "grouped_gemm":  # or warps would wait for registers for ever that the launch does not have
        of_thread = REGISTERS_PER_SM // (spec.threads * spec.blocks_per_sm)
        assert registers == of_thread // REGISTER_UNIT * REGISTER_UNIT, log
    assert needs.static_shared_bytes + spec.shared_bytes <= common.MAX_SHARED_BYTES


@needs_nvrtc
@pytest.mark.parametrize("form", mostly_slow(MOVERS, QUICK_MOVERS, left_out(MOVERS, way_of, QUICK_MOVERS)))
def test_it_compiles_for_blackwell(form: str) -> None:
    """What moves rows, mostly without a spill. Nobody has run it there."""
    _, log = compiler.compile_kernel(replace(VARIANTS[form].spec(), arch="sm_100a"))
    needs = Resources.from_log(log)
    assert needs.spill_bytes <= (256 if form in SHORT_OF_REGISTERS else 0), log
    assert needs.stack_bytes <= needs.spill_bytes, log
    assert "warning" not in log.lower(), log


@pytest.mark.parametrize("quantize", ["", "any scale"], ids=["as it is", "to fp8"])
@pytest.mark.parametrize("layout", common.LAYOUTS)
@pytest.mark.parametrize(("num_ranks", "hidden"), [(1, 7168), (8, 7168), (32, 7168), (4, 512), (8, 2048)])
def test_any_number_of_experts_fits_or_is_refused(layout: str, num_ranks: int, hidden: int, quantize: str) -> None:
    """Counters of experts and the ring of rows share a block's memory: what does not fit would fail at the launch,
    after other ranks had begun to wait. Short rows have rings of many stages."""

    def of(num_experts: int) -> Variant:
        sizes = {"num_ranks": num_ranks, "experts_per_rank": num_experts // num_ranks, "hidden": hidden}
        _, variant = variants.dispatch("", layout, BF16, quantize=quantize, **sizes)
        return variant

    fitting, refused = [], []
    for num_experts in range(num_ranks, 40000, 8 * num_ranks):
        variant = of(num_experts)
        try:
            fitting.append((num_experts, variant.spec().shared_bytes))
        except InvalidArgument:
            refused.append(num_experts)
    assert max(shared_bytes for _, shared_bytes in fitting) <= common.MAX_SHARED_BYTES
    assert 4096 < fitting[-1][0] < refused[0], "more experts need more"
    with pytest.raises(InvalidArgument, match="use fewer experts"):
        of(65536).spec()


def test_the_variants_cover_what_is_built_ahead() -> None:
    """`tokenloom cache build` with its default shape compiles kernels that are tested here, or differ in what does not
    touch the code: FP16 for BF16."""
    tested = {without_details(variant.spec()) for variant in VARIANTS.values()}
    built = {without_details(spec) for spec in kernel_cache.variants(Plan(8, 256, 7168, 8, 8192))}
    assert built <= tested


def without_details(spec: KernelSpec) -> tuple[Any, ...]:
    fp16, bf16 = common.DTYPES[FP16], common.DTYPES[BF16]
    same = [(key, bf16 if key.endswith("_dtype") and value == fp16 else value) for key, value in spec.shape]
    return (spec.name, *same)


# -- what both sides say ----------------------------------------------------------------------------------------


class NoArgs(ctypes.Structure):
    _fields_ = [("unused", ctypes.c_int32)]


class Statements(KernelSpec):
    """Not a kernel: statements that the compiler checks after it has read the header ``path``."""

    statements: tuple[str, ...] = ()

    def source(self) -> str:
        return "\n".join([f'#include "{self.path}"', *self.statements, 'extern "C" __global__ void nothing() {}'])


def check(path: str, *statements: str) -> None:
    spec = Statements(path.rpartition("/")[2], path, (), NoArgs, 32)
    object.__setattr__(spec, "statements", statements)
    _, log = compiler.compile_kernel(spec)
    assert "warning" not in log.lower(), log


DIFFER = '__device__ __forceinline__ void differ() { asm volatile("the rules differ"); }'
"""The device's functions are not constexpr, so no static_assert can ask them. Code that ptxas cannot read is left in
what it is given only if some number differs."""


@cache
def headers() -> list[str]:
    return sorted(str(path.relative_to(compiler.PACKAGE)) for path in compiler.PACKAGE.rglob("*.cuh"))


@pytest.mark.sampled(4)
@needs_nvrtc
@pytest.mark.parametrize("header", headers())
def test_a_header_includes_what_it_needs(header: str) -> None:
    """Alone it compiles: no header leans on what another one happens to include before it."""
    check(header)


@pytest.mark.parametrize("header", headers())
def test_includes_point_downward(header: str) -> None:
    """A folder of device/ includes only from itself and those before it, kernels from device/ and their own folder.

    So what two kernels share moves down. Nothing comes from outside, which NVRTC would not find."""
    text = (compiler.PACKAGE / header).read_text()
    included = re.findall(r'^\s*#\s*include\s*["<]([^">]+)', text, re.MULTILINE)
    top, folder = header.split("/")[:2]
    for each in included:
        assert (compiler.PACKAGE / each).is_file(), f"{header} includes {each}, written from the package's folder?"
        its_top, its_folder = each.split("/")[:2]
        if top == "device":
            assert its_top == "device"
            assert DEVICE_FOLDERS.index(its_folder) <= DEVICE_FOLDERS.index(folder)
        else:
            assert its_top == "device" or its_folder == folder


@needs_nvrtc
def test_numbers_are_the_same_on_both_sides() -> None:
    """Constants that Python writes once more: a difference would send data to the wrong place, without any error."""
    names = {BF16: "kBfloat16", FP16: "kFloat16", FP32: "kFloat32"}
    check(
        "device/tile/values.cuh",
        *(f"static_assert({names[dtype]} == {number});" for dtype, number in common.DTYPES.items()),
        *(f"static_assert(kValueBytes<{names[dtype]}> == {dtype.itemsize});" for dtype in common.DTYPES),
    )
    check(
        "device/tile/layout.cuh",
        *(f"static_assert(kLayout{name.title()} == {number});" for name, number in common.LAYOUTS.items()),
    )
    check("device/tile/fp8.cuh", f"static_assert(kFp8Block == {FP8_BLOCK});")
    kinds = {"": "kAsIs", "any scale": "kToFp8", "power of two": "kToFp8PowerOfTwo"}
    numbers = (f"static_assert({kinds[kind]} == {number});" for kind, number in dispatch.QUANTIZE.items())
    check("kernels/dispatch/dispatch.cuh", *numbers)
    check(
        "device/transport/gin.cuh",
        f"static_assert(kQueueDepth == {rail.QUEUE_DEPTH} && kTraffics == {rail.TRAFFICS});",
        f"static_assert(kDescriptorBytes == {rail.DESCRIPTOR_BYTES});",
        f"static_assert(kMostRanksOfNodes == {common.MAX_RANKS_OF_NODES});",
    )
    check("device/roles/arrivals.cuh", f"static_assert(kMostFusedRanks == {common.MAX_FUSED_RANKS});")
    check(
        "device/transport/call.cuh",
        f"static_assert(kMostRanks == {common.MAX_RANKS} && kTurnWords == {common.TURN_WORDS});",
        f"static_assert(kMostBlocks == {common.MAX_BLOCKS});",
        f"static_assert(kClaims == {common.CLAIMS});",
        f"static_assert(kHeaderWords == {common.HEADER_WORDS});",
        f"static_assert(sizeof(FaultRecord) == 4 * {kernel_reports.FAULT_WORDS});",
        f"static_assert(sizeof(CallRecord) <= 4 * {kernel_reports.RECORD_WORDS});",
        f"static_assert(__INTADDR__(&((CallRecord*)0)->sequence) == 4 * {kernel_reports.SEQUENCE_WORD});",
    )
    phases = {
        "kPhaseOpen": "opening",
        "kPhaseRows": "dispatch, rows",
        "kPhasePartials": "combine, partial sums",
        "kPhaseBlocks": "own kernel",
        "kPhaseForward": "forwarding",
        "kPhaseHome": "sums of nodes",
        "kPhaseArrivals": "rows of an expert",
    }
    for number, words in kernel_reports.PHASES.items():
        (name,) = [name for name, part in phases.items() if part in words]
        check("device/sync/wait.cuh", f"static_assert({name} == {number});")


@needs_nvrtc
@pytest.mark.parametrize(("num_ranks", "num_experts"), [(1, 1), (3, 21), (8, 256), (64, 64)])
def test_headers_have_their_room(num_ranks: int, num_experts: int) -> None:
    """One of each source for every turn that calls take."""
    _, num_bytes = buffers.control_layout(Plan(num_ranks, num_experts, 8, 1, 1)).places["headers"]
    words = f"header_words<{num_ranks} + {num_experts}>"
    check(
        "device/transport/call.cuh",
        f"static_assert(kTurns * {num_ranks} * {words} * sizeof(StampedWord) == {num_bytes});",
    )


MOST = 2**32 - 1
REACHED = [
    # seen, wanted, whether that is enough
    (0, 1, False),
    (7, 7, True),
    (10, 7, True),
    (11, 7, False),
    (6, 7, False),
    (7 + 2**31, 7, False),
    (MOST, MOST, True),
    # Epochs go on with 4, 5 and 6 after the largest.
    (4, MOST, True),
    (6, MOST, True),
    (7, MOST, False),
    (4, MOST - 2, True),
    (5, MOST - 2, False),
    (3, MOST - 2, False),
    (MOST, 4, False),
    (0, 4, False),
]
"""Flags, and whether they say that a call has come so far. They may be very old."""


@needs_nvrtc
def test_which_flags_count() -> None:
    """A peer may be three calls ahead of a wait, not more; whatever else a flag shows was left by earlier calls."""
    path = "device/sync/wait.cuh"
    lines = [f"if (has_reached({seen}u, {wanted}u) != {int(enough)}) differ();" for seen, wanted, enough in REACHED]
    check(path, DIFFER, f'extern "C" __global__ void rule() {{ {" ".join(lines)} }}')
    wrong = "if (has_reached(7u, 7u) != 0) differ();"
    with pytest.raises(KernelCompileError, match="ptxas"):
        check(path, DIFFER, f'extern "C" __global__ void rule() {{ {wrong} }}')


# -- chunks of a combine -----------------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize("count", [0, 1, 7, 8, 10, 11, 12, 40, 41])
def test_the_rule_of_chunks(count: int) -> None:
    """Chunks of four rows, then at least seven of one row; with fewer than four rows more there are none of four."""
    long_ones = max(count - 7, 0) // 4
    sizes = [4] * long_ones + [1] * (count - 4 * long_ones)
    wrong = [f"chunks.count() != {len(sizes)}", f"chunks.num_rows({len(sizes)}) != 0"]
    row = 0
    for chunk, size in enumerate(sizes):
        wrong += [f"chunks.begin({chunk}) != {row}", f"chunks.num_rows({chunk}) != {size}"]
        wrong += [f"chunks.of_row({row + step}) != {chunk}" for step in range(size)]
        row += size

    def compile_rule(wrong: str) -> None:
        rule = "struct Rule { static constexpr int chunk_shift = 2, lone_rows = 7; };"
        body = f"Chunks<Rule> chunks({count}); if ({wrong}) differ();"
        check("kernels/combine/combine.cuh", rule, DIFFER, f'extern "C" __global__ void rule() {{ {body} }}')

    compile_rule(" || ".join(wrong))
    with pytest.raises(KernelCompileError, match="ptxas"):
        compile_rule(f"chunks.of_row(99) != {row}")


def test_every_chunk_has_a_flag() -> None:
    """However many rows come; so has every block of an eager call."""
    most = MAX_BLOCKS
    for max_tokens in range(1, 5000):
        most = max(most, *(num_chunks(max_tokens, lone_rows) for lone_rows in (0, combine.LONE_ROWS)))
        assert most <= combine.max_chunks(Plan(8, 8, 8, 1, max_tokens)) <= max(max_tokens, MAX_BLOCKS), max_tokens
