"""The planner of balanced batches: which routes of overloaded ranks others compute.

It is a pure function, in integers, of counts that all ranks know, so all ranks come to the same split. The kernel
``split_batch`` computes the same.

By the placement each route has a slot, and a rank whose slots have more routes than the mean, rounded up, is
overloaded. In each step the fullest rank fills up the emptiest one, its helper, from its fullest slots. It may give so
much that it becomes a helper itself, so that one rank alone gives to each helper (the idea of Walker's alias method).
There are at most W - 1 steps, and where a rank has as many empty slots as others have experts, all ranks get the mean.

A helper computes an expert that it does not have in one of its empty slots, and pulls the weights from who gives. The
routes of a slot lie in the order of source rank, token, k, and its last ones go. So runs of a source go whole, and
each step cuts one at most.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

EMPTY = -1
"""What a table has for a slot that holds no expert."""
TAKEN = -2
"""And for one that holds none yet, and that nobody else may fill: an expert is on its way there."""


class Share(NamedTuple):
    """Routes of a slot that a helper computes: from ``first`` up to those of the share before it, or to the last.

    Attributes:
        slot: that the placement gives them. first: the first of them, counted among the routes of that slot.
        target: slot that computes them.
    """

    slot: int
    first: int
    target: int


class Split(NamedTuple):
    """Who computes what in a batch. Slots are numbered rank * slots_per_rank + slot.

    Attributes:
        slot_experts: the expert in each slot of all ranks, -1 for none. The batch's own ones are among them.
        shares: of each slot the last routes come first.
        rows_before: routes of the fullest rank by the placement.
        rows: routes of the fullest rank by this split. Equal, if nothing is split.
        pulls: most experts that a rank pulls, or that are pulled from a rank.
    """

    slot_experts: list[int]
    shares: list[Share]
    rows_before: int
    rows: int
    pulls: int


def split_batch(
    counts: np.ndarray,
    table: Sequence[Sequence[int]],
    masked: Collection[int] = (),
    *,
    rows_per_pull: int = 0,
    always: bool = False,
) -> Split:
    """Split a batch, if that pays.

    It pays where the fullest rank gets rid of at least ``rows_per_pull`` routes for each expert that a rank pulls, or
    that others pull from it, whichever are more: links carry as much in either direction.

    Args:
        counts: integers [W, E], routes of each source rank to each expert.
        table: for each rank, the expert in each of its slots, EMPTY, or TAKEN.
        masked: ranks that take no part.
        rows_per_pull: routes that a rank computes in the time in which it pulls an expert.
        always: split whether it pays or not.
    """
    num_ranks, per_rank = len(table), len(table[0])
    experts = [EMPTY if rank in masked else expert for rank, row in enumerate(table) for expert in row]
    slot_of = {(slot // per_rank, expert): slot for slot, expert in reversed([*enumerate(experts)]) if expert >= 0}
    empty = [
        [rank * per_rank + slot for slot, expert in enumerate(row) if expert == EMPTY and rank not in masked]
        for rank, row in enumerate(table)
    ]
    left = routes_of_slots(counts, experts).sum(0).tolist()
    loads = [sum(left[rank * per_rank : (rank + 1) * per_rank]) for rank in range(num_ranks)]
    mean = -(-sum(loads) // max(1, num_ranks - len(masked)))
    nothing = Split([max(EMPTY, each) for each in experts], [], max(loads), max(loads), 0)

    surplus = [load - mean for load in loads]
    helpers = list(range(num_ranks))
    after, shares = list(nothing.slot_experts), list[Share]()
    pulls, sends = [0] * num_ranks, [0] * num_ranks
    while (total := sum(each for each in surplus if each > 0)) and helpers:
        giver = max(range(num_ranks), key=lambda rank: (surplus[rank], -rank))
        helper = min(helpers, key=lambda rank: (surplus[rank], rank))
        if surplus[helper] >= 0:
            break
        helpers.remove(helper)
        wanted = min(-surplus[helper], total)
        while wanted:
            slots = range(giver * per_rank, (giver + 1) * per_rank)
            slot = max(slots, key=lambda slot: (left[slot], -slot))
            target = slot_of.get((helper, experts[slot]))
            if target is None:
                if pulls[helper] == len(empty[helper]):
                    break
                target = slot_of[helper, experts[slot]] = empty[helper][pulls[helper]]
                pulls[helper] += 1
                sends[giver] += 1
                after[target] = experts[slot]
            moved = min(left[slot], wanted)
            left[slot] -= moved
            shares.append(Share(slot, left[slot], target))
            wanted -= moved
            surplus[giver] -= moved
            surplus[helper] += moved
    split = Split(after, shares, max(loads), max(mean + each for each in surplus), max(*pulls, *sends))
    pays = split.rows_before - split.rows >= max(1, rows_per_pull * split.pulls)
    return split if shares and (pays or always) else nothing


def routes_of_slots(counts: np.ndarray, experts: Sequence[int]) -> np.ndarray:
    """Count the routes of each source rank to each slot by the placement, [W, slots].

    Args:
        counts: integers [W, E].
        experts: the expert in each slot, negative for none.
    """
    slots_of: dict[int, list[int]] = {}
    for slot, expert in enumerate(experts):
        if expert >= 0:
            slots_of.setdefault(expert, []).append(slot)
    found = np.zeros((len(counts), len(experts)), dtype=np.int64)
    sources = np.arange(len(counts))
    for expert, slots in slots_of.items():
        for number, slot in enumerate(slots):
            first = (number - sources) % len(slots)  # of the source's routes of the expert, the first for this slot
            found[:, slot] = np.maximum(0, counts[:, expert] - first + len(slots) - 1) // len(slots)
    return found
