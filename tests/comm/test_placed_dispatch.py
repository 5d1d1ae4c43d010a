"""Calls under a placement: bit for bit what the reference says of the same routes by slot, on every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.support import emulator
from tests.support.cases import (
    BF16,
    FP32,
    ROW_CASES,
    Case,
    Problem,
    case_params,
    each_backend,
    expert_rows,
    make_comm,
    make_problem,
    same_bits,
    same_bytes,
    same_routed,
)
from tests.support.graph_cases import Captured
from tests.support.on_ranks import on_ranks
from tests.support.placements import drawn_placement, placed
from tokenloom import reference
from tokenloom.runtime.processes import RankContext

LAYOUTS = ("token", "rank", "expert", "slots")
CASE = Case("placed", "", tokens=(7, 5, 0, 6), experts_per_rank=2, hidden=16, top_k=4, unused=0.2, dtype=FP32,
            pick="repeats")  # fmt: skip
HOT = replace(CASE, pick="one expert")


def options_of(problem: Problem, layout: str) -> dict[str, Any]:
    room = {"capacity": problem.rows_needed("slots") + 1} if layout == "slots" else {}
    return {"layout": layout, "recipe": problem.recipe} | room


def check_trip(
    context: RankContext, comm: tl.Communicator, problem: Problem, by_slot: Problem, layout: str
) -> tl.Routed:
    """A dispatch and its combines against the reference's, by slots."""
    options = options_of(by_slot, layout)
    want = by_slot.dispatched(**options)
    routed = comm.dispatch(*problem.arguments(context), **options)
    same_routed(routed, want[context.rank], by_slot.plan, bounded=layout == "slots")
    ids = problem.topk_ids[context.rank]
    assert routed.topk_ids is None or routed.topk_ids.dtype == ids.dtype
    ys = expert_rows(by_slot, want, BF16)
    by_route = layout in ("expert", "slots")
    for mode in ("per_rank", "per_node", *["per_route"] * by_route):
        out = comm.combine(ys[context.rank].to(context.device), routed, mode=mode)
        weights = by_slot.topk_weights if by_route else None
        nodes = comm.engine.ranks.topology.nodes
        outs = reference.combine(by_slot.plan, ys, want, by_slot.topk_ids, weights, mode=mode, nodes=nodes)
        same_bits(out, outs[context.rank], f"{layout}, {mode}")
    return routed


# -- against the reference --------------------------------------------------------------------------------------


@on_ranks
@pytest.mark.sampled(4)
@pytest.mark.slow_on(1, 4)
@each_backend
@pytest.mark.parametrize("case", [
    *case_params(["top1", "repeats", "unused", "to-one-expert", "first-empty", "no-tokens", "int32-ids"]),
    *case_params(["fp8-row"], of=ROW_CASES),
])  # fmt: skip
def test_there_and_back(context: RankContext, backend: str, case: Case) -> None:
    """Every layout and mode, with replicas on the same rank and on others, and empty slots."""
    problem = make_problem(case, context.num_ranks)
    placement = drawn_placement(problem.plan, spare=2, seed=case.seed)
    comm = make_comm(context, backend, problem.plan, placement=placement)
    by_slot = placed(problem, placement)
    for layout in LAYOUTS:
        routed = check_trip(context, comm, problem, by_slot, layout)
        assert routed.slot_experts.dtype == torch.int32
        assert routed.slot_experts.tolist() == placement.to_tensor()[context.rank].tolist()
    comm.check()


@on_ranks
@pytest.mark.slow_on(4)
@each_backend
def test_by_default(context: RankContext, backend: str) -> None:
    """The default placement without spare slots gives the rows, the counts and the ids that no placement gives."""
    problem = make_problem(CASE, context.num_ranks)
    plan = problem.plan
    plain = make_comm(context, backend, plan)
    comm = make_comm(context, backend, plan, placement=tl.Placement.default(plan.num_experts, plan.num_ranks))
    assert plain.placement is None
    for layout in LAYOUTS:
        options = options_of(problem, layout)
        found, want = (each.dispatch(*problem.arguments(context), **options) for each in (comm, plain))
        same_routed(found, problem.dispatched(**options)[context.rank], plan, bounded=layout == "slots")
        same_bytes(found.slot_experts, want.slot_experts, "slot_experts")


# -- the same bits as without replicas --------------------------------------------------------------------------


