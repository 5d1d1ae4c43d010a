"""Combines whose buffers take turns, eager ones and those of two halves, on one GPU: the test plays rank 1 completely,
and looks at all that rank 0 leaves and sends.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from tests.kernels.combine_calls import CombineBuffers, CombineCall, Summed
from tests.kernels.one_gpu import needs_one_gpu
from tests.kernels.played_peer import problem_of_two
from tests.kernels.silent_peer import ABSENT, Rank0, error_of
from tests.kernels.test_staged_dispatch import BASE, each_case, epochs_from, problems, receive_behind, run_call
from tests.support.cases import BF16, FP16, FP32, Case, Problem
from tokenloom.kernels.combine.launch import LONE_ROWS
from tokenloom.plan import LAYOUTS, ROUTE_LAYOUTS

pytestmark = needs_one_gpu
EMULATED = True
"""These tests can run without a GPU, behind tests/support/emulator/plugin.py."""

KINDS = {
    "eager": {"eager": True, "halves": False},
    "eager halves": {"eager": True, "halves": True},
    "halves": {"eager": False, "halves": True},
}
"""All that use buffers in turns."""
each_kind = pytest.mark.parametrize("kind", KINDS)
ALL_KINDS = KINDS | {"whole": {"eager": False, "halves": False}}


def summed(layout: str, kind: str, **others: Any) -> Summed:
    return Summed(layout, **{"weighted": layout in ROUTE_LAYOUTS, **ALL_KINDS[kind], **others})


def run(problem: Problem, options: Summed) -> None:
    """One call on fresh buffers."""
    rank0 = Rank0(problem.plan)
    run_call(CombineCall(CombineBuffers(rank0, options), problem, options))
    assert error_of(rank0) is None


@each_kind
@pytest.mark.parametrize("layout", LAYOUTS)
@each_case
def test_routes(case: Case, layout: str, kind: str) -> None:
    """Every kind of routing, in every layout. (Mirrored: what the case gives to the last rank comes to rank 0.)"""
    options = summed(layout, kind, weighted=layout in ROUTE_LAYOUTS and case.weights != "absent")
    run(problem_of_two(case), options)
    if case.pick in ("one rank", "one expert"):
        run(problem_of_two(case, mirrored=True), options)


@each_kind
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
@pytest.mark.parametrize("layout", ROUTE_LAYOUTS)
def test_every_route_comes_home(layout: str, weighted: bool, kind: str) -> None:
    """Rows are scaled where they leave, and added at home in the order of k."""
    run(problem_of_two(replace(BASE, pick="descending")), summed(layout, kind, mode="per_route", weighted=weighted))


@each_kind
@pytest.mark.parametrize(
    "dtypes", [(BF16, FP32, BF16), (FP32, BF16, FP16), (FP16, FP16, FP32), (FP32, FP32, FP32)], ids=str
)
@pytest.mark.parametrize("layout", ["token", "expert"])
def test_dtypes(layout: str, dtypes: tuple[torch.dtype, ...], kind: str) -> None:
    """Each is rounded once to the wire's dtype, where it leaves, and once to that of the result."""
    y, wire, out = dtypes
    run(problem_of_two(BASE), summed(layout, kind, y_dtype=y, wire_dtype=wire, out_dtype=out))


