"""Routing cases that every backend must get right, and the comparisons with the reference.

A :class:`Case` is a few words, so that it travels to the ranks; :func:`make_problem` turns it into the tensors of
all ranks, the same on each of them. Every rank computes the reference of the whole group by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.conftest import Ranks
from tokenloom import reference
from tokenloom.backends.seam import default_mode
from tokenloom.ops import routing
from tokenloom.plan import Plan
from tokenloom.runtime.processes import RankContext

BACKENDS = ("collective", "network", "nvlink")
"""Backends that the cases run on; a test that asks for ``backend`` runs once for each (conftest.py leaves "nvlink" out
on CPUs, and runs "network" on four CPU ranks, as 2 nodes of 2)."""
RANKS_PER_NODE = 2
BETWEEN_NODES = ("gin", "padded")
"""Backends that reach other nodes without the host. Only the emulator has them on CPUs."""

each_backend = pytest.mark.parametrize("backend", BACKENDS)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """One routing problem, for a group of any size.

    Attributes:
        name: id of the test.
        why: what goes wrong without this case.
        tokens: of rank r: ``tokens[r % len(tokens)]``.
        spare: how far max_tokens_per_rank is above the most tokens of a rank.
        experts_per_rank, hidden, top_k: sizes.
        pick: how experts are drawn: "distinct" (as routers do), "repeats" (with replacement), "one rank" (all on
            the last), "one expert" (all on the last one), "own rank", "descending" (ranks in the opposite order
            of k), or "none" (all ids -1).
        unused: share of -1.
        dtype: of x; FP8 comes with scales.
        ids_dtype: int32 or int64.
        weights: "given", "absent", or "nan where unused".
        to_quantise: x is finite and has every kind of block that quantising tells apart (hidden: a multiple of 128).
        recipe: by which FP8 x has its scales, and x has its kinds of blocks.
        offset: elements before x in its storage, which decides how its rows are aligned.
        seed: of everything random.
    """

    name: str
    why: str
    tokens: tuple[int, ...] = (5, 3, 0, 4)
    spare: int = 2
    experts_per_rank: int = 3
    hidden: int = 8
    top_k: int = 2
    pick: str = "distinct"
    unused: float = 0.0
    dtype: torch.dtype = BF16
    ids_dtype: torch.dtype = torch.int64
    weights: str = "given"
    offset: int = 0
    to_quantise: bool = False
    recipe: str = "block"
    seed: int = 0


CASES = [
    Case("plain", "the usual case: unequal tokens, distinct experts"),
    Case("top1", "one route per token: no sum has a second term", top_k=1, tokens=(4, 6)),
    Case("top8", "several experts of a token on one rank", top_k=8, experts_per_rank=8, tokens=(6, 9)),
    Case("top32", "the largest K, and every expert of a small group twice", top_k=32, pick="repeats", tokens=(3, 2)),
    Case("one-expert-per-rank", "L = 1: rank and expert are the same thing", experts_per_rank=1, top_k=3,
         pick="repeats"),
    Case("many-experts", "most experts are empty, also the first and the last", experts_per_rank=40, tokens=(3, 2)),
    Case("descending-ranks", "k runs against the ranks: sums per rank and per route differ in order",
         pick="descending", top_k=8, experts_per_rank=2, tokens=(7, 5)),
    Case("repeats", "the same expert twice in a row is two routes but one row on the wire", pick="repeats", top_k=4,
         experts_per_rank=1),
    Case("unused", "-1 in any place of a row, and whole rows of -1", unused=0.6, top_k=3, tokens=(9, 7)),
    Case("nan-weights", "weights of -1 are ignored, whatever they are", unused=0.5, weights="nan where unused",
         top_k=4),
    Case("all-unused", "tokens but no routes at all", pick="none"),
    Case("no-weights", "a dispatch without weights", weights="absent"),
    Case("first-empty", "rank 0, which everything is compared with, has no tokens", tokens=(0, 4, 2, 3)),
    Case("one-has-all", "one rank has tokens, the others only receive", tokens=(0, 0, 0, 6)),
    Case("no-tokens", "zero tokens on all ranks", tokens=(0,)),
    Case("one-token", "a single token, M = 1", tokens=(1,), spare=0),
    Case("to-one-rank", "all routes on one rank: the others receive nothing", pick="one rank", top_k=3),
    Case("to-one-expert", "all routes of all tokens on one expert", pick="one expert", top_k=2),
    Case("own-rank", "nothing leaves its rank", pick="own rank"),
    Case("full", "every rank has max_tokens_per_rank tokens and every expert of each: the worst case is reached",
         tokens=(6,), spare=0, experts_per_rank=2, pick="one rank", top_k=2),
    Case("hidden1", "rows of 2 bytes", hidden=1, tokens=(4, 6)),
    Case("hidden7", "an odd row size, no multiple of a word", hidden=7, tokens=(4, 6)),
    Case("hidden7168", "as wide as real models", hidden=7168, top_k=4, tokens=(6, 4)),
    Case("misaligned", "x starts in the middle of a word of its storage", offset=1, hidden=4),
    Case("misaligned-wide", "the same, with rows that are multiples of 16 bytes", offset=1, hidden=16),
    Case("int32-ids", "ids keep their dtype", ids_dtype=torch.int32, unused=0.3),
    Case("fp16", "payload dtype", dtype=FP16),
    Case("fp32", "payload dtype", dtype=FP32, hidden=5),
    Case("fp32-wide", "payload dtype, rows that are multiples of 16 bytes", dtype=FP32, hidden=24, tokens=(9, 0, 5)),
    Case("fp64", "payload dtype, with float64 weights", dtype=FP64, hidden=3, top_k=3),
    Case("fp8", "payload and scales travel together", dtype=FP8, hidden=256, tokens=(6, 3, 0, 4)),
    Case("fp8-unused", "scales of padding rows are zero", dtype=FP8, hidden=128, unused=0.5, top_k=4, pick="repeats"),
    Case("fp8-one-row", "a single row: slices of what arrived begin in the middle of a word", dtype=FP8, hidden=256,
         top_k=1, tokens=(1, 0), weights="absent", pick="one rank"),
    Case("fp64-one-row", "a single row: a float64 weight beside one int32 id", dtype=FP64, top_k=1, tokens=(1, 0),
         pick="one rank"),
    Case("fp8-empty", "zero tokens with scales", dtype=FP8, hidden=128, tokens=(0,)),
]  # fmt: skip


ROW_CASES = [
    Case("fp8-row", "one scale a row travels with it", dtype=FP8, hidden=256, tokens=(6, 3, 0, 4), recipe="row"),
    Case("fp8-row-unused", "scales of padding rows are zero, also where a block is a row", dtype=FP8, hidden=128,
         unused=0.5, top_k=4, pick="repeats", recipe="row"),
    Case("fp8-row-one-row", "a single scale begins in the middle of what arrived", dtype=FP8, hidden=256, top_k=1,
         tokens=(1, 0), weights="absent", pick="one rank", recipe="row"),
    Case("fp8-row-empty", "zero tokens with scales of rows", dtype=FP8, hidden=256, tokens=(0,), recipe="row"),
]  # fmt: skip
"""FP8 rows of recipe "row", which a dispatch must be told."""


def case_params(names: Sequence[str] | None = None, of: Sequence[Case] = CASES) -> list[object]:
    """The cases (all, or those named) as pytest parameters."""
    found = [case for case in of if names is None or case.name in names]
    assert names is None or len(found) == len(names), "a case was renamed"
    return [pytest.param(case, id=case.name) for case in found]


@dataclass(frozen=True)
class Problem:
    """The tensors of all ranks, on the CPU."""

    plan: Plan
    xs: list[torch.Tensor]
    scales: list[torch.Tensor] | None
    topk_ids: list[torch.Tensor]
    topk_weights: list[torch.Tensor] | None
    seed: int
    recipe: str = "block"

    def arguments(self, context: RankContext) -> tuple[object, torch.Tensor, torch.Tensor | None]:
        """What ``context``'s rank passes to dispatch, new tensors."""
        rank, device = context.rank, context.device
        x: object = _moved(self.xs[rank], device)
        if self.scales is not None:
            x = (x, self.scales[rank].to(device, copy=True))
        weights = None if self.topk_weights is None else self.topk_weights[rank].to(device, copy=True)
        return x, self.topk_ids[rank].to(device, copy=True), weights

    def dispatched(self, layout: str, **options: object) -> list[reference.Routed]:
        """The reference's dispatch."""
        return reference.dispatch(
            self.plan, self.xs, self.topk_ids, self.topk_weights, layout, scales=self.scales, **options
        )

    def rows_needed(self, layout: str, alignment: int = 1) -> int:
        """The capacity that just does: of rows, or in layout "slots" of places for each expert."""
        if layout == "slots":
            ids = torch.cat([ids.flatten() for ids in self.topk_ids]).long()
            return max(1, int(torch.bincount(ids[ids >= 0], minlength=1).max()))
        return max(routed.num_rows for routed in self.dispatched(layout, alignment=alignment))