def trained(
    context: RankContext, comm: tl.Communicator, problem: Problem, layout: str, mode: Any = "per_route"
) -> list[torch.Tensor]:
    """A trip whose experts' rows do not depend on each other: the result, and the gradients of x and of weights."""
    x, ids, weights = problem.arguments(context)
    assert isinstance(x, torch.Tensor)
    assert weights is not None
    x.nan_to_num_(1.0, 2.0)
    x.requires_grad_()
    weights.requires_grad_()
    capacity = {"capacity": 64} if layout == "slots" else {}
    routed = comm.dispatch(x, ids, weights, layout=layout, **capacity)
    if layout == "slots":
        factors = routed.slot_experts[:, None, None] + 1.5
    else:
        factors = torch.repeat_interleave(routed.slot_experts, routed.expert_counts, output_size=len(routed.tokens))
        factors = factors[:, None] + 1.5
    out = comm.combine((routed.tokens * factors).tanh(), routed, mode=mode)
    (out * torch.linspace(-1, 3, out.numel(), device=out.device).view(out.shape).exp()).sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    return [out.detach(), x.grad, weights.grad]


def same_trips(found: list[torch.Tensor], want: list[torch.Tensor], why: str) -> None:
    """Of two calls of :func:`trained`, bit for bit."""
    for each, wanted, what in zip(found, want, ("result", "gradient of x", "of weights"), strict=True):
        same_bits(each, wanted, f"{what}, {why}")


@on_ranks
@pytest.mark.slow_on(1, 4)
@each_backend
@pytest.mark.parametrize("layout", ["expert", "slots"])
def test_per_route_bits(context: RankContext, backend: str, layout: str) -> None:
    """Results and gradients do not depend on the placement, where each route comes home by itself."""
    for case in (replace(CASE, seed=3, dtype=BF16), HOT):
        problem = make_problem(case, context.num_ranks)
        want = trained(context, make_comm(context, backend, problem.plan), problem, layout)
        for seed in (1, 2):
            placement = drawn_placement(problem.plan, spare=2, seed=seed)
            found = trained(context, make_comm(context, backend, problem.plan, placement=placement), problem, layout)
            same_trips(found, want, f"{layout}, {case.pick}, {seed}")


@on_ranks
@pytest.mark.slow_on(4)
@each_backend
def test_gradient_by_route(context: RankContext, backend: str) -> None:
    """Behind a combine per route the gradient of x is the reference's sum per route, behind another one per rank."""
    problem = make_problem(replace(CASE, top_k=7, dtype=BF16), context.num_ranks)
    comm = make_comm(context, backend, problem.plan)
    want = problem.dispatched("expert")
    grads = expert_rows(problem, want, BF16)
    for mode in ("per_rank", "per_route"):
        x, ids, weights = problem.arguments(context)
        assert isinstance(x, torch.Tensor)
        routed = comm.dispatch(x.requires_grad_(), ids, weights)
        comm.combine(torch.zeros_like(routed.tokens), routed, mode=mode)
        routed.tokens.backward(grads[context.rank].to(context.device))
        wanted = reference.combine(problem.plan, grads, want, problem.topk_ids, None, mode=mode)
        assert x.grad is not None
        same_bits(x.grad, wanted[context.rank], mode)


# -- placed anew ------------------------------------------------------------------------------------------------


@on_ranks
@pytest.mark.slow_on(4)
@each_backend
def test_set_placement(context: RankContext, backend: str) -> None:
    """The next dispatch goes by the new table. What was dispatched before keeps its slots, on all ways home."""
    problem = make_problem(CASE, context.num_ranks)
    first, second = (drawn_placement(problem.plan, 2, seed) for seed in (1, 2))
    comm = make_comm(context, backend, problem.plan, placement=first)
    by_first = placed(problem, first)
    x, ids, weights = problem.arguments(context)
    routed = comm.dispatch(x, ids, weights)
    held = routed.slot_experts
    comm.set_placement(second)
    assert comm.placement is second
    check_trip(context, comm, problem, placed(problem, second), "expert")
    assert held.tolist() == list(first.experts_of(context.rank)), "an earlier dispatch tells its own slots"
    ids.fill_(-1)  # nobody reads the caller's ids again
    want = by_first.dispatched("expert")
    ys = expert_rows(by_first, want, FP32)
    out = comm.combine(ys[context.rank].to(context.device), routed, mode="per_route")
    outs = reference.combine(by_first.plan, ys, want, by_first.topk_ids, problem.topk_weights, mode="per_route")
    same_bits(out, outs[context.rank], "the combine of an earlier dispatch")
    same_bytes(comm.dispatch_again(x, routed), routed.tokens.cpu(), "other rows of an earlier dispatch")
    late = comm.reweighted(routed, weights)
    assert late.slot_experts is held
    out = comm.combine(ys[context.rank].to(context.device), late, mode="per_route")
    same_bits(out, outs[context.rank], "with weights that came later")
    comm.set_placement(first)
    check_trip(context, comm, problem, by_first, "token")


