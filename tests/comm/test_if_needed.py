"""Dispatches with copy="if_needed": outputs that are the caller's as long as somebody holds them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.support.cases import (
    FP8,
    Case,
    Problem,
    each_backend,
    expert_rows,
    make_comm,
    make_problem,
    same_bits,
    same_bytes,
    same_routed,
)
from tests.support.on_ranks import on_ranks
from tokenloom.errors import InvalidArgument, PeerError
from tokenloom.plan import RECIPES
from tokenloom.runtime.processes import RankContext

CASE = Case("if needed", "", tokens=(6, 0, 3, 5), top_k=3, unused=0.2, hidden=256)
KINDS: list[Any] = [
    pytest.param(layout, {**options, **sizes}, dtype, id=f"{layout} {sizes['sizes']} {str(dtype)[6:]}")
    for layout, options in (("token", {}), ("rank", {}), ("expert", {"alignment": 4}))
    for sizes in ({"sizes": "exact"}, {"sizes": "bounded", "capacity": None if layout == "rank" else 80})
    for dtype in (torch.bfloat16, FP8)
]


def problems(dtype: torch.dtype, context: RankContext, number: int) -> list[Problem]:
    """Other tokens and routes each time."""
    case = replace(CASE, dtype=dtype)
    return [make_problem(replace(case, seed=seed), context.num_ranks) for seed in range(number)]


def views_of(comm: tl.Communicator) -> bool:
    """Whether outputs of this backend are views unless they are copied."""
    return comm.engine.capabilities.returns_views


@on_ranks
@pytest.mark.sampled(5)
@each_backend
@pytest.mark.parametrize(("layout", "options", "dtype"), KINDS)
def test_results_that_are_held(
    context: RankContext, backend: str, layout: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """More of them than there are buffers outlive all kinds of later calls, and can be combined."""
    found = problems(dtype, context, 5)
    bounded = options["sizes"] == "bounded"
    with make_comm(context, backend, found[0].plan) as comm, torch.no_grad():
        held = []
        for problem, copy in zip(found, ("if_needed", "if_needed", True, "if_needed", False), strict=True):
            arguments = problem.arguments(context)
            held.append(comm.dispatch(*arguments, layout=layout, copy=copy, **options))
            # by routes of the first, beside which other rows lie
            again = comm.dispatch_again(found[0].arguments(context)[0], held[0], copy="if_needed")
            rows, scales = again if isinstance(again, tuple) else (again, None)
            known = range(held[0].num_rows) if not bounded and layout != "rank" else []
            assert torch.equal(rows[list(known)].view(torch.uint8), held[0].tokens[list(known)].view(torch.uint8))
            assert scales is None or torch.equal(scales[list(known)], held[0].scales[list(known)])
        for problem, routed in zip(found, held, strict=True):
            want = problem.dispatched(layout, alignment=options.get("alignment", 1))
            if bounded:
                check_rows(routed, want[context.rank])
            else:
                same_routed(routed, want[context.rank], problem.plan)
        for problem, routed in zip(found[:4], held, strict=False):
            y = torch.ones(routed.tokens.shape, dtype=torch.bfloat16, device=context.device)
            home = comm.combine(y, routed, weighted=False if layout == "expert" else None).cpu()
            ids = problem.topk_ids[context.rank]
            if layout == "expert":
                assert torch.equal(home[:, 0].float(), (ids >= 0).sum(1).float())


def check_rows(routed: tl.Routed, want: Any) -> None:
    """All rows that a dispatch of bounded size specifies."""
    assert int(routed.num_rows) == want.num_rows
    places = sorted(want.rows.values())
    got, expected = (each.view(torch.uint8).flatten(0, -2) for each in (routed.tokens.cpu(), want.tokens))
    assert torch.equal(got[places], expected[places])


@on_ranks
@each_backend
def test_what_is_let_go(context: RankContext, backend: str) -> None:
    """Rows lie where they arrived if no others do; so do the next, once nobody holds these or a view of them."""
    problem = make_problem(CASE, context.num_ranks)
    want = problem.dispatched("token")[context.rank]
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():

        def dispatch(copy: Any = "if_needed") -> tl.Routed:
            return comm.dispatch(*problem.arguments(context), layout="token", copy=copy)

        places = set()
        for _ in range(5):
            part = dispatch().tokens[:1].view(torch.uint8)  # of a result that is let go but for this
            beside = [dispatch(), dispatch(False), dispatch(False), dispatch(False)]
            for routed in beside:
                same_routed(routed, want, problem.plan)
            same_bytes(part, want.tokens[:1].view(torch.uint8), "what is left of the rows")
            places.add(part.data_ptr())
            del part, beside, routed
            settle(comm, problem.arguments(context))
        if views_of(comm) and want.num_rows:
            assert len(places) <= 2, "rows were copied that nothing stood in the way of"


def settle(comm: tl.Communicator, arguments: tuple[Any, ...]) -> None:
    """The emulator keeps all tensors around until it launches a kernel behind those that were under way."""
    comm.check()
    comm.dispatch(*arguments, layout="slots")


@on_ranks
@each_backend
def test_halves_beside_it(context: RankContext, backend: str) -> None:
    """Two dispatches that are open at once need both buffers: refused by name while one is held, on some rank."""
    problem = make_problem(replace(CASE, tokens=(6, 3)), context.num_ranks)
    arguments = problem.arguments(context)
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        held = comm.dispatch(*arguments, layout="token", copy="if_needed")
        slots = comm.send_dispatch(*arguments, layout="slots").receive()  # whose rows are never lent
        assert slots.layout == "slots"
        if views_of(comm):
            with pytest.raises((InvalidArgument, PeerError), match="are still held"):
                comm.send_dispatch(*arguments, layout="token")
        del held, slots
        settle(comm, arguments)
        routed = comm.send_dispatch(*arguments, layout="token").receive()
        same_routed(routed, problem.dispatched("token")[context.rank], problem.plan)


@on_ranks
@each_backend
def test_halves_in_the_other_order(context: RankContext, backend: str) -> None:
    """Rows that are received late are copied: lent, they would leave the next dispatch the rows of the one between."""
    first, second, third = problems(torch.bfloat16, context, 3)
    options: dict[str, Any] = {"layout": "rank", "sizes": "bounded"}
    with make_comm(context, backend, first.plan) as comm, torch.no_grad():
        a = comm.send_dispatch(*first.arguments(context), **options, copy="if_needed")
        between = comm.send_dispatch(*second.arguments(context), **options).receive()
        late = a.receive()
        comm.dispatch(*third.arguments(context), **options)
        assert comm.combine(between.tokens, between).shape == second.arguments(context)[0].shape
        for routed, problem in ((between, second), (late, first)):
            same_routed(routed, problem.dispatched("rank", bounded=True)[context.rank], problem.plan, bounded=True)


@on_ranks
@each_backend
def test_the_usual_call(context: RankContext, backend: str) -> None:
    """From the second time on calls are short, with counts that the host knows; an error is one all the same."""
    problem = make_problem(CASE, context.num_ranks)
    want = problem.dispatched("expert", alignment=4)
    y = expert_rows(problem, want, torch.bfloat16)[context.rank].to(context.device)
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        home = comm.combine(y, comm.dispatch(*problem.arguments(context), alignment=4, copy=True))
        for _ in range(3):
            routed = comm.dispatch(*problem.arguments(context), alignment=4, copy="if_needed")
            same_routed(routed, want[context.rank], problem.plan)
            assert routed.counts_on_host() == want[context.rank].expert_counts
            same_bits(comm.combine(y, routed), home.cpu(), "combined")
        bounded = comm.dispatch(*problem.arguments(context), layout="slots")
        assert bounded.counts_on_host() == want[context.rank].expert_counts
        with pytest.raises(InvalidArgument, match=r"copy is 'never', expected False, True or 'if_needed'"):
            comm.dispatch(*problem.arguments(context), copy="never")  # type: ignore[call-overload]
        with pytest.raises(InvalidArgument, match="copy is False, expected True or 'if_needed'"):
            comm.dispatch_again(problem.arguments(context)[0], routed, copy=False)
        same_routed(comm.dispatch(*problem.arguments(context), alignment=4), want[context.rank], problem.plan)


@on_ranks
@each_backend
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_again(context: RankContext, backend: str, recipe: str) -> None:
    """Rows with scales go to the places of an earlier dispatch; layout "slots", with its own scales, refuses."""
    first, other = problems(FP8, context, 2)
    if recipe == "row":
        first, other = (replace(each, scales=[s[:, 0].contiguous() for s in each.scales]) for each in (first, other))
    other = replace(first, xs=other.xs, scales=other.scales)  # other rows by the same routes
    with make_comm(context, backend, first.plan) as comm, torch.no_grad():
        for layout, options in itertools.product(("token", "expert"), ({}, {"sizes": "bounded", "capacity": 80})):
            routed = comm.dispatch(*first.arguments(context), layout=layout, recipe=recipe, **options)
            rows, scales = comm.dispatch_again(other.arguments(context)[0], routed)
            comm.dispatch_again(first.arguments(context)[0], routed)
            want = other.dispatched(layout)[context.rank]
            assert want.scales is not None
            same_bytes(rows[: want.num_rows], want.tokens, "rows")
            same_bytes(scales[: want.num_rows], want.scales, "scales")
        ranks = comm.dispatch(*first.arguments(context), layout="rank", recipe=recipe)
        assert ranks.scales is not None
        _, scales = comm.dispatch_again(other.arguments(context)[0], ranks)
        assert scales.shape == ranks.scales.shape
        slots = comm.dispatch(*first.arguments(context), layout="slots", recipe=recipe)
        with pytest.raises(InvalidArgument, match="in layout 'slots'; dispatch them anew"):
            comm.dispatch_again(other.arguments(context)[0], slots)
