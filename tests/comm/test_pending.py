"""Calls that users make in two halves: the results and the gradients of one call."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.support.cases import (
    BF16,
    FP32,
    Case,
    Problem,
    case_params,
    each_backend,
    make_comm,
    make_problem,
    on_another_stream,
    same_bits,
    same_bytes,
    same_routed,
)
from tests.support.on_ranks import on_ranks
from tests.support.slow import mostly_slow
from tokenloom.runtime.processes import RankContext

pytestmark = pytest.mark.slow_on(4)
CASE = Case("pending", "", tokens=(9, 0, 5, 7), top_k=3, unused=0.2, hidden=16, dtype=FP32)
BATCHES = 5


def batches(num_ranks: int, count: int = BATCHES) -> list[Problem]:
    """Micro-batches of one communicator."""
    return [make_problem(replace(CASE, seed=seed), num_ranks) for seed in range(count)]


def work_on(rows: torch.Tensor) -> torch.Tensor:
    """What experts might do."""
    return torch.sin(rows) + rows


def combined(comm: tl.Communicator, problem: Problem, context: RankContext, **options: Any) -> torch.Tensor:
    """Dispatch, work and combine, each in one piece."""
    routed = comm.dispatch(*problem.arguments(context), **options)
    return comm.combine(work_on(routed.tokens), routed)


# -- the same as in one piece -----------------------------------------------------------------------------------


@on_ranks
@each_backend
@pytest.mark.parametrize("case", case_params(["plain", "top8", "unused", "no-tokens", "fp8"]))
def test_dispatch(context: RankContext, backend: str, case: Case) -> None:
    """Every layout and size; between the halves what was sent gets other values."""
    problem = make_problem(case, context.num_ranks)
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        for layout in ("token", "rank", "expert", "slots"):
            for sizes in ("exact", "bounded")[layout == "slots" :]:
                bounded = sizes == "bounded"
                needed = max(1, problem.rows_needed(layout)) if bounded and layout != "rank" else None
                x, ids, weights = problem.arguments(context)
                pending = comm.send_dispatch(x, ids, weights, layout=layout, sizes=sizes, capacity=needed)
                assert isinstance(pending, tl.Pending)
                for given in (*(x if isinstance(x, tuple) else (x,)), weights):
                    assert isinstance(given, torch.Tensor)
                    given.view(torch.uint8).fill_(1)
                want = problem.dispatched(layout, capacity=needed, bounded=bounded)
                same_routed(pending.receive(), want[context.rank], problem.plan, bounded=bounded)


@on_ranks
@each_backend
@pytest.mark.parametrize("mode", ["per_rank", "per_route"])
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
def test_combine(context: RankContext, backend: str, mode: Any, weighted: bool) -> None:
    """Between the halves y gets other values."""
    problem = make_problem(CASE, context.num_ranks)
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        routed = comm.dispatch(*problem.arguments(context), copy=True)
        options: dict[str, Any] = {"mode": mode, "weighted": weighted, "wire_dtype": BF16, "out_dtype": FP32}
        want = comm.combine(work_on(routed.tokens), routed, **options)
        y = work_on(routed.tokens)
        pending = comm.send_combine(y, routed, **options)
        y.fill_(torch.nan)
        same_bits(pending.receive(), want.cpu(), "out")


@on_ranks
@each_backend
@pytest.mark.parametrize("layout", mostly_slow(["token", "expert", "slots"], ["expert"]))
def test_a_dispatch_that_is_let_go_between_the_halves(context: RankContext, backend: str, layout: Any) -> None:
    """What the second half of a combine reads of the dispatch stays, though other tensors want its memory."""
    problem = make_problem(CASE, context.num_ranks)
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        want = combined(comm, problem, context, layout=layout)
        for _ in range(3):
            routed = comm.dispatch(*problem.arguments(context), layout=layout)
            handle = weakref.ref(routed._handle)
            pending = comm.send_combine(work_on(routed.tokens), routed)
            del routed
            gc.collect()
            if backend == "nvlink":
                assert handle() is not None
            junk = [torch.full((2**size,), 2**30, dtype=torch.int32, device=context.device) for size in range(16)] * 8
            same_bits(pending.receive(), want.cpu(), "out")
            del junk


@on_ranks
@each_backend
def test_on_another_stream(context: RankContext, backend: str) -> None:
    """Both halves run on the stream that is current."""
    problem = make_problem(CASE, context.num_ranks)
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        want = combined(comm, problem, context)
        with on_another_stream(context.device):
            routed = comm.send_dispatch(*problem.arguments(context)).receive()
            out = comm.send_combine(work_on(routed.tokens), routed).receive()
        same_bits(out, want.cpu(), "out")


@on_ranks
@each_backend
@pytest.mark.parametrize("order", ["oldest first", "newest first"])
def test_two_micro_batches_in_turns(context: RankContext, backend: str, order: str) -> None:
    """One is computed while the other travels: all along two calls are open, and no result is another's."""
    newest_first = order == "newest first"
    problems = batches(context.num_ranks, 6)
    with make_comm(context, backend, problems[0].plan) as comm, torch.no_grad():
        want = [combined(comm, problem, context).clone() for problem in problems]
        outs: list[torch.Tensor] = []
        for first, second in zip(problems[::2], problems[1::2], strict=True):
            pendings = [comm.send_dispatch(*each.arguments(context)) for each in (first, second)]
            if newest_first:
                later = pendings[1].receive()
            routed = pendings[0].receive()
            home = [comm.send_combine(work_on(routed.tokens), routed)]
            if not newest_first:
                later = pendings[1].receive()
            home.append(comm.send_combine(work_on(later.tokens), later))
            outs += [each.receive() for each in (home[::-1] if newest_first else home)][:: -1 if newest_first else 1]
        for out, expected in zip(outs, want, strict=True):
            same_bits(out, expected.cpu(), "out")