def make_problem(case: Case, num_ranks: int) -> Problem:
    """The tensors of a case for a group of ``num_ranks``."""
    tokens = [case.tokens[rank % len(case.tokens)] for rank in range(num_ranks)]
    plan = Plan(
        num_ranks=num_ranks,
        num_experts=num_ranks * case.experts_per_rank,
        hidden=case.hidden,
        top_k=case.top_k,
        max_tokens_per_rank=max(1, max(tokens) + case.spare),
    )
    generator = torch.Generator().manual_seed(case.seed)
    xs, scales, all_ids, weights = [], [], [], []
    for rank, num_tokens in enumerate(tokens):
        x, x_scales = _make_x(case, num_tokens, generator)
        ids = _make_ids(case, plan, rank, num_tokens, generator)
        w = torch.rand(ids.shape, generator=generator, dtype=FP64 if case.dtype == FP64 else FP32) + 0.1
        if case.weights == "nan where unused":
            w[ids < 0] = torch.nan
        xs.append(x)
        scales.append(x_scales)
        all_ids.append(ids.to(case.ids_dtype))
        weights.append(w)
    return Problem(
        plan=plan,
        xs=xs,
        scales=scales if case.dtype == FP8 else None,
        topk_ids=all_ids,
        topk_weights=None if case.weights == "absent" else weights,
        seed=case.seed,
        recipe=case.recipe,
    )


