"""Staged dispatches on one GPU: the test plays rank 1 completely, and looks at all that rank 0 leaves and sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from tests.kernels.combine_calls import CombineCall
from tests.kernels.one_gpu import SHORT_S, needs_one_gpu
from tests.kernels.played_peer import power_of_two_scales, problem_of_two
from tests.kernels.silent_peer import Rank0, error_of, next_epoch
from tests.kernels.staged_calls import Staged, StagedBuffers, StagedCall
from tests.support.cases import BF16, FP8, FP32, Case, Problem
from tokenloom.plan import ROUTE_LAYOUTS

pytestmark = needs_one_gpu
EMULATED = True
"""These tests can run without a GPU, behind tests/support/emulator/plugin.py."""

BASE = Case("staged", "", tokens=(21, 17), spare=19, experts_per_rank=3, hidden=64, top_k=4, pick="repeats",
            unused=0.25, weights="nan where unused", ids_dtype=torch.int32)  # fmt: skip
"""All cases with these sizes run the same kernels."""

CASES = [
    BASE,
    replace(BASE, name="int64 ids, no weights", ids_dtype=torch.int64, weights="absent"),
    replace(BASE, name="distinct experts", pick="distinct", unused=0.0),
    replace(BASE, name="k against the ranks", pick="descending"),
    replace(BASE, name="rank 0 has no tokens", tokens=(0, 17), spare=23),
    replace(BASE, name="rank 1 has no tokens", tokens=(21, 0)),
    replace(BASE, name="nobody has tokens", tokens=(0, 0), spare=40),
    replace(BASE, name="no routes", pick="none"),
    replace(BASE, name="all for rank 0", pick="one rank"),
    replace(BASE, name="all for one expert", pick="one expert", unused=0.0),
    replace(BASE, name="nothing leaves its rank", pick="own rank"),
    replace(BASE, name="as many tokens as there may be", tokens=(40, 40), spare=0),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
Call = StagedCall | CombineCall


def run(problem: Problem, options: Staged, *, times: int = 1) -> None:
    """Some calls on fresh buffers, and the checks of all of them."""
    row_dtype = FP8 if options.quantize else problem.xs[0].dtype
    rank0 = Rank0(problem.plan)
    buffers = StagedBuffers(rank0, row_dtype)
    for _ in range(times):
        run_call(StagedCall(buffers, problem, options))
    assert error_of(rank0) is None


def run_call(call: Call, needed: int = 0) -> None:
    """One call. Rows of rank 1 come as early as they may in a call of one kernel, and late in one of two.

    Args:
        needed: rows or places that are needed, where they are more than the capacity.
    """
    if not call.options.halves:
        call.open_by_rank_1()
        call.send_by_rank_1()
        outcome = call.send()
    else:
        if not call.options.eager:
            call.open_by_rank_1()
        assert call.send() is None, "what is wrong with a call is said by the half that receives"
        assert call.rank0.last_run_s < SHORT_S, "the sending half waits for rows"
        call.open_by_rank_1()
        call.send_by_rank_1()
        outcome = call.receive()
    if needed:
        assert outcome is not None
        assert (outcome.needed_rows, outcome.capacity) == (needed, call.capacity)
        assert (outcome.faulty_rank, outcome.differing_rank) == (None, None)
    else:
        assert outcome is None
    call.check_received()
    call.check_sent()


@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize("layout", ROUTE_LAYOUTS)
@each_case
def test_routes(case: Case, layout: str, halves: bool) -> None:
    """Every kind of routing, in both layouts. (Mirrored: what the case gives to the last rank comes to rank 0.)"""
    options = Staged(layout, halves=halves)
    run(problem_of_two(case), options)
    if case.pick in ("one rank", "one expert"):
        run(problem_of_two(case, mirrored=True), options)


@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
def test_many_tokens(halves: bool) -> None:
    """There are more than two for each thread, so blocks ask each other for their counts."""
    case = replace(BASE, tokens=(1300, 1190), spare=20, hidden=8)
    run(problem_of_two(case), Staged("slots", halves=halves), times=3)


@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("blocks", [1, 32])
def test_groups_are_padded(blocks: int, alignment: int) -> None:
    """Padding rows are zero, empty experts have none; one block does everything, or more blocks than tokens."""
    for case in (BASE, replace(BASE, unused=0.9), replace(BASE, pick="none")):
        run(problem_of_two(case), Staged("expert", alignment=alignment, blocks=blocks))


@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize("layout", ROUTE_LAYOUTS)
def test_too_many_rows(layout: str, halves: bool) -> None:
    """What does not fit is dropped, counts are clamped, nothing is written beyond the end; the host hears how many
    places would do. In layout "slots" only some experts may have too many.
    """
    problem = problem_of_two(replace(BASE, pick="one rank"), mirrored=True)
    needed = problem.rows_needed(layout)
    rank0 = Rank0(problem.plan)
    buffers = StagedBuffers(rank0, BF16)
    for capacity in (needed, needed - 1, needed // 2, 1):
        call = StagedCall(buffers, problem, Staged(layout, halves=halves, capacity=capacity))
        run_call(call, needed if capacity < needed else 0)


@pytest.mark.parametrize("top_k", [1, 32])
@pytest.mark.parametrize("layout", ROUTE_LAYOUTS)
def test_few_and_many_routes(layout: str, top_k: int) -> None:
    """A lane for each route: one alone, and all of them, most of which repeat an expert."""
    run(problem_of_two(replace(BASE, top_k=top_k, experts_per_rank=2)), Staged(layout))


@pytest.mark.parametrize(
    ("dtype", "hidden"), [(FP32, 4), (BF16, 8), (BF16, 1000), (BF16, 7168)], ids=["16 bytes", "8", "1000", "7168"]
)
def test_rows_of_any_length(dtype: torch.dtype, hidden: int) -> None:
    """One unit of 16 bytes, rows that no tile divides, rows of several stages."""
    run(problem_of_two(replace(BASE, dtype=dtype, hidden=hidden)), Staged("slots"))


FP8_OPTIONS: list[tuple[str, str]] = [("expert", "rows")]
FP8_OPTIONS += [("slots", scale_layout) for scale_layout in ("rows", "columns", "packed")]
each_fp8 = pytest.mark.parametrize(("layout", "scale_layout"), FP8_OPTIONS)


@pytest.mark.parametrize("hidden", [128, 640])
@each_fp8
def test_fp8(layout: str, scale_layout: str, hidden: int) -> None:
    """Scales travel with rows, and lie as they are asked for: one of them, and five, which fill no two words."""
    problem = problem_of_two(replace(BASE, dtype=FP8, hidden=hidden))
    if scale_layout == "packed":
        problem = power_of_two_scales(problem)
    options = Staged(layout, scale_layout=scale_layout, alignment=4 if layout == "expert" else 1)
    run(problem, options)
    if layout == "slots":
        run_few_slots(problem, options)


def run_few_slots(problem: Problem, options: Staged) -> None:
    """Scales of rows that were dropped have no place either."""
    needed = problem.rows_needed("slots")
    buffers = StagedBuffers(Rank0(problem.plan), FP8)
    run_call(StagedCall(buffers, problem, replace(options, capacity=needed - 1)), needed)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@each_fp8
def test_quantised_on_the_way(layout: str, scale_layout: str, dtype: torch.dtype) -> None:
    """Codes and scales are those of the reference, where they are sent and where they arrive."""
    problem = problem_of_two(replace(BASE, dtype=dtype, hidden=640, to_quantise=True))
    how = "power of two" if scale_layout == "packed" or dtype == FP32 else "any scale"
    run(problem, Staged(layout, quantize=how, scale_layout=scale_layout))


# -- call after call ------------------------------------------------------------------------------------------------


def problems(count: int) -> list[Problem]:
    """Of the same sizes, with other tokens and routes."""
    return [problem_of_two(replace(BASE, seed=seed)) for seed in range(count)]


@pytest.mark.parametrize("start", [1, 2**31 - 2, 2**32 - 3], ids=lambda start: f"{start:#x}")
def test_regions_take_turns(start: int) -> None:
    """Calls of both kinds find what is theirs among what the calls before have left; epochs may wrap."""
    given = problems(7)
    rank0 = Rank0(given[0].plan, epoch=start)
    buffers = StagedBuffers(rank0, BF16)
    for number, problem in enumerate(given):
        options = Staged(ROUTE_LAYOUTS[number % len(ROUTE_LAYOUTS)], halves=number % 3 == 1)
        run_call(StagedCall(buffers, problem, options))


def epochs_from(start: int) -> Iterator[int]:
    """Of one call after the other."""
    while True:
        yield start
        start = next_epoch(start)


def receive_behind(calls: Sequence[Call]) -> None:
    """Rank 0 receives two calls when rank 1 has sent two more, and then makes these."""
    for call in calls[:2]:
        assert call.send() is None
        call.check_sent()
    for call in calls:
        call.open_by_rank_1()
        call.send_by_rank_1()
    for call in calls[:2]:
        assert call.receive() is None
        call.check_received()
    for call in calls[2:]:
        assert call.send() is None
        call.check_sent()
        assert call.receive() is None
        call.check_received()


@pytest.mark.parametrize("start", [1, 2**32 - 3], ids=lambda start: f"{start:#x}")
def test_a_peer_that_is_three_calls_ahead(start: int) -> None:
    """Rank 0 has opened two calls and received neither. Rank 1 has received both, and sent two more: their rows,
    headers and flags must not touch what rank 0 still reads.
    """
    given = problems(4)
    rank0 = Rank0(given[0].plan, epoch=start)
    buffers = StagedBuffers(rank0, BF16)
    calls = [
        StagedCall(buffers, problem, Staged(layout, halves=True), epoch)
        for problem, layout, epoch in zip(
            given, ("slots", "expert", "expert", "slots"), epochs_from(start), strict=False
        )
    ]
    receive_behind(calls)
    assert error_of(rank0) is None