@on_ranks
@each_backend
def test_ranks_receive_in_orders_of_their_own(context: RankContext, backend: str) -> None:
    """Only calls have an order: what one rank receives first, another may receive last."""
    problems = batches(context.num_ranks, 2)
    with make_comm(context, backend, problems[0].plan) as comm, torch.no_grad():
        pendings = [comm.send_dispatch(*each.arguments(context)) for each in problems]
        for index in (0, 1) if context.rank % 2 else (1, 0):
            want = problems[index].dispatched("expert")[context.rank]
            same_routed(pendings[index].receive(), want, problems[index].plan)


# -- gradients --------------------------------------------------------------------------------------------------


@on_ranks
@each_backend
@pytest.mark.parametrize("layout", ["expert", "token", "slots"])
def test_gradients(context: RankContext, backend: str, layout: Any) -> None:
    """Those of one piece, bit for bit, for x as it was sent, and wherever the second half runs."""
    problem = make_problem(CASE, context.num_ranks)
    x, ids, weights = problem.arguments(context)
    assert isinstance(x, torch.Tensor)
    assert weights is not None
    x = x.nan_to_num(1, 1, 1)
    with make_comm(context, backend, problem.plan) as comm:

        def gradients(halves: bool) -> list[torch.Tensor]:
            leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
            sent, factors = leaves[0] * 2, leaves[1] * 3
            if not halves:
                routed = comm.dispatch(sent, ids, factors, layout=layout)
                out = comm.combine(work_on(routed.tokens), routed)
            else:
                pending = comm.send_dispatch(sent, ids, factors, layout=layout)
                sent.mul_(5), factors.mul_(7)
                with torch.no_grad():
                    routed = pending.receive()
                home = comm.send_combine(work_on(routed.tokens), routed)
                with torch.no_grad():
                    out = home.receive()
            loss = (out * torch.cos(out.detach())).sum()
            if routed.topk_weights is not None:
                loss = loss + (routed.topk_weights**2).sum()
            return [out.detach(), *torch.autograd.grad(loss, leaves)]

        for name, got, want in zip(("out", "x", "weights"), gradients(True), gradients(False), strict=True):
            same_bits(got, want.cpu(), name)


@on_ranks
@each_backend
def test_gradients_of_one_of_two(context: RankContext, backend: str) -> None:
    """Weights alone, or rows alone, may want one; without there is no graph."""
    problem = make_problem(CASE, context.num_ranks)
    with make_comm(context, backend, problem.plan) as comm:
        for wants_x, wants_weights in ((True, False), (False, True), (False, False)):
            x, ids, weights = problem.arguments(context)
            assert isinstance(x, torch.Tensor)
            assert weights is not None
            x.requires_grad_(wants_x), weights.requires_grad_(wants_weights)
            routed = comm.send_dispatch(x, ids, weights).receive()
            assert routed.tokens.requires_grad == wants_x
            out = comm.send_combine(routed.tokens, routed).receive()
            assert out.requires_grad == (wants_x or wants_weights)
            if out.requires_grad:
                out.sum().backward()
            assert (x.grad is not None, weights.grad is not None) == (wants_x, wants_weights)


@on_ranks
@each_backend
def test_rows_that_backward_needs(context: RankContext, backend: str) -> None:
    """If y gets other values, gradients of its weights would be wrong: backward says so, as ever."""
    problem = make_problem(CASE, context.num_ranks)
    with make_comm(context, backend, problem.plan) as comm:
        x, ids, weights = problem.arguments(context)
        assert weights is not None
        routed = comm.dispatch(x, ids, weights.requires_grad_(), copy=True)
        y = work_on(routed.tokens)
        pending = comm.send_combine(y, routed)
        y.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            pending.receive().sum().backward()


@on_ranks
def test_bytes_of_two_calls_are_kept_apart(context: RankContext) -> None:
    """On "collective" with a payload by every strategy, since their transfers differ in number."""
    problems = batches(context.num_ranks, 3)
    with make_comm(context, "collective", problems[0].plan) as comm, torch.no_grad():
        want = [comm.dispatch(*each.arguments(context)) for each in problems]
        strategies = ("all_gather", "all_to_all", "dedup")
        for index, (problem, strategy) in enumerate(zip(problems, strategies, strict=True)):
            other = (index + 1) % 3
            pendings = [
                comm.send_dispatch(*problem.arguments(context), strategy=strategy),
                comm.send_dispatch(*problems[other].arguments(context), strategy=strategies[other]),
            ]
            for pending, expected in zip(pendings[::-1], (want[other], want[index]), strict=True):
                same_bytes(pending.receive().tokens, expected.tokens.cpu(), strategy)