@each_kind
@pytest.mark.parametrize(
    ("layout", "mode"), [("token", "per_rank"), *product(ROUTE_LAYOUTS, ("per_rank", "per_route"))]
)
def test_rows_that_were_dropped(layout: str, mode: str, kind: str) -> None:
    """They come home as NaN, and so does what they are added to; nothing beyond the rows is read."""
    problem = problem_of_two(replace(BASE, pick="one rank"), mirrored=True)
    needed = problem.rows_needed(layout)
    for capacity in (needed - 1, needed // 2, 1):
        run(problem, summed(layout, kind, mode=mode, capacity=capacity))


@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
def test_rows_of_others_for_dropped_tokens(halves: bool) -> None:
    """The own row of a token was dropped, and another rank sends one: it is read, though all of the token is NaN."""
    problem = problem_of_two(replace(BASE, pick="descending"), mirrored=True)
    for capacity in (problem.rows_needed("token") // 2, 1):
        run(problem, summed("token", "eager", halves=halves, capacity=capacity))


@pytest.mark.parametrize("mode", ["per_rank", "per_route"])
def test_dropped_rows_are_sent_once(mode: str) -> None:
    """Warps that share a row that was dropped send it once: home reads it once, and next time waits for another."""
    problem = problem_of_two(replace(BASE, hidden=7168, tokens=(12, 9), pick="one rank"), mirrored=True)
    options = summed("slots", "eager", mode=mode, capacity=1, blocks=8)
    rank0 = Rank0(problem.plan)
    buffers = CombineBuffers(rank0, options)
    for _ in range(12):
        run_call(CombineCall(buffers, problem, options))
    assert (buffers.memory[0] == ABSENT).all()


@pytest.mark.parametrize("blocks", [1, 4, 32])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_chunks(kind: str, blocks: int) -> None:
    """Chunks have several rows but for the last ones, and each pair of ranks its own number. More blocks than chunks
    leave some with nothing to do.
    """
    for tokens in ((LONE_ROWS + 43, 127), (3, LONE_ROWS + 10)):
        case = replace(BASE, tokens=tokens, spare=0, hidden=8, unused=0.0)
        run(problem_of_two(case), summed("slots", kind, blocks=blocks))


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_chunks_of_copied_rows(kind: str) -> None:
    """The dispatch has dropped none of them, the last ones, or also the last ones that share a chunk."""
    case = replace(BASE, tokens=(LONE_ROWS + 43, LONE_ROWS + 4), spare=10, hidden=8, unused=0.0, pick="one rank")
    problem = problem_of_two(case, mirrored=True)
    needed = problem.rows_needed("token")
    for capacity in (needed, needed - LONE_ROWS, needed - LONE_ROWS - 10):
        run(problem, summed("token", kind, blocks=4, capacity=capacity))


@each_kind
@pytest.mark.parametrize("top_k", [1, 32])
def test_few_and_many_routes(top_k: int, kind: str) -> None:
    """A sum of one term, which is copied where nothing multiplies it, and one of as many as there are lanes."""
    problem = problem_of_two(replace(BASE, top_k=top_k, experts_per_rank=2))
    for weighted in (False, True):
        run(problem, summed("expert", kind, weighted=weighted))


@pytest.mark.parametrize(
    ("dtype", "hidden"), [(FP32, 4), (BF16, 8), (BF16, 1000), (BF16, 7168)], ids=["16 bytes", "8", "1000", "7168"]
)
def test_rows_of_any_length(dtype: torch.dtype, hidden: int) -> None:
    """One unit of 16 bytes, rows that no stage divides, rows of several stages."""
    options = summed("expert", "eager", y_dtype=dtype, wire_dtype=dtype, out_dtype=dtype)
    run(problem_of_two(replace(BASE, dtype=dtype, hidden=hidden)), options)


@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
def test_values_with_all_bits_set(halves: bool) -> None:
    """They are NaN, and travel, though such a word shows that nothing has come. Who sends it takes another NaN."""
    problem = problem_of_two(replace(BASE, pick="descending"))
    options = summed("token", "eager", halves=halves)
    rank0 = Rank0(problem.plan)
    call = CombineCall(CombineBuffers(rank0, options), problem, options)
    call.y.view(torch.int16).fill_(-1)
    call.open_by_rank_1()
    call.send_by_rank_1()
    assert call.send() is None
    sent = call.buffers.rows(call.buffers.memory[1], call.epoch % call.turns)[call.sent_places()]
    assert len(sent)
    assert sent.isnan().all()
    assert (sent.view(torch.int32) != ABSENT).all()


# -- call after call ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [1, 2**31 - 2, 2**32 - 3], ids=lambda start: f"{start:#x}")
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "waiting"])
def test_buffers_take_turns(start: int, eager: bool) -> None:
    """Calls of both kinds find what is theirs among what the calls before have left; epochs may wrap."""
    given = problems(7)
    rank0 = Rank0(given[0].plan, epoch=start)
    first = Summed("slots", weighted=True, eager=eager, halves=not eager)
    buffers = CombineBuffers(rank0, first)
    for number, problem in enumerate(given):
        layout = LAYOUTS[number % len(LAYOUTS)]
        halves = not eager or number % 3 == 1
        run_call(CombineCall(buffers, problem, replace(first, layout=layout, halves=halves,
                                                       weighted=layout in ROUTE_LAYOUTS)))  # fmt: skip


@pytest.mark.parametrize("start", [1, 2**32 - 3], ids=lambda start: f"{start:#x}")
def test_a_peer_that_is_three_calls_ahead(start: int) -> None:
    """Rank 0 has opened two calls and received neither. Rank 1 has received both, and sent two more: their rows,
    headers and flags must not touch what rank 0 still reads.
    """
    given = problems(4)
    rank0 = Rank0(given[0].plan, epoch=start)
    options = Summed("slots", weighted=True, halves=True)
    buffers = CombineBuffers(rank0, options)
    calls = [CombineCall(buffers, *each) for each in zip(given, [options] * 4, epochs_from(start), strict=False)]
    receive_behind(calls)
    assert error_of(rank0) is None
