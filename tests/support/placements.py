"""Placements for tests, and what the reference says of a problem under one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

import tokenloom as tl
from tests.support.cases import Problem
from tokenloom import reference
from tokenloom.plan import Plan


def drawn_placement(plan: Plan, spare: int, seed: int = 0) -> tl.Placement:
    """Every expert in a slot anywhere; of the others, about a third stay empty.

    Args:
        spare: slots of a rank beyond its even share of experts.
    """
    generator = torch.Generator().manual_seed(seed)
    slots = plan.num_ranks * (plan.experts_per_rank + spare)
    order = torch.randperm(slots, generator=generator)
    # The last expert is the hottest in some cases, so it has replicas in all placements that have room.
    more = torch.randint(0, plan.num_experts, (slots - plan.num_experts,), generator=generator)
    more[torch.rand(len(more), generator=generator) < 0.3] = -1
    more[:1] = plan.num_experts - 1
    table = torch.empty(slots, dtype=torch.int64)
    table[order] = torch.cat([torch.arange(plan.num_experts), more])
    return tl.Placement(table.view(plan.num_ranks, -1), num_experts=plan.num_experts)


def placed(problem: Problem, placement: tl.Placement, masked: Collection[int] = ()) -> Problem:
    """The problem with slots for experts, by the reference."""
    plan, ids = reference.place(problem.plan, problem.topk_ids, placement.to_tensor().tolist(), masked)
    kept = [each.to(given.dtype) for each, given in zip(ids, problem.topk_ids, strict=True)]
    return replace(problem, plan=plan, topk_ids=kept)


def balanced(
    problem: Problem,
    placement: tl.Placement,
    masked: Collection[int] = (),
    *,
    rows_per_pull: int = 0,
    always: bool = False,
) -> tuple[Problem, list[list[int]]]:
    """The same with the batch split over all slots, and the table of the batch."""
    by_slot, table = placed(problem, placement, masked), placement.to_tensor().tolist()
    ids, batch = reference.split(
        by_slot.plan, by_slot.topk_ids, table, masked, rows_per_pull=rows_per_pull, always=always
    )
    return replace(by_slot, topk_ids=ids), batch
