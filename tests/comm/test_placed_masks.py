"""Ranks that are gone under a placement: replicas take over at once, and who comes back has its slots again."""

from __future__ import annotations

import random
import signal
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import pytest
import torch

import tokenloom as tl
from tests.comm.test_masks import CASE, LAYOUTS, backend_of, combine_all_modes, group, options_of, pair, without
from tests.comm.test_on_timeout import require_masked
from tests.conftest import Ranks
from tests.support import emulator
from tests.support.cases import Problem, make_comm, make_problem, same_routed
from tests.support.on_ranks import on_ranks
from tests.support.patience import done, when_done, with_late
from tests.support.placements import drawn_placement, placed
from tests.support.server import Server
from tokenloom import reference
from tokenloom.plan import Plan
from tokenloom.runtime.processes import RankContext

__all__ = ["group"]
EMULATED = True
LATE = replace(CASE, tokens=(7, 5, 4, 6), pick="repeats", unused=0.0)
TIMEOUT_S = 1.5
SPREAD_S = 0.01
"""In which a process ends. A pair of calls takes milliseconds, so it ends in one of the next few pairs."""


def twice(plan: Plan) -> tl.Placement:
    """Every expert on its own rank and on the next one, except expert 1, which the first rank alone has."""
    table = torch.arange(plan.num_experts).view(plan.num_ranks, -1)
    table = torch.cat([table, table.roll(1, 0)], 1)
    table[1, plan.experts_per_rank + 1] = -1
    return tl.Placement(table, num_experts=plan.num_experts)


def by_slots(problem: Problem, placement: tl.Placement, masked: list[int]) -> Problem:
    """The problem of those that live, whose routes go to slots of ranks that live."""
    return without(placed(problem, placement, masked), masked)


def trip(
    context: RankContext, comm: tl.Communicator, problem: Problem, placement: tl.Placement, masked: list[int]
) -> None:
    """A dispatch and its combines without these ranks, in every layout."""
    rest = by_slots(problem, placement, masked)
    for layout in LAYOUTS:
        options = options_of(rest, layout)
        want = rest.dispatched(**options)
        routed = comm.dispatch(*problem.arguments(context), **options)
        same_routed(routed, want[context.rank], rest.plan, bounded=layout == "slots")
        combine_all_modes(context, comm, routed, rest, want, rest.topk_ids)
    assert comm.masked_ranks() == masked


@on_ranks("group")
@pytest.mark.parametrize("which", ["first", "last"])
def test_replicas_take_over(context: RankContext, which: str) -> None:
    """From the next call on. Expert 1 counts as -1 where it is lost, and is in a list and in describe()."""
    problem = make_problem(CASE, context.num_ranks)
    placement = twice(problem.plan)
    comm = make_comm(context, backend_of(context), problem.plan, placement=placement)
    trip(context, comm, problem, placement, [])
    assert comm.lost_experts() == []
    masked = [0 if which == "first" else context.num_ranks - 1]
    before = comm.dispatch(*problem.arguments(context), copy=True)
    if context.rank in masked:
        return
    comm.mask_ranks(masked)
    lost = [1] if which == "first" else []
    assert comm.lost_experts() == lost
    assert ("experts that are lost with masked ranks: 1" in comm.describe()) == bool(lost)
    trip(context, comm, problem, placement, masked)
    # Of an earlier dispatch the routes to masked ranks count as -1: their rows are there, or nowhere.
    by_slot = placed(problem, placement)
    want = by_slot.dispatched("expert")
    combine_all_modes(context, comm, before, by_slot, want, without(by_slot, masked).topk_ids)


@on_ranks("group")
def test_placed_anew_without_a_rank(context: RankContext) -> None:
    """Those that live place lost experts elsewhere: nothing is lost then."""
    problem = make_problem(CASE, context.num_ranks)
    comm = make_comm(context, backend_of(context), problem.plan, placement=twice(problem.plan))
    if context.rank == 0:
        return
    comm.mask_ranks([0])
    table = comm.placement.to_tensor() if comm.placement else torch.empty(0)
    table[1, problem.plan.experts_per_rank + 1] = 1  # into the empty slot
    placement = tl.Placement(table, num_experts=problem.plan.num_experts)
    comm.set_placement(placement)
    assert comm.lost_experts() == []
    trip(context, comm, problem, placement, [0])