def _make_x(case: Case, num_tokens: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """x and its scales; with a -0.0, an infinity and a NaN, since dispatch copies bytes."""
    values = torch.randn(num_tokens * case.hidden, generator=generator, dtype=FP64)
    special = torch.tensor([-0.0, torch.inf, torch.nan], dtype=FP64)[: len(values)]
    block = case.hidden if case.recipe == "row" else 128
    if case.to_quantise:
        values = _blocks_to_quantise(values.view(-1, block), case.dtype, generator).flatten()
    elif case.dtype == FP8:
        values = values.clamp(-400, 400).float().to(FP8)
        values.view(torch.uint8)[: len(special)] = special.nan_to_num(448, 448).float().to(FP8).view(torch.uint8)
    else:
        values[: len(special)] = special
    values = values.to(case.dtype)
    storage = torch.zeros(case.offset + len(values), dtype=torch.float32).to(case.dtype)
    storage.view(torch.uint8)[case.offset * storage.element_size() :] = values.view(torch.uint8)
    scales = torch.rand(num_tokens, case.hidden // block, generator=generator) + 0.5
    scales = scales.squeeze(1) if case.recipe == "row" else scales
    return storage[case.offset :].view(num_tokens, case.hidden), scales


def _blocks_to_quantise(blocks: torch.Tensor, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Normal [blocks, n * 128] -> finite values of ``dtype``: of all magnitudes, wide, ties, zeros, tiny, huge."""
    size = blocks.shape[1]
    limit = 4.0 if dtype == FP16 else 30.0
    blocks *= 10.0 ** (torch.rand(len(blocks), 1, generator=generator, dtype=FP64) * 2 * limit - limit)
    signs = torch.tensor([1.0, -1.0], dtype=FP64).repeat(size // 2)
    between = (torch.arange(17, 33, 2) / 16).repeat(16) * 2.0 ** torch.arange(-8, 8).repeat_interleave(8)
    between = between.repeat(size // 128)
    for index, block in enumerate(blocks):
        kind = index % 6
        if kind == 1:  # many magnitudes in one block
            block *= 10.0 ** torch.randint(-6, 1, (size,), generator=generator)
        elif kind == 2:  # the scale is 1 or 2: half way between two values of E4M3, up to the smallest
            block[:] = between * signs
            block[0] = 448.0 * 2 ** (index // 6 % 2)
        elif kind == 3:
            block[:] = 0 * signs
        elif kind == 4:  # below the floor of amax
            block[:] = torch.randn(size, generator=generator, dtype=FP64) * 1e-5
        elif kind == 5:  # one huge value
            block[index * 37 % size] = torch.finfo(dtype if dtype != FP64 else FP32).max / 2
    return blocks


def _make_ids(case: Case, plan: Plan, rank: int, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    num_experts, local, shape = plan.num_experts, plan.experts_per_rank, (num_tokens, plan.top_k)
    if case.pick == "none":
        return torch.full(shape, -1)
    if case.pick == "distinct":
        score = torch.rand(num_tokens, num_experts, generator=generator)
        ids = score.argsort(1)[:, : plan.top_k]
        ids = torch.nn.functional.pad(ids, (0, plan.top_k - ids.shape[1]), value=-1)  # a small group has too few
    elif case.pick in ("repeats", "descending"):
        ids = torch.randint(0, num_experts, shape, generator=generator)
        if case.pick == "descending":
            ids = ids.sort(1, descending=True).values
    elif case.pick == "one expert":
        ids = torch.full(shape, num_experts - 1)
    else:
        home = {"one rank": plan.num_ranks - 1, "own rank": rank}[case.pick]
        ids = torch.randint(0, local, shape, generator=generator) + home * local
    unused = torch.rand(shape, generator=generator) < case.unused
    return torch.where(unused, -1, ids)


def _moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """x on the device, at the same offset in its storage (``Tensor.to`` would align it)."""
    offset = x.storage_offset()
    storage = torch.empty(offset + x.numel(), dtype=x.dtype, device=device)
    moved = storage[offset:].view(x.shape)
    moved.view(torch.uint8).copy_(x.view(torch.uint8))
    return moved


@contextmanager
def on_another_stream(device: torch.device) -> Iterator[None]:
    """Run the block on a stream of its own, behind the current one, which waits for it. On CPUs there are none."""
    if device.type != "cuda":
        yield
        return
    current, other = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    other.wait_stream(current)
    with torch.cuda.stream(other):
        yield
    current.wait_stream(other)


def make_comm(context: RankContext, backend: str, plan: Plan, **options: object) -> tl.Communicator:
    """A communicator for ``plan`` on the ranks of this run."""
    sizes = {name: value for name, value in vars(plan).items() if name != "num_ranks"}
    options = {"checked": True} | options  # errors at once, on every backend
    if backend in ("network", *BETWEEN_NODES):
        options = {"ranks_per_node": RANKS_PER_NODE} | options
    if backend in BETWEEN_NODES:  # all memory is made with the communicator
        options = {"dtype": FP32} | options
    return tl.Communicator(context.group, backend=backend, device=context.device, **sizes, **options)


def order_of(comm: tl.Communicator) -> dict[str, Any]:
    """What tells the reference the order of sums that a communicator has where nobody names one."""
    if default_mode(comm.engine.capabilities) == "per_rank":
        return {}
    return {"mode": "per_node", "nodes": comm.engine.ranks.topology.nodes}


def expert_rows(problem: Problem, routed: Sequence[reference.Routed], dtype: torch.dtype) -> list[torch.Tensor]:
    """y of all ranks, of many magnitudes so that the order of a sum shows, and NaN wherever no row lies.

    Combine must never read padding rows, unused places or rows beyond ``num_rows``: whoever reads one returns NaN.
    """
    generator = torch.Generator().manual_seed(problem.seed + 1)
    ys = []
    for received in routed:
        shape = received.tokens.shape
        exponents = torch.randint(-5, 6, shape, generator=generator)
        y = (torch.randn(shape, generator=generator, dtype=FP64) * 2.0**exponents).to(dtype)
        y.view(-1, shape[-1])[received.padding] = torch.nan
        ys.append(y)
    return ys


# -- comparisons ------------------------------------------------------------------------------------------------


def same_bytes(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Same dtype, shape and bytes, NaNs included: for data that is only moved."""
    got, want = got.detach().cpu(), want.detach().cpu()
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{what}: {list(got.shape)}, expected {list(want.shape)}"
    if got.numel() == 0:
        return
    got_bytes, want_bytes = got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8)
    assert torch.equal(got_bytes, want_bytes), f"{what}: got {_text(got)}, expected {_text(want)}"


def same_bits(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Same dtype, shape and bits, except that any NaN equals any NaN: for results of arithmetic."""
    got, want = got.detach().cpu(), want.detach().cpu()
    assert got.shape == want.shape, f"{what}: {list(got.shape)}, expected {list(want.shape)}"
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan), f"{what}: NaN at {got.isnan().nonzero()}, expected at {nan.nonzero()}"
    same_bytes(got.masked_fill(nan, 0), want.masked_fill(nan, 0), what)


def _text(tensor: torch.Tensor) -> str:
    return f"{tensor.float().tolist()}" if tensor.numel() <= 64 else f"a tensor of {list(tensor.shape)}"


def same_routed(got: tl.Routed, want: reference.Routed, plan: Plan, *, bounded: bool = False) -> None:
    """Every field of a dispatch, bit for bit, wherever the semantics specify it.

    Args:
        bounded: sizes are, as they always are in layout "slots".
    """
    by_token, by_slot = got.layout in ("token", "rank"), got.layout == "slots"

    def counts(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    if bounded or by_slot:
        assert isinstance(got.num_rows, torch.Tensor), "num_rows is on the host with bounded sizes"
        same_bytes(got.num_rows, torch.tensor(want.num_rows, dtype=torch.int32), "num_rows")
    else:
        assert type(got.num_rows) is int
        assert got.num_rows == want.num_rows, f"num_rows is {got.num_rows}, expected {want.num_rows}"
    same_bytes(got.expert_counts, counts(want.expert_counts), "expert_counts")
    same_bytes(got.source_counts, counts(want.source_counts), "source_counts")
    assert (got.expert_offsets is None) == (got.layout != "expert"), "expert_offsets belong to layout expert"
    if got.expert_offsets is not None and want.expert_offsets is not None:
        same_bytes(got.expert_offsets, counts(want.expert_offsets), "expert_offsets")
    assert (got.slot_ranges is None) == (not by_slot), "slot_ranges belong to layout slots"
    if got.slot_ranges is not None:
        same_bytes(got.slot_ranges, torch.tensor(want.slot_ranges, dtype=torch.int32), "slot_ranges")
    assert got.tokens.shape == want.tokens.shape, f"tokens {got.tokens.shape}, expected {want.tokens.shape}"
    assert got.tokens.is_contiguous()
    # With exact sizes and layouts token and expert that is everything: padding rows are zero.
    fixed = by_slot or got.layout == "rank"
    specified = sorted(want.rows.values()) if fixed else list(range(want.num_rows))

    def same_rows(got_rows: torch.Tensor | None, want_rows: torch.Tensor | None, what: str) -> None:
        assert (got_rows is None) == (want_rows is None), f"{what} is {got_rows}"
        if got_rows is None or want_rows is None:
            return
        assert got_rows.shape == want_rows.shape, f"{what} {got_rows.shape}, expected {want_rows.shape}"
        got_rows, want_rows = (
            rows if rows.ndim == got.tokens.ndim else rows.unsqueeze(-1) for rows in (got_rows, want_rows)
        )
        got_flat, want_flat = (routing.packed(rows.flatten(0, -2).cpu()) for rows in (got_rows, want_rows))
        same_bytes(got_flat.view(torch.uint8)[specified], want_flat.view(torch.uint8)[specified], what)

    same_rows(got.tokens, want.tokens, "tokens")
    same_rows(got.scales, want.scales, "scales")
    if got.scales is not None and want.scales is not None:
        assert got.scales.dtype == want.scales.dtype
        assert got.scales.stride() == want.scales.stride(), f"scales have strides {got.scales.stride()}"
    same_rows(got.topk_weights, want.topk_weights, "topk_weights")
    assert (got.topk_ids is None) == (not by_token)
    if got.topk_ids is not None and want.topk_ids is not None:
        same_rows(got.topk_ids, want.topk_ids.to(got.topk_ids.dtype), "topk_ids")


# -- an example worked by hand ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """Two ranks, four experts, top-2, hidden 2; all expected values are literals, worked out on paper."""

    problem: Problem
    token_rows: list[list[list[float]]]
    token_ids: list[list[list[int]]]
    token_weights: list[list[list[float]]]
    expert_rows: list[list[list[float]]]
    expert_offsets: list[list[int]]
    aligned_rows: list[list[list[float]]]
    aligned_offsets: list[list[int]]
    rank_rows: list[list[list[list[float]]]]
    expert_counts: list[list[int]]
    slot_ranges: list[list[list[list[int]]]]
    source_counts: list[list[int]]
    y: list[list[list[float]]]
    weighted: list[list[list[float]]]
    unweighted: list[list[list[float]]]


_NAN = float("nan")
_Z = [0.0, 0.0]
EXAMPLE = Example(
    # Rank 0 has tokens [1,2] for experts 3 and 0, [3,4] twice for expert 1, [5,6] for expert 2;
    # rank 1 has [7,8] for expert 0, [9,10] for experts 2 and 3. Experts 0 and 1 live on rank 0.
    problem=Problem(
        plan=Plan(num_ranks=2, num_experts=4, hidden=2, top_k=2, max_tokens_per_rank=3),
        xs=[torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([[7.0, 8.0], [9.0, 10.0]])],
        scales=None,
        topk_ids=[torch.tensor([[3, 0], [1, 1], [-1, 2]]), torch.tensor([[0, -1], [2, 3]])],
        topk_weights=[
            torch.tensor([[0.5, 0.25], [1.0, 2.0], [_NAN, 4.0]]),
            torch.tensor([[8.0, _NAN], [0.125, 2.0]]),
        ],
        seed=0,
    ),
    token_rows=[[[1, 2], [3, 4], [7, 8]], [[1, 2], [5, 6], [9, 10]]],
    token_ids=[[[-1, 0], [1, 1], [0, -1]], [[1, -1], [-1, 0], [0, 1]]],
    token_weights=[[[0, 0.25], [1, 2], [8, 0]], [[0.5, 0], [0, 4], [0.125, 2]]],
    expert_rows=[[[1, 2], [7, 8], [3, 4], [3, 4]], [[5, 6], [9, 10], [1, 2], [9, 10]]],
    expert_offsets=[[0, 2, 4], [0, 2, 4]],
    aligned_rows=[
        [[1, 2], [7, 8], _Z, _Z, [3, 4], [3, 4], _Z, _Z],
        [[5, 6], [9, 10], _Z, _Z, [1, 2], [9, 10], _Z, _Z],
    ],
    aligned_offsets=[[0, 4, 8], [0, 4, 8]],
    rank_rows=[[[[1, 2], [3, 4]], [[7, 8]]], [[[1, 2], [5, 6]], [[9, 10]]]],
    expert_counts=[[2, 2], [2, 2]],
    # By expert and source, first place and number: expert 1 has both of its rows from rank 0.
    slot_ranges=[[[[0, 1], [1, 1]], [[0, 2], [2, 0]]], [[[0, 1], [1, 1]], [[0, 1], [1, 1]]]],
    source_counts=[[2, 1], [2, 1]],
    y=[[[10, 1], [20, 2], [30, 3], [40, 4]], [[50, 5], [60, 6], [70, 7], [80, 8]]],
    # 0.25*[10,1] + 0.5*[70,7]; 1*[30,3] + 2*[40,4]; 4*[50,5]; 8*[20,2]; 0.125*[60,6] + 2*[80,8]
    weighted=[[[37.5, 3.75], [110, 11], [200, 20]], [[160, 16], [167.5, 16.75]]],
    unweighted=[[[80, 8], [70, 7], [50, 5]], [[20, 2], [140, 14]]],
)


# -- sums whose order and rounding show ---------------------------------------------------------------------------


SUM_HIDDEN = 8
"""A row that every backend can move."""


@dataclass(frozen=True)
class Sum:
    """One token of rank 0, all its values equal, and what its weighted sum is, worked out by hand.

    Attributes:
        name: what the values show.
        num_ranks: of the group; the experts are 4 in all.
        ids, weights, y: by k; y is the row of the route.
        per_rank, per_route: the result in each mode.
        per_node: the same on nodes of two ranks; None: as ``per_rank``.
        y_dtype, wire_dtype, out_dtype: as combine takes them.
    """

    name: str
    num_ranks: int
    ids: list[int]
    weights: list[float]
    y: list[float]
    per_rank: float
    per_route: float
    y_dtype: torch.dtype = FP32
    wire_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None
    per_node: float | None = None

    def problem(self) -> Problem:
        plan = Plan(self.num_ranks, 4, hidden=SUM_HIDDEN, top_k=len(self.ids), max_tokens_per_rank=2)
        tokens = [1] + [0] * (self.num_ranks - 1)
        weights = torch.tensor([self.weights])
        return Problem(
            plan=plan,
            xs=[torch.ones(n, SUM_HIDDEN) for n in tokens],
            scales=None,
            topk_ids=[torch.tensor([self.ids]).expand(n, -1).contiguous() for n in tokens],
            topk_weights=[weights.expand(n, -1).contiguous() for n in tokens],
            seed=0,
        )

    def rows(self, routed: Sequence[reference.Routed]) -> list[torch.Tensor]:
        """y of every rank in layout "expert"."""
        ys = [torch.full(received.tokens.shape, torch.nan, dtype=FP64) for received in routed]
        for received, y in zip(routed, ys, strict=True):
            for (_, _, k), place in received.rows.items():
                y[place] = self.y[k]
        return [y.to(self.y_dtype) for y in ys]


_BIG = 2.0**30
"""Adding 1 to it is lost in float32."""
_ODD = 1 + 2.0**-12
"""Its square is 1 + 2**-11 + 2**-24, which a product rounded to float32 by itself loses the last term of."""
_ONES = [1.0, 1.0, 1.0]

SUMS = [
    Sum("ascending k, 1 is lost first", 1, [3, 2, 1], _ONES, [1.0, _BIG, -_BIG], 0.0, 0.0),
    Sum("ascending k, 1 comes last and survives", 1, [1, 2, 3], _ONES, [_BIG, -_BIG, 1.0], 1.0, 1.0),
    Sum("ascending k within one expert", 1, [2, 2, 2], _ONES, [1.0, _BIG, -_BIG], 0.0, 0.0),
    Sum("no fused multiply-add", 1, [0, 1], [-1.0, _ODD], [1 + 2.0**-11, _ODD], 0.0, 0.0),
    Sum("a sum starts from its first term, not from +0", 1, [-1, 3], [_NAN, 1.0], [_NAN, -0.0], -0.0, -0.0),
    Sum("two negative zeros", 1, [0, 2], [1.0, 1.0], [-0.0, -0.0], -0.0, -0.0),
    Sum("no routes is +0", 1, [-1, -1], [_NAN, -1.0], [_NAN, _NAN], 0.0, 0.0),
    # In bfloat16 1 + 2**-8 is a tie that goes to 1, while 1 + 2**-8 + 2**-9 rounds up to 1 + 2**-7.
    Sum("a partial sum is rounded once, not per term", 1, [0, 1, 2], _ONES, [1.0, 2.0**-8, 2.0**-9],
        1 + 2.0**-7, 1 + 2.0**-8 + 2.0**-9, BF16, BF16, FP32),
    Sum("the result is rounded once", 1, [0, 1, 2], _ONES, [1.0, 2.0**-8, 2.0**-9], 1 + 2.0**-7, 1 + 2.0**-7, BF16),
    Sum("weights stay float32 beside bfloat16 rows", 1, [0], [1 + 2.0**-9], [256.0], 256.5, 256.5, BF16, FP32, FP32),
    Sum("a weighted row is rounded after its weight", 1, [0], [1 + 2.0**-7], [1 + 2.0**-7],
        1 + 2.0**-6, 1 + 2.0**-6, BF16, BF16, FP32),
    Sum("float64 rows are summed in float64", 1, [0, 1], [1.0, 1.0], [1.0, 2.0**-40],
        1 + 2.0**-40, 1 + 2.0**-40, FP64),
    Sum("float64 on a float32 wire", 1, [0, 1], [1.0, 1.0], [1.0, 2.0**-40], 1.0, 1 + 2.0**-40, FP64, FP32),
    Sum("ranks first: 1 survives; in k it is lost", 2, [1, 2, 0], _ONES, [_BIG, 1.0, -_BIG], 1.0, 0.0),
    Sum("-0 from two ranks", 2, [0, 3], [1.0, 1.0], [-0.0, -0.0], -0.0, -0.0),
    Sum("-0 from the second rank alone", 2, [3], [1.0], [-0.0], -0.0, -0.0),
    Sum("partial sums are rounded to the wire", 2, [0, 1, 2], _ONES, [1.0, 2.0**-8, 2.0**-8],
        1 + 2.0**-8, 1 + 2.0**-7, BF16, BF16, FP32, per_node=1.0),
    Sum("partial sums stay float32 on a float32 wire", 2, [0, 1, 2], _ONES, [1.0, 2.0**-8, 2.0**-8],
        1 + 2.0**-7, 1 + 2.0**-7, BF16, FP32, FP32),
    Sum("a float16 wire overflows to infinity", 2, [2, 3], [1.0, 1.0], [40000.0, 40000.0],
        float("inf"), 80000.0, FP32, FP16),
    Sum("ascending ranks against ascending k", 4, [2, 1, 0], _ONES, [-_BIG, _BIG, 1.0], 0.0, 1.0),
    Sum("ascending k against ascending ranks", 4, [3, 0, 2], _ONES, [1.0, -_BIG, _BIG], 1.0, 0.0, per_node=0.0),
    Sum("nodes first: 1 survives", 4, [0, 2, 3], _ONES, [1.0, _BIG, -_BIG], 0.0, 0.0, per_node=1.0),
    Sum("the sum of the owner's node is rounded to the wire", 4, [0, 1, 2], _ONES, [1.0, 2.0**-8, 2.0**-8],
        1 + 2.0**-7, 1 + 2.0**-7, BF16, BF16, FP32, per_node=1 + 2.0**-8),
    Sum("the sum of another node is rounded to the wire", 4, [0, 2, 3], _ONES, [2.0**-8, 1.0, 2.0**-8],
        1 + 2.0**-7, 1 + 2.0**-7, BF16, BF16, FP32, per_node=1 + 2.0**-8),
    Sum("a sum over nodes starts from its first term", 4, [2, 3], [1.0, 1.0], [-0.0, -0.0], -0.0, -0.0),
]  # fmt: skip


def sums_for(num_ranks: int) -> list[Sum]:
    return [each for each in SUMS if each.num_ranks == num_ranks]


def two_ranks_only(ranks: Ranks) -> None:
    """Skip what is written out for two ranks on groups of another size."""
    if ranks.num_ranks != 2:
        pytest.skip("worked out for two ranks")
