"""Calls in two halves: what is sent is on its way, and what is done meanwhile changes nothing of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.cases import FP32, Case, Problem, each_backend, make_comm, make_problem, same_bits, same_bytes
from tests.support.on_ranks import on_ranks
from tokenloom.backends.seam import CombineOptions, Handle, Sent
from tokenloom.comm.checks import DispatchArguments
from tokenloom.plan import COMBINE_STRATEGIES, DISPATCH_STRATEGIES
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.rank_group import RankGroup

LATE_S = 0.05
CASE = Case("halves", "", tokens=(9, 0, 5, 7), top_k=3, unused=0.2, hidden=16, dtype=FP32)


def send(
    comm: tl.Communicator, x: Any, ids: torch.Tensor, weights: torch.Tensor | None, **options: Any
) -> Sent[tuple[Handle, torch.Tensor]]:
    """The first half of what ``comm.dispatch`` does, in layout "expert"."""
    engine = comm.engine
    arguments = DispatchArguments("expert", **{"sizes": "exact", **options})
    engine.raise_known_errors()
    known, tokens = comm.kinds.check_dispatch(arguments, (False, False, True, False, False), x, ids, weights)
    return engine.send_dispatch(known.prepared, tokens)


def combine_options(strategy: str) -> CombineOptions:
    return CombineOptions(True, FP32, FP32, False, strategy)


@each_backend
@pytest.mark.parametrize("strategy", DISPATCH_STRATEGIES)
def test_dispatch(ranks: Ranks, backend: str, strategy: str) -> None:
    """Between the halves x and the weights get other values, and the rank computes: the result is that of one call."""
    ranks.run(check_dispatch, backend, strategy)


def check_dispatch(context: RankContext, backend: str, strategy: str) -> None:
    problem = make_problem(CASE, context.num_ranks)
    with make_comm(context, backend, problem.plan, checked=False) as comm, torch.no_grad():
        want = comm.dispatch(*problem.arguments(context), strategy=strategy, copy=True)
        for options in ({}, {"sizes": "bounded", "capacity": problem.rows_needed("expert")}):
            x, ids, weights = problem.arguments(context)
            assert isinstance(x, torch.Tensor)
            assert weights is not None
            pending = send(comm, x, ids, weights, strategy=strategy, **options)
            busy(context)
            x.fill_(torch.nan), weights.fill_(torch.nan)
            handle, rows = pending.receive()
            same_bytes(rows[: len(want.tokens)], want.tokens.cpu(), f"rows, {options}")
            same_counts(handle, want)
            out = comm.engine.send_combine(handle, rows, handle.topk_weights, combine_options("dedup")).receive()
            same_bits(out, comm.combine(want.tokens, want).cpu(), "out")


def same_counts(handle: Handle, want: tl.Routed) -> None:
    for name in ("source_counts", "expert_counts", "expert_offsets"):
        assert torch.equal(getattr(handle.counts, name), getattr(want, name)), name


def busy(context: RankContext) -> None:
    """Work on the same streams that has nothing to do with it."""
    values = torch.ones(64, 64, device=context.device)
    for _ in range(4):
        values = values @ values.softmax(-1)


@each_backend
@pytest.mark.parametrize("strategy", COMBINE_STRATEGIES)
def test_combine(ranks: Ranks, backend: str, strategy: str) -> None:
    """Between the halves y gets other values; ``out`` gets the result, once the second half has run."""
    ranks.run(check_combine, backend, strategy)


def check_combine(context: RankContext, backend: str, strategy: str) -> None:
    problem = make_problem(CASE, context.num_ranks)
    mode = {"all_to_all": "per_route", "per_node": "per_node"}.get(strategy, "per_rank")
    with make_comm(context, backend, problem.plan, checked=False) as comm, torch.no_grad():
        routed = comm.dispatch(*problem.arguments(context), copy=True)
        handle, weights = routed._handle, routed._handle.topk_weights
        y = torch.sin(routed.tokens)
        want = comm.combine(y, routed, mode=mode)
        for out in (None, torch.full_like(want, torch.nan)):
            sent = y.clone()
            pending = comm.engine.send_combine(handle, sent, weights, combine_options(strategy), out)
            busy(context)
            sent.fill_(torch.nan)
            found = pending.receive()
            assert out is None or found is out
            same_bits(found, want.cpu(), f"out={out is not None}")


@each_backend
def test_rows_again(ranks: Ranks, backend: str) -> None:
    """What layers send in backward, likewise."""
    ranks.run(check_rows_again, backend)


def check_rows_again(context: RankContext, backend: str) -> None:
    problem = make_problem(CASE, context.num_ranks)
    with make_comm(context, backend, problem.plan, checked=False) as comm, torch.no_grad():
        x, ids, weights = problem.arguments(context)
        assert isinstance(x, torch.Tensor)
        routed = comm.dispatch(x, ids, weights, copy=True)
        assert routed._handle.topk_weights is not None
        want = comm.dispatch(2 * x, ids, weights, copy=True)
        grad = torch.where(routed._handle.positions()[: len(routed._handle.topk_weights)] >= 0, 1.0, 0.0)
        calls: list[tuple[Callable[..., Sent[torch.Tensor]], torch.Tensor, torch.Tensor]] = [
            (lambda given: comm.engine.resend(routed._handle, given), 2 * x, want.tokens),
            (lambda given: comm.engine.send_weight_gradients(routed._handle, given), grad, (ids >= 0).float()),
        ]
        for call, given, expected in calls:
            pending = call(given)
            busy(context)
            given.fill_(torch.nan)
            same_bytes(pending.receive()[: len(expected)], expected.cpu(), "received")


def check_beside_a_late_rank(context: RankContext, check: Callable[..., None], *args: str) -> None:
    """The same, while one rank comes late to each transfer, which then begins behind the changes of the others."""
    start = RankGroup.start_all_to_all

    def start_late(*given: Any, **named: Any) -> Any:
        time.sleep(LATE_S)
        return start(*given, **named)

    for rank in (0, context.num_ranks - 1):
        late = mock.patch.object(RankGroup, "start_all_to_all", start_late)
        with late if context.rank == rank else nullcontext():
            check(context, "collective", *args)


@pytest.mark.slow_on(4)
@pytest.mark.parametrize("check", [(check_dispatch, "dedup"), (check_combine, "dedup"), (check_rows_again,)])
def test_transfers_that_begin_late(ranks: Ranks, check: Any) -> None:
    """gloo reads what is sent when the receiver is there."""
    if ranks.num_ranks == 1:
        pytest.skip("nobody is late")
    ranks.run(check_beside_a_late_rank, *check)


@on_ranks
def test_two_at_once(context: RankContext) -> None:
    """On "collective" two micro-batches may be on their way. They are received in the order of their sending."""
    problems = [make_problem(Case(**(vars(CASE) | {"seed": seed})), context.num_ranks) for seed in (0, 1)]
    with make_comm(context, "collective", problems[0].plan) as comm:
        want = [comm.dispatch(*each.arguments(context)) for each in problems]
        outs = [comm.combine(torch.cos(each.tokens), each) for each in want]
        pendings = [send(comm, *each.arguments(context)) for each in problems]
        found = [pending.receive() for pending in pendings]
        for (handle, rows), expected in zip(found, want, strict=True):
            same_bytes(rows, expected.tokens.cpu(), "rows")
            same_counts(handle, expected)
        halves = [
            comm.engine.send_combine(handle, torch.cos(rows), handle.topk_weights, combine_options("dedup"))
            for handle, rows in found
        ]
        for pending, expected in zip(halves, outs, strict=True):
            same_bits(pending.receive(), expected.cpu(), "out")


# -- ids of received rows -------------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_ids_are_converted_when_they_are_read(ranks: Ranks, backend: str, ids_dtype: torch.dtype) -> None:
    """A cast of all places took memory and time in every dispatch, and hardly anybody reads the ids."""
    ranks.run(check_ids, backend, ids_dtype)


def check_ids(context: RankContext, backend: str, ids_dtype: torch.dtype) -> None:
    problem = make_problem(Case(**(vars(CASE) | {"ids_dtype": ids_dtype})), context.num_ranks)
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        for layout in ("token", "rank", "expert"):
            for sizes in ("exact", "bounded"):
                check_ids_of(context, comm, problem, layout, sizes, ids_dtype)


def check_ids_of(
    context: RankContext, comm: tl.Communicator, problem: Problem, layout: str, sizes: str, ids_dtype: torch.dtype
) -> None:
    capacity = problem.rows_needed("expert") if layout == "expert" and sizes == "bounded" else None
    options: dict[str, Any] = {"layout": layout, "sizes": sizes, "capacity": capacity, "copy": True}
    routed = comm.dispatch(*problem.arguments(context), **options)
    assert "topk_ids" not in vars(routed), "converted before anybody asked"
    if layout == "expert":
        assert routed.topk_ids is None
        return
    ids = routed.topk_ids
    assert ids is not None
    assert ids.dtype == ids_dtype
    assert ids.shape == (*routed.tokens.shape[:-1], problem.plan.top_k)
    assert routed.topk_ids is ids, "converted twice"
