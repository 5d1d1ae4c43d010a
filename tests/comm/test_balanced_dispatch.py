"""Calls with ``balance="batch"``: bit for bit what the reference says of the routes as its split has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tokenloom as tl
from tests.comm.test_placed_dispatch import CASE, HOT, check_trip, same_trips, trained
from tests.support.cases import (
    BF16,
    Case,
    case_params,
    each_backend,
    expert_rows,
    make_comm,
    make_problem,
    same_bits,
    same_routed,
)
from tests.support.graph_cases import Captured
from tests.support.on_ranks import on_ranks
from tests.support.placements import balanced, drawn_placement
from tokenloom import reference
from tokenloom.comm.balance import default_rows_per_pull
from tokenloom.plan import Plan
from tokenloom.runtime.processes import RankContext

LAYOUTS = ("token", "rank", "expert", "slots")
EMULATED = True


def with_spare(plan: Plan, spare: int = 1) -> tl.Placement:
    return tl.Placement.default(plan.num_experts, plan.num_ranks, plan.experts_per_rank + spare)


@on_ranks
@pytest.mark.slow_on(1, 4)
@each_backend
@pytest.mark.parametrize(
    "case", case_params(["top1", "repeats", "unused", "to-one-expert", "first-empty", "no-tokens"])
)
def test_there_and_back(context: RankContext, backend: str, case: Case) -> None:
    """Every layout and mode, with empty slots for a part of all needs, and with replicas too."""
    problem = make_problem(case, context.num_ranks)
    for placement in (with_spare(problem.plan), drawn_placement(problem.plan, 2, case.seed)):
        comm = make_comm(context, backend, problem.plan, placement=placement, balance="batch", rows_per_pull=0)
        by_slot, batch = balanced(problem, placement)
        for layout in LAYOUTS:
            routed = check_trip(context, comm, problem, by_slot, layout)
            assert routed.slot_experts.tolist() == batch[context.rank]
        comm.check()


@on_ranks
@pytest.mark.slow_on(1, 4)
@each_backend
@pytest.mark.parametrize("layout", ["expert", "slots"])
def test_same_bits(context: RankContext, backend: str, layout: str) -> None:
    """Per route, which is the default there, results and gradients are those of a batch that is not split."""
    for case in (replace(CASE, seed=3, dtype=BF16), HOT):
        problem = make_problem(case, context.num_ranks)
        want = trained(context, make_comm(context, backend, problem.plan), problem, layout, "per_route")
        for spare in (1, problem.plan.num_experts):
            comm = make_comm(context, backend, problem.plan, spare_slots=spare, balance="batch", rows_per_pull=0)
            found = trained(context, comm, problem, layout, None)
            same_trips(found, want, f"{layout}, {case.pick}, {spare}")


@on_ranks
@pytest.mark.slow_on(1, 4)
@each_backend
def test_room_for_the_mean(context: RankContext, backend: str) -> None:
    """A bounded dispatch has room for an even batch by default, whatever the router does. It is split at any price."""
    problem = make_problem(HOT, context.num_ranks)
    plan, rank = problem.plan, context.rank
    spare = plan.experts_per_rank
    comm = make_comm(context, backend, plan, spare_slots=spare, balance="batch", rows_per_pull=10**6)
    by_slot, batch = balanced(problem, with_spare(plan, spare), always=True)
    assert by_slot.rows_needed("expert") <= plan.max_tokens_per_rank * plan.top_k
    for alignment in (1, 16):
        room = by_slot.plan.even_rows(alignment)
        want = by_slot.dispatched("expert", alignment=alignment, capacity=room, bounded=True)
        routed = comm.dispatch(*problem.arguments(context), sizes="bounded", alignment=alignment)
        assert len(routed.tokens) == room
        same_routed(routed, want[rank], by_slot.plan, bounded=True)
        assert routed.slot_experts.tolist() == batch[rank]
    comm.check()


@on_ranks
@pytest.mark.slow_on(1, 4)
@each_backend
def test_overflow_where_slots_run_out(context: RankContext, backend: str) -> None:
    """Too few empty slots for an even batch: what does not fit is told, as ever, and the communicator works on."""
    problem = make_problem(
        replace(HOT, tokens=(7,), spare=0, unused=0.0, experts_per_rank=8, pick="one rank"), context.num_ranks
    )
    plan = problem.plan
    if plan.num_ranks == 1:
        return
    comm = make_comm(context, backend, plan, spare_slots=1, balance="batch", rows_per_pull=0)
    by_slot, _ = balanced(problem, with_spare(plan), always=True)
    needed, room = by_slot.rows_needed("expert"), plan.max_tokens_per_rank * plan.top_k
    assert needed > room, "the case"
    comm.dispatch(*problem.arguments(context), sizes="bounded")
    with pytest.raises(tl.CapacityOverflow, match=f"{needed}"):
        comm.check()
    with pytest.raises(tl.CapacityOverflow, match=f"{needed}"):
        comm.dispatch(*problem.arguments(context), capacity=room)
    check_trip(context, comm, problem, balanced(problem, with_spare(plan))[0], "token")


@on_ranks("four")
def test_whether_it_pays(context: RankContext) -> None:
    """At the threshold and above it: split, or as the placement has it. Stats and describe() say so."""
    problem = make_problem(HOT, context.num_ranks)
    placement, rank = with_spare(problem.plan), context.rank
    fullest = max(sum(int((ids >= 0).sum()) for ids in problem.topk_ids), 1)
    by_slot, batch = balanced(problem, placement)
    now = by_slot.rows_needed("expert")
    pulls = context.num_ranks - 1  # all from one rank
    most = (fullest - now) // pulls
    for rows_per_pull, pays in ((most, True), (most + 1, False)):
        comm = make_comm(
            context, "collective", problem.plan, placement=placement, balance="batch", rows_per_pull=rows_per_pull
        )
        assert f"gets rid of {rows_per_pull} rows or more" in comm.describe()
        assert comm.balance_stats() == (0, 0, 0, 0, 0)
        routed = comm.dispatch(*problem.arguments(context))
        table = batch if pays else placement.to_tensor().tolist()
        assert routed.slot_experts.tolist() == table[rank]
        once = (1, int(pays), fullest, now if pays else fullest, pulls * pays)
        assert comm.balance_stats() == once
        comm.dispatch(*problem.arguments(context), layout="token")
        assert comm.balance_stats() == tuple(2 * each for each in once)
    comm = make_comm(context, "collective", problem.plan, placement=placement, balance="batch", rows_per_pull=0)
    assert "where that evens them" in comm.describe()
    plan = comm.engine.plan
    assert (
        f"{plan.max_tokens_per_rank * plan.top_k} rows instead of {plan.worst_case_rows('expert')}" in comm.describe()
    )


@on_ranks("four")
def test_without_ranks(context: RankContext) -> None:
    """Masked ranks neither give nor help."""
    problem = make_problem(replace(CASE, tokens=(7, 5, 4, 6)), context.num_ranks)
    placement, gone = with_spare(problem.plan, 2), context.num_ranks - 1
    comm = make_comm(context, "collective", problem.plan, placement=placement, balance="batch", rows_per_pull=0)
    if context.rank == gone:
        return
    comm.mask_ranks([gone])
    living = replace(problem, topk_ids=[ids if r != gone else ids[:0] for r, ids in enumerate(problem.topk_ids)])
    by_slot, batch = balanced(living, placement, [gone])
    routed = comm.dispatch(*problem.arguments(context), layout="expert")
    assert routed.slot_experts.tolist() == batch[context.rank]
    counts = [0] * by_slot.plan.num_experts
    for ids in by_slot.topk_ids:
        for slot in ids.flatten().tolist():
            if slot >= 0:
                counts[slot] += 1
    per_rank = placement.slots_per_rank
    assert routed.expert_counts.tolist() == counts[context.rank * per_rank : (context.rank + 1) * per_rank]


@on_ranks("hoppers")
def test_replays_split_anew(context: RankContext) -> None:
    """A captured dispatch splits each batch by its own routes, without the host, and counts it."""
    problem = make_problem(replace(CASE, dtype=BF16, ids_dtype=torch.int64), context.num_ranks)
    hot = make_problem(replace(HOT, dtype=BF16, ids_dtype=torch.int64, seed=5), context.num_ranks)
    plan, rank, spare = problem.plan, context.rank, problem.plan.experts_per_rank
    with (
        make_comm(context, "nvlink", plan, spare_slots=spare, balance="batch", rows_per_pull=0, checked=False) as comm,
        torch.no_grad(),
    ):
        given = problem.arguments(context)

        def step() -> tuple[tl.Routed, torch.Tensor, torch.Tensor]:
            routed = comm.dispatch(*given, sizes="bounded")
            return routed, routed.slot_experts, comm.combine(routed.tokens, routed)

        captured, before = Captured(step), comm.balance_stats().batches
        for number, case in enumerate((problem, hot, problem)):
            for mine, now in zip(given, case.arguments(context), strict=True):
                if isinstance(mine, torch.Tensor):
                    assert isinstance(now, torch.Tensor)
                    mine.copy_(now)
            captured.replay()
            routed, experts, out = captured.results
            by_slot, batch = balanced(case, with_spare(plan, spare), always=True)
            want = by_slot.dispatched("expert", capacity=by_slot.plan.even_rows(), bounded=True)
            same_routed(routed, want[rank], by_slot.plan, bounded=True)
            assert experts.tolist() == batch[rank]
            ys = [each.tokens for each in want]
            outs = reference.combine(by_slot.plan, ys, want, by_slot.topk_ids, case.topk_weights, mode="per_route")
            same_bits(out, outs[rank], "out")
            assert comm.balance_stats().batches == before + number + 1


@on_ranks("two")
def test_refusals(context: RankContext) -> None:
    """Named before anything is sent."""
    plan = make_problem(CASE, context.num_ranks).plan

    def make(**options: object) -> tl.Communicator:
        return make_comm(context, "collective", plan, **options)

    with pytest.raises(tl.InvalidArgument, match="expected None or 'batch'"):
        make(balance="token", spare_slots=1)
    with pytest.raises(tl.InvalidArgument, match=r"without a spare slot.*pass spare_slots=1"):
        make(balance="batch", rows_per_pull=0)
    with pytest.raises(tl.InvalidArgument, match="rows_per_pull is -1"):
        make(balance="batch", spare_slots=1, rows_per_pull=-1)
    with pytest.raises(tl.InvalidArgument, match="pass balance='batch'"):
        make(spare_slots=1, rows_per_pull=5)
    with pytest.raises(tl.PlanMismatch, match="balance"):
        make(spare_slots=1, **({"balance": "batch"} if context.rank else {}))
    with pytest.raises(tl.PlanMismatch, match="rows_per_pull"):
        make(spare_slots=1, balance="batch", rows_per_pull=context.rank)
    with pytest.raises(tl.InvalidArgument, match="make the communicator with balance='batch'"):
        make(spare_slots=1).balance_stats()


@on_ranks
@pytest.mark.slow_on(1, 4)
@each_backend
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "later"])
def test_faults_and_disagreement(context: RankContext, backend: str, checked: bool) -> None:
    """A fault of one rank before its counts are told reaches the others, who wait for these; and so do other calls."""
    problem = make_problem(CASE, context.num_ranks)
    comm = make_comm(context, backend, problem.plan, spare_slots=2, balance="batch", rows_per_pull=0, checked=checked)
    if context.num_ranks == 1:
        return
    x, ids, weights = problem.arguments(context)
    for _ in range(2):
        with pytest.raises(tl.ShapeMismatch if context.rank == 1 else tl.PeerError):
            comm.dispatch(x[1:] if context.rank == 1 else x, ids, weights)
    for _ in range(2 if checked or comm.engine.capabilities.reads_on_host else 0):
        bad = torch.full_like(ids, problem.plan.num_experts) if context.rank == 1 else ids
        with pytest.raises(tl.InvalidExpertId if context.rank == 1 else tl.PeerError):
            comm.dispatch(x, bad, weights)
        with pytest.raises(tl.PlanMismatch, match="layout"):
            comm.dispatch(x, ids, weights, layout="token" if context.rank else "expert")
    by_slot, _ = balanced(problem, with_spare(problem.plan, 2))
    routed = check_trip(context, comm, problem, by_slot, "expert")
    want = by_slot.dispatched("expert")
    ys = expert_rows(by_slot, want, BF16)
    out = comm.combine(ys[context.rank].to(context.device), routed)
    outs = reference.combine(by_slot.plan, ys, want, by_slot.topk_ids, problem.topk_weights, mode="per_route")
    same_bits(out, outs[context.rank], "the default of such combines")


def test_the_default_threshold() -> None:
    """An expert of 7168 x 2048 in FP8 has 44 MB, 118 us of links; a route of 88 M operations takes 0.08 us."""
    pull_us, row_us = 3 * 7168 * 2048 / 372e3, 6 * 7168 * 2048 / 1100e6
    assert default_rows_per_pull(1, 372.0) == round(pull_us / row_us) == 1478
    assert default_rows_per_pull(2, 372.0) == 1882
    assert default_rows_per_pull(2, 186.0) == 3763
    assert default_rows_per_pull(4, 372.0) == 1882  # as many bytes more as GEMMs are slower
