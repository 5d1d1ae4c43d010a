"""Backend "nvlink": many backward calls in a row, whose errors the host learns of later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.cases import FP32, Case, make_comm, make_problem, same_bits
from tests.support.nvlink_cases import new_comm
from tests.support.on_ranks import on_ranks
from tokenloom.backends.peers.outcomes import CALLS_IN_FLIGHT
from tokenloom.runtime.processes import RankContext

NUM_GRAPHS = CALLS_IN_FLIGHT + 3
SMALL: dict[str, Any] = {"tokens": (6, 0, 5, 7), "hidden": 16, "top_k": 2, "pick": "repeats", "unused": 0.2}
SMALL["dtype"] = FP32


@dataclass(frozen=True)
class Graph:
    """A result, the leaves that it came from, and the gradient that it is given."""

    result: torch.Tensor
    leaves: tuple[torch.Tensor, ...]
    given: torch.Tensor
    routed: tl.Routed

    def gradients(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.result, self.leaves, self.given, retain_graph=True)


def make_graph(context: RankContext, comm: tl.Communicator, index: int, *, combined: bool) -> Graph:
    """The ``index``-th: of a dispatch and its combine, or (``combined`` False) of x alone in a dispatch alone."""
    problem = make_problem(Case("backward", "", **SMALL, seed=index), context.num_ranks)
    generator = torch.Generator().manual_seed(100 * index + context.rank)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(context.device)

    x = random(*problem.xs[context.rank].shape).requires_grad_()
    _, ids, weights = problem.arguments(context)
    assert weights is not None
    if not combined:
        routed = comm.dispatch(x, ids, layout="token")
        return Graph(routed.tokens, (x,), random(*routed.tokens.shape), routed)
    weights.requires_grad_()
    routed = comm.dispatch(x, ids, weights, layout="expert" if index % 2 else "token")
    y = routed.tokens * 1.5
    if routed.layout == "token":
        assert routed.topk_weights is not None
        y = y * (routed.topk_weights[:, :1] + routed.topk_weights[:, 1:])
    return Graph(comm.combine(y, routed), (x, weights), random(*x.shape), routed)


def same_gradients(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], what: str) -> None:
    same_bits(got[0], want[0].cpu(), f"gradient of x, {what}")
    for ours, theirs in zip(got[1:], want[1:], strict=True):
        # Dot products of 16 float32 numbers near 1, which torch may add in another order.
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("overflow", [False, True], ids=["", "after an overflow"])
def test_many_backward_calls_in_a_row(hoppers: Ranks, overflow: bool) -> None:
    """Only forward calls read outcomes: with more backward calls in a row than there are slots for outcomes, one call
    wrote into the slot of another that the host had not read, and an overflow was lost, or was another call's."""
    turns = hoppers.run(check_many_backward_calls, overflow)
    assert len(set(turns)) == 1, f"turns at which ranks heard of the overflow: {turns}"


def check_many_backward_calls(context: RankContext, overflow: bool) -> int | None:
    """Returns: the turn at which the overflow was raised."""
    much = make_problem(Case("much", "", **(SMALL | {"pick": "one rank"})), context.num_ranks)
    needed = much.rows_needed("expert")
    x, ids, weights = much.arguments(context)
    raised: list[tuple[int, tl.CapacityOverflow]] = []
    with new_comm(context, much.plan, checked=False) as comm, make_comm(context, "collective", much.plan) as other:
        graphs = [make_graph(context, comm, index, combined=True) for index in range(NUM_GRAPHS)]
        if overflow:
            comm.dispatch(x, ids, weights, sizes="bounded", capacity=needed - 1)
        got = {}
        for turn, index in enumerate(reversed(range(NUM_GRAPHS))):
            try:
                got[index] = graphs[index].gradients()
            except tl.CapacityOverflow as error:
                raised.append((turn, error))
                got[index] = graphs[index].gradients()
        comm.check()
        assert [(error.needed, error.capacity) for _, error in raised] == [(needed, needed - 1)] * overflow
        for index in range(NUM_GRAPHS):
            want = make_graph(context, other, index, combined=True)
            same_bits(graphs[index].result, want.result.detach().cpu(), f"graph {index}")
            same_gradients(got[index], want.gradients(), f"graph {index}")
    return raised[0][0] if raised else None


@on_ranks("several")
def test_backward_calls_that_disagree(context: RankContext) -> None:
    """Two errors in a row of backward calls: both are raised, each with the numbers of its own dispatches, at the same
    calls of all ranks, and what was not refused is right."""
    plan = make_problem(Case("backward", "", **SMALL), context.num_ranks).plan
    odd = context.num_ranks - 1
    order = list(range(NUM_GRAPHS))
    if context.rank == odd:
        order[:2] = [1, 0]
    raised: list[tuple[int, str]] = []
    got = {}
    with new_comm(context, plan, checked=False) as comm, make_comm(context, "collective", plan) as other:
        graphs = [make_graph(context, comm, index, combined=False) for index in range(NUM_GRAPHS)]
        for turn, index in enumerate(order):
            try:
                got[index] = graphs[index].gradients()
            except tl.PlanMismatch as error:
                raised.append((turn, str(error)))
                got[index] = graphs[index].gradients()
        comm.check()
        first, second = (graph.routed._handle.number for graph in graphs[:2])
        assert [turn for turn, _ in raised] == [CALLS_IN_FLIGHT + 1, CALLS_IN_FLIGHT + 2]
        for (_, text), theirs, rank0s in zip(raised, (second, first), (first, second), strict=True):
            assert f"rank {odd} has dispatch number={theirs}, rank 0 has dispatch number={rank0s}" in text
        for index in range(NUM_GRAPHS):  # the first two once more, now that ranks agree
            want = make_graph(context, other, index, combined=False).gradients()
            same_gradients(graphs[index].gradients() if index < 2 else got[index], want, f"graph {index}")
        comm.check()


@on_ranks("hoppers")
@pytest.mark.parametrize("who", ["all ranks", "the last rank"])
@pytest.mark.parametrize("what", ["gradient", "combine per route"])
def test_ids_changed_after_dispatch(context: RankContext, what: str, who: str) -> None:
    """Gradients, and rows that come home one by one, go by the ids that were given. Where those had changed meanwhile,
    they were wrong without a word."""
    everywhere = who == "all ranks"
    problem = make_problem(Case("changed", "", **SMALL), context.num_ranks)
    mine = everywhere or context.rank == context.num_ranks - 1
    mode = "per_rank" if what == "gradient" else "per_route"
    with new_comm(context, problem.plan, checked=False) as comm:

        def run(change: bool) -> torch.Tensor:
            x, ids, weights = problem.arguments(context)
            routed = comm.dispatch(x, ids, weights, copy=True)
            y = torch.sin(routed.tokens).requires_grad_(what == "gradient")
            if what == "gradient":
                out = comm.combine(y, routed, mode=mode)
            if change:
                ids.copy_(ids.flip(0))
            if what == "gradient":
                (found,) = torch.autograd.grad(out.square().sum(), y)
            else:
                found = comm.combine(y, routed, mode=mode)
            comm.check()
            return found

        want = run(change=False)
        with pytest.raises(tl.InvalidArgument if mine else tl.PeerError, match="topk_ids was changed in place"):
            run(change=mine)
        same_bits(run(change=False), want.cpu(), "afterwards")
