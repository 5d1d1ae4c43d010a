"""Every kind of kernel variant compiles for Hopper without a GPU, and stays within what an SM has."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from tests.support.small_kernels import needs_nvrtc
from tokenloom.backends.nvlink import buffers
from tokenloom.cli.cache_commands import variants
from tokenloom.errors import InvalidArgument, KernelCompileError
from tokenloom.jit import compiler
from tokenloom.jit.compiler import KernelSpec, Resources
from tokenloom.kernels import common
from tokenloom.kernels.combine import launch as combine
from tokenloom.kernels.dispatch import launch as dispatch
from tokenloom.plan import FP8_BLOCK, Plan
from tokenloom.runtime import symmetric_memory

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8 = torch.float8_e4m3fn
REGISTERS_PER_SM = 65536
REGISTER_UNIT = 8
"""Registers of a thread are handed out in such units."""
DEVICE_FOLDERS = ("ptx", "sync", "tile", "pipe")
"""Headers include from their own folder and those before it."""


@dataclass(frozen=True)
class Variant:
    """One kernel: of a dispatch if ``dtypes`` is one dtype, of a combine from y over the wire to the output if there
    are three, of the sums of y that copy engines send if two.

    Attributes:
        quantize: how a dispatch makes FP8 of its rows, "" if it does not.
        mode: of a combine.
        strategy: of a dispatch, or "reduce_scatter" of a combine.
        weighted: whether a combine's rows have weights.
        of_weights: a combine of the weights' gradients, whose rows have a value per route.
    """

    what: str
    layout: str
    dtypes: tuple[torch.dtype, ...]
    quantize: str = ""
    mode: str = "per_rank"
    strategy: str = "dedup"
    weighted: bool = False
    of_weights: bool = False
    num_ranks: int = 8
    experts_per_rank: int = 32
    top_k: int = 8
    hidden: int = 7168
    max_tokens: int = 4096

    def __str__(self) -> str:
        return f"{('dispatch', 'presum', 'combine')[len(self.dtypes) - 1]}, {self.what}"

    def spec(self) -> tuple[KernelSpec, int]:
        experts = self.num_ranks * self.experts_per_rank
        plan = Plan(self.num_ranks, experts, self.hidden, self.top_k, self.max_tokens)
        if len(self.dtypes) == 3:
            width = buffers.home_weight_values(plan) if self.of_weights else None
            dense = self.strategy == "reduce_scatter"
            return combine.combine_spec(plan, self.layout, *self.dtypes, self.mode, width, dense, self.weighted)
        if len(self.dtypes) == 2:
            return combine.presum_spec(plan, *self.dtypes, self.weighted)
        (dtype,) = self.dtypes
        scales = plan.scales_per_token if dtype == FP8 or self.quantize else 0
        if self.quantize:
            return dispatch.dispatch_spec(plan, self.layout, self.hidden, scales, self.quantize, dtype, self.strategy)
        row_bytes = self.hidden * dtype.itemsize
        return dispatch.dispatch_spec(plan, self.layout, row_bytes, scales, strategy=self.strategy)


def both(what: str, layout: str, dtype: torch.dtype = BF16, **sizes: int) -> list[Variant]:
    found = [Variant(what, layout, (dtype,), **sizes), Variant(what, layout, (dtype,) * 3, **sizes)]
    if layout == "expert":
        found.append(Variant(f"{what}, weighted", layout, (dtype,) * 3, weighted=True, **sizes))
    return found


def quantizing(what: str, layout: str, quantize: str, dtype: torch.dtype = BF16, **sizes: int) -> Variant:
    return Variant(what, layout, (dtype,), quantize=quantize, **sizes)


def per_route(what: str, *dtypes: torch.dtype, **sizes: int) -> Variant:
    return Variant(f"per route, {what}", "expert", dtypes, mode="per_route", weighted="weighted" in what, **sizes)


def carried(strategy: str, what: str, *dtypes: torch.dtype, layout: str = "expert", **sizes: Any) -> Variant:
    return Variant(f"{strategy}, {what}", layout, dtypes, strategy=strategy, **sizes)


def of_weights(what: str, layout: str, **sizes: int) -> Variant:
    return Variant(f"weights' gradients, {what}", layout, (FP32,) * 3, of_weights=True, **sizes)


VARIANTS = [
    # What the speed targets are measured with, and every layout with every payload.
    *(v for layout in common.LAYOUTS for v in both(f"{layout} bf16", layout)),
    *(Variant(f"{layout} fp8 with scales", layout, (FP8,)) for layout in common.LAYOUTS),
    *(v for layout in common.LAYOUTS for v in both(f"{layout} fp32", layout, FP32)),
    # Every pair of a y dtype and a wire dtype has its own code; so has every output dtype. FP16 is like BF16 but for
    # its conversions. Layout token converts rows that would be copied if the dtypes were the same.
    *(
        Variant(f"expert {y} over {wire}", "expert", (y, wire, out))
        for (y, wire), out in zip(product((BF16, FP16, FP32), repeat=2), (FP32, BF16, FP16) * 3, strict=True)
    ),
    Variant("token fp16 to bf16", "token", (FP16, FP16, BF16)),
    Variant("token fp32 over bf16", "token", (FP32, BF16, FP32)),
    Variant("rank bf16 over fp32", "rank", (BF16, FP32, BF16)),
    # One rank (gradients of a process alone), powers of two, and a number that is none.
    *(
        v
        for num_ranks, layout in ((1, "expert"), (2, "token"), (3, "expert"), (4, "rank"))
        for v in both(f"{num_ranks} ranks", layout, num_ranks=num_ranks)
    ),
    # As many ranks as bits in the masks of ranks.
    *both("32 ranks", "expert", num_ranks=32, experts_per_rank=8),
    # One expert a token, and the most: a full warp of routes. More routes than there are experts.
    *both("top-1", "expert", top_k=1),
    *both("top-32", "expert", top_k=32),
    *both("top-32, token", "token", top_k=32),
    *both("top-32 of one expert", "expert", top_k=32, num_ranks=1, experts_per_rank=1),
    # Where a rank holds many of a token's experts, most terms are in flight at once.
    Variant("top-16 of 2 ranks", "expert", (BF16, FP16, BF16), top_k=16, num_ranks=2),
    Variant("top-32 of 4 ranks, hidden 1000", "expert", (FP32, FP16, FP16), top_k=32, num_ranks=4, hidden=1000),
    # Many experts: their counters share memory with the ring of rows.
    *both("2048 experts", "expert", experts_per_rank=256),
    *both("4096 experts", "expert", experts_per_rank=512),
    # Rows shorter than a warp's 16-byte loads, one load, a part of one segment, odd numbers of segments, many.
    *both("hidden 8", "expert", hidden=8),
    *both("hidden 64", "token", hidden=64),
    *both("hidden 64, fp32", "expert", FP32, hidden=64),
    *both("hidden 1000", "expert", hidden=1000),
    *both("hidden 5120", "expert", hidden=5120),
    *both("hidden 7176, fp32", "expert", FP32, hidden=7176),
    *both("hidden 65536", "token", hidden=65536),
    Variant("fp8, one scale", "expert", (FP8,), hidden=128),
    # Only FP32 has rows of 16-byte units that are no multiple of 8 values.
    *both("hidden 4, fp32", "expert", FP32, hidden=4),
    *both("hidden 1004, fp32", "token", FP32, hidden=1004),
    # One chunk only, and a number of tokens that no chunk divides.
    *both("1 token", "expert", max_tokens=1),
    *both("8191 tokens", "token", max_tokens=8191),
    # Rows that become FP8 on their way: every dtype is read in its own way, each kind of scale is rounded in its own
    # way. One block of 128 values, which is a part of a warp's step; several steps.
    *(
        quantizing(f"{layout} {dtype} to fp8, {quantize}", layout, quantize, dtype)
        for layout, quantize, dtype in (
            *product(("expert",), ("any scale", "power of two"), (BF16, FP16, FP32)),
            *product(("token", "rank"), ("any scale", "power of two"), (BF16,)),
        )
    ),
    quantizing("to fp8, hidden 128", "token", "power of two", hidden=128),
    quantizing("to fp8, hidden 5120", "rank", "any scale", FP32, hidden=5120),
    quantizing("to fp8, top-32 of 32 ranks", "expert", "any scale", FP32, top_k=32, num_ranks=32, experts_per_rank=8),
    # Every route comes home by itself: rows are scaled and not added where they leave, and there are top_k at home.
    per_route("bf16", BF16, BF16, BF16),
    per_route("bf16, weighted", BF16, BF16, BF16),
    per_route("fp32", FP32, FP32, FP32),
    per_route("fp32, weighted", FP32, FP32, FP32),
    per_route("fp32 over bf16", FP32, BF16, FP32),
    per_route("top-1, weighted", BF16, BF16, BF16, top_k=1),
    per_route("top-32 of 32 ranks", BF16, BF16, BF16, top_k=32, num_ranks=32, experts_per_rank=8),
    per_route("hidden 1000, one rank", FP32, FP32, FP32, hidden=1000, num_ranks=1),
    # What carries rows otherwise.
    *(
        carried(strategy, what, dtype, **sizes)
        for strategy in ("all_gather", "all_to_all")
        for what, dtype, sizes in (
            ("bf16", BF16, {}),
            ("fp32", FP32, {}),
            ("top-32 of 32 ranks", BF16, {"top_k": 32, "num_ranks": 32, "experts_per_rank": 8}),
            ("hidden 8, one rank", BF16, {"hidden": 8, "num_ranks": 1}),
        )
    ),
    carried("all_to_all", "fp8 with scales", FP8),
    carried("all_to_all", "to fp8", BF16, quantize="any scale"),
    carried("all_to_all", "to fp8, powers of two", BF16, quantize="power of two"),
    *(
        carried("reduce_scatter", f"{what}", *dtypes, layout=layout, **sizes)
        for what, wire, y, out, sizes in (
            ("bf16", BF16, BF16, BF16, {}),
            ("fp32", FP32, FP32, FP32, {}),
            ("fp32 over fp16 to bf16", FP16, FP32, BF16, {}),
            ("top-32 of 32 ranks", BF16, BF16, BF16, {"top_k": 32, "num_ranks": 32, "experts_per_rank": 8}),
            ("hidden 8, one rank", BF16, BF16, BF16, {"hidden": 8, "num_ranks": 1}),
        )
        for dtypes, layout in (((y, wire), "expert"), ((wire, wire, out), "token"))
    ),
    carried("reduce_scatter", "bf16, weighted", BF16, BF16, weighted=True),
    carried("reduce_scatter", "fp32, weighted", FP32, FP32, weighted=True),
    # Gradients of weights: rows of top_k values, rounded up to whole 16-byte units.
    *(of_weights(layout, layout) for layout in ("token", "rank")),
    of_weights("top-1", "token", top_k=1),
    of_weights("top-32 of one rank", "rank", top_k=32, num_ranks=1),
]


@pytest.fixture(scope="module")
def compiling(request: pytest.FixtureRequest) -> Iterator[dict[Variant, Future[tuple[bytes, str]]]]:
    """The variants whose tests were asked for, on as many cores as there are."""
    asked = [item.callspec.params.get("variant") for item in request.session.items if hasattr(item, "callspec")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {v: pool.submit(compiler.compile_kernel, v.spec()[0]) for v in asked if isinstance(v, Variant)}


@needs_nvrtc
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_it_compiles_within_limits(variant: Variant, compiling: dict[Variant, Future[tuple[bytes, str]]]) -> None:
    """No spill, no stack frame (local arrays indexed at run time), no warning, no wgmma that was serialised (C75xx),
    and as many registers and as much shared memory as one block can have."""
    spec, shared_bytes = variant.spec()
    cubin, log = compiling[variant].result()
    assert cubin
    assert "warning" not in log.lower(), log
    assert not re.search(r"C75\d\d", log), log
    needs = Resources.from_log(log)
    assert (needs.stack_bytes, needs.spill_bytes) == (0, 0), log
    assert needs.registers > 0
    registers = -(-needs.registers // REGISTER_UNIT) * REGISTER_UNIT
    assert registers * spec.threads <= REGISTERS_PER_SM, log
    assert needs.static_shared_bytes + shared_bytes <= common.MAX_SHARED_BYTES
    assert dict(spec.shape)["shared_bytes"] == shared_bytes, "what the kernel checks is what the launch asks for"


@pytest.mark.parametrize("quantize", ["", "any scale"], ids=["as it is", "to fp8"])
@pytest.mark.parametrize("layout", common.LAYOUTS)
@pytest.mark.parametrize(("num_ranks", "hidden"), [(1, 7168), (8, 7168), (32, 7168), (4, 512), (8, 2048)])
def test_any_number_of_experts_fits_or_is_refused(layout: str, num_ranks: int, hidden: int, quantize: str) -> None:
    """Counters of experts and the ring of rows share a block's memory: what does not fit would fail at the launch,
    after other ranks had begun to wait. Short rows have rings of many stages."""

    def of(num_experts: int) -> Variant:
        sizes = {"num_ranks": num_ranks, "experts_per_rank": num_experts // num_ranks, "hidden": hidden}
        return quantizing("", layout, quantize, **sizes)

    fitting, refused = [], []
    for num_experts in range(num_ranks, 40000, 8 * num_ranks):
        variant = of(num_experts)
        try:
            fitting.append((num_experts, variant.spec()[1]))
        except InvalidArgument:
            refused.append(num_experts)
    assert max(shared_bytes for _, shared_bytes in fitting) <= common.MAX_SHARED_BYTES
    assert 4096 < fitting[-1][0] < refused[0], "more experts need more"
    with pytest.raises(InvalidArgument, match="use fewer experts"):
        of(65536).spec()


def test_the_variants_cover_what_is_built_ahead() -> None:
    """`tokenloom cache build` with its default shape compiles kernels that are tested here, or differ in what does not
    touch the code: FP16 for BF16."""
    tested = {without_details(variant.spec()[0]) for variant in VARIANTS}
    built = {without_details(spec) for spec in variants(Plan(8, 256, 7168, 8, 8192))}
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


@cache
def headers() -> list[str]:
    return sorted(str(path.relative_to(compiler.PACKAGE)) for path in compiler.PACKAGE.rglob("*.cuh"))


@needs_nvrtc
@pytest.mark.parametrize("header", headers())
def test_a_header_includes_what_it_needs(header: str) -> None:
    """Alone it compiles: no header leans on what another one happens to include before it."""
    check(header)


@pytest.mark.parametrize("header", headers())
def test_includes_point_downward(header: str) -> None:
    """ptx, sync, tile, pipe, each only from those before it; kernels from device/ and their own folder, so that what
    two kernels share moves down; and nothing from outside, which NVRTC would not find."""
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
        "device/sync/symmetric.cuh",
        *(f"static_assert(kLayout{name.title()} == {number});" for name, number in common.LAYOUTS.items()),
    )
    check("device/tile/fp8.cuh", f"static_assert(kFp8Block == {FP8_BLOCK});")
    kinds = {"": "kAsIs", "any scale": "kToFp8", "power of two": "kToFp8PowerOfTwo"}
    numbers = {name: dict(quantizing("", "token", kind).spec()[0].shape)["quantize"] for kind, name in kinds.items()}
    check("kernels/dispatch/dispatch.cuh", *(f"static_assert({name} == {each});" for name, each in numbers.items()))
    check(
        "device/sync/call.cuh",
        f"static_assert(kFields == {common.NUM_FIELDS} && kRegionWord < kHeaderWords);",
        f"static_assert(kHeaderWords == {buffers.HEADER_WORDS});",
        f"static_assert(sizeof(FaultRecord) == 4 * {symmetric_memory._FAULT_WORDS});",
        f"static_assert(sizeof(CallRecord) <= 4 * {symmetric_memory._RECORD_WORDS});",
    )
    phases = {"kPhaseOpen": "opening", "kPhaseRows": "dispatch, rows", "kPhasePartials": "combine, partial sums"}
    for number, words in symmetric_memory.PHASES.items():
        (name,) = [name for name, part in phases.items() if part in words]
        check("device/sync/wait.cuh", f"static_assert({name} == {number});")


@needs_nvrtc
@pytest.mark.parametrize(("num_ranks", "num_experts"), [(1, 1), (3, 21), (8, 256), (32, 32)])
def test_rows_of_an_announcement_have_their_room(num_ranks: int, num_experts: int) -> None:
    """Two for each source, one per parity of the epoch."""
    _, num_bytes = buffers.control_regions(Plan(num_ranks, num_experts, 8, 1, 1)).places["rows"]
    check(
        "device/sync/call.cuh",
        f"static_assert(2 * {num_ranks} * row_words<{num_ranks} + {num_experts}> * sizeof(int32) == {num_bytes});",
    )


# -- chunks of a combine -----------------------------------------------------------------------------------------


def chunk_shift(num_rows: int) -> int:
    """What the kernel does, in other words: two rows a chunk from 128 rows, twice as many when these are doubled."""
    shift = 0
    while shift < combine.MOST_CHUNK_SHIFT and num_rows >= 128 << shift:
        shift += 1
    return shift


@needs_nvrtc
def test_the_rule_of_chunks() -> None:
    """The next test counts with it. It cannot be a static_assert, as the device's functions are not constexpr: code
    that ptxas cannot read is left in what it is given only if some number differs."""
    counts = [*range(130), *(count + step for count in (256, 512, 1024, 4096, 1 << 20, 1 << 30) for step in (-1, 0))]
    body = " ".join(f"if (chunk_shift<Rule>({count}) != {chunk_shift(count)}) differ();" for count in counts)
    statements = (
        f"struct Rule {{ static constexpr int most_chunk_shift = {combine.MOST_CHUNK_SHIFT}; }};",
        '__device__ __forceinline__ void differ() { asm volatile("the rules differ"); }',
    )
    path = "kernels/combine/combine.cuh"
    check(path, *statements, f'extern "C" __global__ void rule() {{ {body} }}')
    with pytest.raises(KernelCompileError, match="ptxas"):
        check(path, *statements, 'extern "C" __global__ void rule() { if (chunk_shift<Rule>(128) != 0) differ(); }')


def test_every_chunk_has_a_flag() -> None:
    """However many rows come: few rows are chunks by themselves, so that fewer of them can have more chunks."""
    most = 0
    for max_tokens in range(1, 5000):
        most = max(most, -(-max_tokens >> chunk_shift(max_tokens)))
        room = combine.max_chunks(Plan(8, 8, 8, 1, max_tokens))
        assert most <= room <= most + 1, max_tokens