@on_ranks("group")
def test_back_again(context: RankContext) -> None:
    """A rank that comes back has its slots by the table."""
    problem = make_problem(CASE, context.num_ranks)
    placement = twice(problem.plan)
    comm = make_comm(context, backend_of(context), problem.plan, placement=placement)
    trip(context, comm, problem, placement, [])
    if context.rank == 0:
        comm.close()
        comm = make_comm(context, backend_of(context), problem.plan, placement=placement, rejoin=True)
    else:
        comm.mask_ranks([0])
        trip(context, comm, problem, placement, [0])
        comm.unmask_ranks([0])
    assert comm.lost_experts() == []
    trip(context, comm, problem, placement, [])


@pytest.mark.skipif(emulator.ON, reason="processes over gloo")
def test_back_with_another_placement(two: Ranks) -> None:
    """The placement of now counts, not the one of the beginning; both sides are told the first expert that differs."""
    two.run(check_other_placement)


def check_other_placement(context: RankContext) -> None:
    problem = make_problem(CASE, context.num_ranks)
    first, second = (drawn_placement(problem.plan, 2, seed) for seed in (1, 2))
    comm = make_comm(context, "collective", problem.plan, placement=first)
    expected = pytest.raises(tl.PlanMismatch, match=r"rank 0 has slots of expert \d=")
    if context.rank == 0:
        comm.close()
        with expected:
            make_comm(context, "collective", problem.plan, placement=first, rejoin=True)
        comm = make_comm(context, "collective", problem.plan, placement=second, rejoin=True)
    else:
        comm.mask_ranks([0])
        comm.set_placement(second)
        with expected:
            comm.unmask_ranks([0])
        comm.unmask_ranks([0])
    trip(context, comm, problem, second, [])


@pytest.mark.skipif(emulator.ON, reason="processes over gloo")
@pytest.mark.parametrize("layout", ["expert"])
def test_late_for_a_dispatch(four: Ranks, layout: str) -> None:
    """The call that finds a rank late loses just the routes to its slots; from the next one on replicas take over."""
    four.run(with_late, 0, check_late, layout)


def check_late(context: RankContext, layout: str) -> None:
    problem = make_problem(LATE, context.num_ranks)
    placement = twice(problem.plan)
    options: dict[str, Any] = {"timeout_s": TIMEOUT_S, "on_timeout": "mask", "placement": placement}
    comm = make_comm(context, "collective", problem.plan, **options)
    trip(context, comm, problem, placement, [])
    if context.rank == 0:
        when_done(comm.engine.ranks, list(range(1, context.num_ranks)))
        with pytest.raises(tl.CommunicatorBroken, match="have masked rank 0"):
            comm.dispatch(*problem.arguments(context))
        return
    rest = without(placed(problem, placement), [0])
    routed, want = comm.dispatch(*problem.arguments(context), layout=layout), rest.dispatched(layout)
    same_routed(routed, want[context.rank], rest.plan)
    combine_all_modes(context, comm, routed, rest, want, rest.topk_ids)
    assert comm.lost_experts() == [1]
    trip(context, comm, problem, placement, [0])
    done(comm.engine.ranks)


@on_ranks("group")
def test_lost_without_a_placement(context: RankContext) -> None:
    """They are those of the masked ranks."""
    problem = make_problem(CASE, context.num_ranks)
    comm = make_comm(context, backend_of(context), problem.plan)
    assert comm.lost_experts() == []
    if context.rank == 0:
        return
    comm.mask_ranks([0])
    pair(context, comm, problem, [0], "token")
    assert comm.lost_experts() == list(range(problem.plan.experts_per_rank))