@on_ranks("hoppers")
def test_replays_go_by_the_placement_of_now(context: RankContext) -> None:
    """A graph that was captured under one placement, replayed under others, and the slots that it says it filled."""
    problem = make_problem(replace(CASE, dtype=BF16, ids_dtype=torch.int64), context.num_ranks)
    first, second = (drawn_placement(problem.plan, 2, seed) for seed in (1, 2))
    with make_comm(context, "nvlink", problem.plan, placement=first, checked=False) as comm, torch.no_grad():
        arguments, capacity = problem.arguments(context), problem.plan.worst_case_rows("expert")

        def step() -> tuple[tl.Routed, torch.Tensor, torch.Tensor]:
            routed = comm.dispatch(*arguments, sizes="bounded", capacity=capacity)
            return routed, routed.slot_experts, comm.combine(routed.tokens, routed, mode="per_route")

        captured = Captured(step)
        for placement in (first, second, first):
            comm.set_placement(placement)
            captured.replay()
            routed, experts, out = captured.results
            by_slot = placed(problem, placement)
            want = by_slot.dispatched("expert", capacity=capacity, bounded=True)
            same_routed(routed, want[context.rank], by_slot.plan, bounded=True)
            assert experts.tolist() == list(placement.experts_of(context.rank))
            ys = [each.tokens for each in want]
            outs = reference.combine(by_slot.plan, ys, want, by_slot.topk_ids, problem.topk_weights, mode="per_route")
            same_bits(out, outs[context.rank], "out")


@on_ranks
@pytest.mark.slow_on(4)
@each_backend
def test_checked_ids(context: RankContext, backend: str) -> None:
    """Ids are those of experts, however many slots there are, in the first call of a kind and later."""
    plan = make_problem(CASE, context.num_ranks).plan
    comm = make_comm(context, backend, plan, placement=drawn_placement(plan, 3))
    x, ids = torch.zeros(2, plan.hidden, device=context.device), torch.zeros(2, plan.top_k, dtype=torch.int64)
    bad = ids.clone()
    bad[1, 2] = plan.num_experts  # a slot has this number
    for _ in range(2):
        with pytest.raises(tl.InvalidExpertId, match=f"expected -1 .unused. or 0..{plan.num_experts - 1}"):
            comm.dispatch(x, bad.to(context.device))
        comm.dispatch(x, ids.to(context.device))


@on_ranks
@pytest.mark.slow_on(4)
@each_backend
def test_refusals(context: RankContext, backend: str) -> None:
    """Whatever does not fit is named before anything is sent, and the communicator works on."""
    problem = make_problem(CASE, context.num_ranks)
    plan = problem.plan
    placement, rank, others = drawn_placement(plan, 2), context.rank, context.num_ranks > 1
    for other, named in (
        (tl.Placement.default(2 * plan.num_experts, plan.num_ranks), "num_experts"),
        (tl.Placement(placement.to_tensor().repeat(2, 1), num_experts=plan.num_experts), "num_ranks"),
        ([[0]], "expected a tokenloom.Placement"),
    ):
        if not emulator.ON:  # where communicators are made without checks
            with pytest.raises(tl.InvalidArgument, match=named):
                make_comm(context, backend, plan, placement=other)
    with pytest.raises(tl.InvalidArgument, match="made without a placement"):
        make_comm(context, backend, plan).set_placement(placement)
    comm = make_comm(context, backend, plan, placement=placement)
    with pytest.raises(tl.InvalidArgument, match="slots_per_rank="):
        comm.set_placement(drawn_placement(plan, 3))
    moved = placement.to_tensor().roll(1, 1)
    if others:
        first = next(
            e for e in range(plan.num_experts)
            if tl.Placement(moved, num_experts=plan.num_experts).slots_of(e) != placement.slots_of(e)
        )  # fmt: skip
        own = tl.Placement(moved, num_experts=plan.num_experts) if rank == 1 else placement
        with pytest.raises(tl.PlanMismatch, match=f"rank 1 has slots of expert {first}="):
            comm.set_placement(own)
        if not emulator.ON:
            with pytest.raises(tl.PlanMismatch, match=f"rank 1 has slots of expert {first}="):
                make_comm(context, backend, plan, placement=own)
            with pytest.raises(tl.PlanMismatch, match="slots_per_rank"):
                make_comm(context, backend, plan, placement=placement if rank else None)
    pending = comm.send_dispatch(*problem.arguments(context), layout="expert")
    with pytest.raises(tl.InvalidArgument, match="receive it first"):
        comm.set_placement(placement)
    pending.receive()
    assert comm.placement is placement
    check_trip(context, comm, problem, placed(problem, placement), "expert")


@on_ranks
@each_backend
def test_in_words(context: RankContext, backend: str) -> None:
    """describe() says slots, empty ones and replicas; without a placement it says nothing of them."""
    plan = make_problem(CASE, context.num_ranks).plan
    placement = drawn_placement(plan, 2)
    comm = make_comm(context, backend, plan, placement=placement)
    assert f"{plan.num_ranks} x 4 slots: {placement.num_empty} empty" in comm.describe()
    assert f"{plan.num_experts - 1} ({placement.replicas[-1]})" in comm.describe()
    assert "placement" not in make_comm(context, backend, plan).describe()
