"""Backend "nvlink": the capacity that CapacityOverflow advises is one that the next dispatch takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.backends.large_plans import no_plan_is_small
from tests.support.cases import BF16, FP32, Case, Problem, make_problem, same_bits, same_routed
from tests.support.graph_cases import EXPERT, Captured, Round, Step, plan_of, problem_of
from tests.support.nvlink_cases import new_comm, same_combine
from tests.support.on_ranks import on_ranks
from tokenloom.backends.peers import buffers
from tokenloom.runtime.processes import RankContext

CASE = Case("too many", "", tokens=(100, 60, 0, 77), spare=3, experts_per_rank=2, hidden=128, top_k=4,
            pick="one rank", unused=0.05)  # fmt: skip
"""Most rows go to one rank: several times as many as fit a receive buffer that has room for layout "token" alone."""


@contextmanager
def small_buffers() -> Iterator[None]:
    """Receive buffers have room for layout "token" alone, and bounded dispatches of small plans use them too."""
    with mock.patch.object(buffers, "EXPERT_ROOM", -1e9), no_plan_is_small():
        yield


@on_ranks("hoppers")
@pytest.mark.parametrize("alignment", [1, 16])
def test_more_than_a_receive_buffer_holds(context: RankContext, alignment: int) -> None:
    """The receive buffer was as large as its first use wanted, and refused more. It grows, for each dtype by itself;
    rows that were handed out before stay as they are."""
    problems = [make_problem(replace(CASE, dtype=dtype), context.num_ranks) for dtype in (FP32, BF16)]
    needed = problems[0].rows_needed("expert", alignment)
    few = needed // 3
    with small_buffers(), new_comm(context, problems[0].plan, checked=False) as comm, torch.no_grad():
        assert buffers.receive_rows(comm.plan) < needed, "the buffer is large enough"
        for problem in problems:
            handed_out = dispatched(context, comm, problem, alignment, few)
            with pytest.raises(tl.CapacityOverflow, match=f"pass capacity={needed}") as overflow:
                comm.check()
            assert (overflow.value.needed, overflow.value.capacity) == (needed, few)
            for capacity in (overflow.value.needed, overflow.value.needed, 2 * needed, few + needed):
                dispatched(context, comm, problem, alignment, capacity)
                comm.check()
            want = problem.dispatched("expert", alignment=alignment, capacity=few, bounded=True)
            same_routed(handed_out, want[context.rank], problem.plan, bounded=True)
            for late in (
                lambda given=handed_out: comm.combine(given.tokens, given),
                lambda given=handed_out: comm.row_weights(given),
                lambda given=handed_out: comm.combine_weights(torch.zeros(given.shape[0], device=comm.device), given),
            ):
                with pytest.raises(tl.InvalidArgument, match="its buffer was reused; pass copy=True"):
                    late()


def dispatched(
    context: RankContext, comm: tl.Communicator, problem: Problem, alignment: int, capacity: int
) -> tl.Routed:
    """One bounded dispatch and its combines, as the reference has them."""
    routed = comm.dispatch(*problem.arguments(context), alignment=alignment, sizes="bounded", capacity=capacity)
    want = problem.dispatched("expert", alignment=alignment, capacity=capacity, bounded=True)
    same_routed(routed, want[context.rank], problem.plan, bounded=True)
    if capacity >= problem.rows_needed("expert", alignment):
        same_combine(context, comm, problem, routed, want)
    return routed


FEW = Round("few tokens", "distinct", used=0.2, seed=8)
MANY = Round("all tokens to one rank", "one rank", seed=9)


@on_ranks("hoppers")
def test_in_a_graph(context: RankContext) -> None:
    """One eager call makes the larger buffer, which a capture cannot. A graph of the smaller one goes on."""
    num_ranks = context.num_ranks
    room = {each: problem_of(each, EXPERT, num_ranks).rows_needed("expert", EXPERT.alignment) for each in (FEW, MANY)}
    with small_buffers(), new_comm(context, plan_of(num_ranks), checked=False) as comm:
        assert max(room[FEW], buffers.receive_rows(comm.plan)) < room[MANY], "the buffer is large enough"
        small = Step(context, comm, EXPERT, capacity=room[FEW])
        small.load(FEW)
        small_graph = Captured(small)
        small.load(MANY)
        small_graph.replay()
        with pytest.raises(tl.CapacityOverflow) as overflow:
            comm.check()
        large = Step(context, comm, EXPERT, capacity=overflow.value.needed)
        large.load(MANY)
        with (
            pytest.raises(tl.InvalidArgument, match="make it once before the capture"),
            torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
        ):
            large()
        large_graph = Captured(large)  # which makes an eager call first
        for _ in range(2):
            for step, graph, rounds in ((large, large_graph, (MANY, FEW)), (small, small_graph, (FEW,))):
                for round_ in rounds:
                    step.load(round_)
                    graph.replay()
                    want_routed, want_out = step.expected(round_)
                    same_routed(graph.results[0], want_routed, comm.plan, bounded=True)
                    same_bits(graph.results[1], want_out, round_.why)
        comm.check()