# -- processes that die -----------------------------------------------------------------------------------------


def replicated(which: str, plan: Plan) -> tl.Placement:
    """A placement with replicas of all, some or none of the experts."""
    if which == "none":
        return tl.Placement.default(plan.num_experts, plan.num_ranks)
    table = torch.arange(plan.num_experts).view(plan.num_ranks, -1)
    spare = table.roll(1, 0)
    if which == "some":
        spare[:, 0] = -1
    return tl.Placement(torch.cat([table, spare], 1), num_experts=plan.num_experts)


class Death(NamedTuple):
    """When a rank's process ends: some time behind the beginning of a pair of calls, wherever it is then.

    It ends itself. A signal of another process would come after the last pair now and then, on a busy machine.
    """

    rank: int
    pair: int
    delay_s: float


def serve(context: RankContext, pipe: Connection, num_calls: int, which: str, death: Death) -> None:
    """Pairs of calls whose results tell which routes counted, as test_on_timeout.py's, whose experts have replicas."""
    rank, num_ranks = context.rank, context.num_ranks
    plan = Plan(num_ranks, 2 * num_ranks, 8, 3, 6)
    placement = replicated(which, plan)
    table, slots = placement.to_tensor().tolist(), placement.slots_per_rank
    comm = make_comm(context, "collective", plan, on_timeout="mask", timeout_s=20.0, placement=placement)
    masked: list[int] = []
    for number in range(num_calls):
        if number % 20 == 0:
            pipe.send(("pair", (number, masked, comm.engine.ranks.why_masked())))
        if (rank, number) == death[:2]:
            signal.setitimer(signal.ITIMER_REAL, death.delay_s)  # its signal ends a process that does not handle it
        generator = torch.Generator().manual_seed(number * num_ranks + rank)
        ids = torch.randint(-1, plan.num_experts, (number % 7, 3), generator=generator)
        x = torch.randint(1, 9, (number % 7, 8), generator=generator).float()
        _, (*_, of_routes) = reference.place(plan, [ids[:0]] * rank + [ids], table, masked)
        routed = comm.dispatch(x, ids, torch.ones(ids.shape), layout=("expert", "slots")[number % 2])
        out = comm.combine(routed.tokens, routed, mode=("per_rank", "per_route")[number // 2 % 2])
        expected = []
        for gone in (masked, comm.masked_ranks()):
            counts = ((of_routes >= 0) & ~torch.isin(of_routes // slots, torch.tensor(gone, dtype=torch.int64))).sum(1)
            expected.append(x * counts[:, None])
        assert any(torch.equal(out, each) for each in expected), f"pair {number}: {out} is neither of {expected}"
        masked = comm.masked_ranks()
        assert comm.lost_experts() == [e for e in range(plan.num_experts) if which != "all" and e // 2 in masked
                                       and (which == "none" or e % 2 == 0)]  # fmt: skip
    pipe.send(("pair", (num_calls, masked, comm.engine.ranks.why_masked())))
    comm.close()


@pytest.mark.skipif(emulator.ON, reason="processes over gloo")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "num_calls", "rounds"),
    [
        ("some", 300, 1),
        *(pytest.param(which, 300, 1, marks=pytest.mark.full) for which in ("all", "none")),
        *(pytest.param(which, 5000, 1, marks=pytest.mark.soak) for which in ("all", "some", "none")),
        *(pytest.param(which, 40, 334, marks=pytest.mark.soak) for which in ("all", "some", "none")),
    ],
)
def test_death_in_the_middle(which: str, num_calls: int, rounds: int) -> None:
    """A process ends at some moment: from the next pair on no route is lost whose expert has a living replica."""
    for _ in range(rounds):
        death = Death(random.randrange(4), random.randrange(num_calls // 4), SPREAD_S * random.random())
        with Server(4, serve, num_calls, which, death, device="cpu") as ranks:
            for rank in {0, 1, 2, 3} - {death.rank}:
                require_masked(ranks, rank, num_calls, [death.rank])
