"""Where the routes of measured calls go, with replicas and without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tokenloom as tl
from tokenloom import reference
from tokenloom.bench.workload import EARLIER_TOKENS, CallSizes, placed
from tokenloom.plan import Plan

SHAPE = CallSizes(num_tokens=40, hidden=16, top_k=2, num_experts=8, max_vio=2.0)


def test_routes_go_where_the_reference_sends_them() -> None:
    """Under a planned placement, on ranks of different numbers; and the plan counts slots for experts."""
    routing, even = SHAPE.routing(4, 1), SHAPE.routing(4)
    assert routing.placement is not None
    plan, ids = reference.place(even.plan, even.topk_ids, routing.placement.to_tensor().tolist())
    assert routing.plan == plan
    for found, wanted in zip(routing.topk_ids, ids, strict=True):
        assert torch.equal(found, wanted)
    assert (even.placement, even.plan, even.topk_ids[1].tolist()) == (None, SHAPE.plan(4), SHAPE.topk_ids(1).tolist())


def test_batches_are_split_as_the_reference_splits_them() -> None:
    """The slots are empty before, and no rank has more than the mean, rounded up, if there are as many as experts."""
    even = SHAPE.routing(4)
    for spare in (1, 2):
        routing = SHAPE.routing(4, spare, balanced=True)
        assert routing.placement == tl.Placement.default(8, 4, 2 + spare)
        table = routing.placement.to_tensor().tolist()
        plan, ids = reference.place(even.plan, even.topk_ids, table)
        wanted, _ = reference.split(plan, ids, table)
        assert routing.plan == plan
        assert [each.tolist() for each in routing.topk_ids] == [each.tolist() for each in wanted]
    assert even.fullest_rank > 1.1
    assert routing.routes.sum(1).max() == 40 * 2


def test_a_placement_is_of_another_batch() -> None:
    """It is planned from the same popularity and other tokens: nobody knows a batch before it comes. Calls of few
    tokens and of many have the same one."""
    of_few = replace(SHAPE, num_experts=64)
    of_many = replace(of_few, num_tokens=EARLIER_TOKENS)
    seen, known = (
        torch.bincount(torch.cat([of_many.topk_ids(first + rank) for rank in range(4)]).flatten(), minlength=64)
        for first in (0, 4)
    )
    placement = tl.plan_replicas(known, 4, 17)
    assert of_few.routing(4, 1).placement == of_many.routing(4, 1).placement == placement
    assert tl.plan_replicas(seen, 4, 17) != placement


def test_the_fullest_rank_by_hand() -> None:
    """Three routes of five on the first rank; a replica on the other takes one of them. Unused places do not count."""
    plan = Plan(2, 2, 16, 2, 4)
    ids = [torch.tensor([[0, -1], [0, 1], [0, 1]]), torch.zeros(0, 2, dtype=torch.int64)]
    assert placed(plan, ids, None).fullest_rank == pytest.approx(3 / 2.5)
    replicated = placed(plan, ids, tl.Placement([[0, -1], [1, 0]], num_experts=2))
    assert replicated.routes.tolist() == [[2, 0], [2, 1]]
    assert placed(plan, [ids[1], ids[1]], None).fullest_rank == 1
