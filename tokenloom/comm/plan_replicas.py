"""Plans which rank holds which expert, and how often, from how many routes each expert had.

The same counts give the same plan on every rank: all comparisons are of integers, and ties go to the lowest number.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tokenloom.comm.placement import Placement
from tokenloom.errors import InvalidArgument, ShapeMismatch, a_type
from tokenloom.ops.split_batch import EMPTY

UNITS = 2**26
"""Load of all experts together, at most. Squares of it, summed over ranks, fit into 64 bits."""
EVEN = (101, 100)
"""A fresh plan is good enough if its fullest rank has at most 101/100 of the mean. Counts vary by more."""
NEAR = (21, 20)
"""A placement is near a fresh plan if its fullest rank has at most 21/20 of the fresh plan's."""
MOST_STEPS_PER_SLOT = 2
"""Limit for a search that goes on as long as it improves. It stops long before."""


def plan_replicas(
    expert_counts: torch.Tensor, num_ranks: int, slots_per_rank: int, *, current: Placement | None = None
) -> Placement:
    """Plan which rank holds which expert, so that the fullest rank has little more than the mean.

    Every spare slot goes to the expert that then has most load in one replica, up to one on each rank. Then replicas
    go to ranks, the longest first, each to the emptiest rank with a free slot that lacks the expert; a few more are
    exchanged until the fullest rank has at most 1.01 of the mean, as far as that goes. Where the ranks divide the
    experts, it has never more than with :meth:`Placement.default`. An expert's replicas are taken to share its routes
    evenly, as they do. The same counts give the same plan on every rank, in milliseconds.

    Args:
        expert_counts: routes of each expert, [E] whole or floating numbers, such as
            :meth:`ExpertStats.sum_over_ranks`. The host reads them.
        num_ranks: W.
        slots_per_rank: S, at least E / W. More than that are spare slots. They stay empty only where all ranks hold
            every expert, or where no plan with replicas is better than the default placement; with ``current``
            also where they are not needed for 1.05.
        current: the placement of now, to move as few experts as possible from it. Steps change it one or two experts
            at a time, until its fullest rank has at most 1.05 of the load that a fresh plan gives. If they do not get
            there, or more experts would travel, it is the fresh plan, with its ranks in the order that moves fewest.

    Raises:
        ShapeMismatch: the counts are no tensor [E].
        InvalidArgument: a count is negative or not finite, there are fewer slots than experts, or ``current`` has
            other sizes.
    """
    counts = _read_counts(expert_counts)
    _require_sizes(len(counts), num_ranks, slots_per_rank)
    now = None
    if current is not None:
        _require_same_sizes(current, len(counts), num_ranks, slots_per_rank)
        now = current.to_tensor().numpy()
    table = _plan_table(counts, num_ranks, slots_per_rank, now)
    return Placement(torch.from_numpy(table), num_experts=len(counts))


def _plan_table(counts: Sequence[int], num_ranks: int, slots: int, current: np.ndarray | None = None) -> np.ndarray:
    """Plan from whole numbers.

    Args:
        counts: load of each expert.
        current: int64 [W, S], the table to move few experts from; None for a fresh plan.

    Returns:
        int64 [W, S], experts by rank and slot, -1 for an empty slot.
    """
    loads = _in_units(counts)
    fresh = _fresh(loads, num_ranks, slots)
    if current is None:
        return fresh.ascending()
    limit = fresh.fullest * NEAR[0] // NEAR[1]
    kept = _Table(loads, current)
    kept.improve(limit)
    plans = [_along(fresh.table, current), fresh.ascending()]
    if kept.fullest <= limit:
        plans.append(kept.table)
    return min(plans, key=lambda table: (copies(current, table), _Table(loads, table).fullest))


def copies(old: np.ndarray, new: np.ndarray) -> int:
    """Count the experts that a rank holds in ``new`` and not in ``old``: those whose weights must travel."""
    return sum(
        len(set(map(int, after)) - set(map(int, before)) - {EMPTY}) for before, after in zip(old, new, strict=True)
    )


def _in_units(counts: Sequence[int]) -> np.ndarray:
    """Loads that add up to at most UNITS, in the proportion of the counts: exactly so where those are not larger."""
    total = sum(counts) or 1
    factor = UNITS // total
    return np.array([count * factor if factor else count * UNITS // total for count in counts], dtype=np.int64)


class _Table:
    """A table of slots, and the loads of its ranks.

    An empty slot holds expert E here, which has no load and which never runs out.
    """

    def __init__(self, loads: np.ndarray, table: np.ndarray) -> None:
        self._none = len(loads)
        self._loads = np.append(loads, 0)
        self._fill(np.where(table == EMPTY, self._none, table))

    @property
    def table(self) -> np.ndarray:
        """[W, S], -1 for an empty slot."""
        return np.where(self._slots == self._none, EMPTY, self._slots)

    @property
    def fullest(self) -> int:
        """Load of the fullest rank."""
        return int(self._ranks.max())

    def ascending(self) -> np.ndarray:
        """The table, with the experts of each rank in ascending order and its empty slots last."""
        ordered = np.sort(self._slots, axis=1)
        return np.where(ordered == self._none, EMPTY, ordered)

    def improve(self, limit: int) -> None:
        """Unload the fullest rank, step by step, until it has at most ``limit`` or no step helps.

        A step is a replica more of one of its experts, on another rank, or two experts that change ranks. Of all
        steps it takes the one that lowers the sum of squares of loads most for each expert that must travel.
        """
        best, best_slots = self.fullest, self._slots
        for _ in range(MOST_STEPS_PER_SLOT * self._slots.size):
            if self.fullest <= limit or not self._step():
                break
            if self.fullest < best:
                best, best_slots = self.fullest, self._slots
        self._fill(best_slots)

    def _fill(self, slots: np.ndarray) -> None:
        self._slots = slots
        self._holds = np.zeros((len(slots), self._none + 1), dtype=np.int64)
        np.add.at(self._holds, (np.arange(len(slots))[:, None], slots), 1)
        replicas = self._holds.sum(0)
        replicas[self._none] = 2  # so that it can be replaced
        self._replicas = replicas
        self._shares = _share(self._loads, replicas)
        self._ranks = self._holds @ self._shares

    def _step(self) -> bool:
        full = int(self._ranks.argmax())
        mine = self._slots[full]
        replicated = self._gains_of_replicas(mine)
        swapped = self._gains_of_swaps(full, mine)
        gains = np.stack([replicated, swapped])
        what, place, rank, slot = np.unravel_index(int(gains.argmax()), gains.shape)
        if gains[what, place, rank, slot] <= 0:
            return False
        slots = self._slots.copy()
        slots[rank, slot] = mine[place]
        if what == 1:
            slots[full, place] = self._slots[rank, slot]
        self._fill(slots)
        return True

    def _gains_of_replicas(self, mine: np.ndarray) -> np.ndarray:
        """What sums of squares lose if expert i of the fullest rank replaces another in a slot: [S, W, S].

        With share s of an expert, its change d, and h ranks that hold it, the loads of ranks change by
        d_i h_i + d_o h_o, and that of the rank itself by (new s_i) - (new s_o) beside it.
        """
        loads, replicas, shares = self._loads, self._replicas, self._shares
        slots = self._slots
        less = _share(loads[mine], replicas[mine] + 1)
        change = (less - shares[mine])[:, None, None]
        last = replicas[slots] < 2
        more = _share(loads[slots], np.maximum(replicas[slots] - 1, 1))
        other_change = (more - shares[slots])[None]
        here = less[:, None, None] - more[None]
        with_ranks = self._ranks @ self._holds
        together = self._holds[:, mine].T @ self._holds
        squares_of = (self._holds**2).sum(0)
        held_here = self._holds[np.arange(len(slots))[:, None], slots][None]
        # An empty slot's expert has no load, before and after, so its changes are 0.
        linear = change * with_ranks[mine][:, None, None] + other_change * with_ranks[slots][None]
        linear = linear + here * self._ranks[None, :, None]
        squares = change**2 * squares_of[mine][:, None, None]
        squares = squares + other_change**2 * squares_of[slots][None] + here**2
        squares = squares + 2 * change * other_change * together[:, slots]
        squares = squares + 2 * here * other_change * held_here
        refused = last[None] | (self._holds.T[mine] > 0)[:, :, None] | (mine == self._none)[:, None, None]
        return -np.where(refused, 0, 2 * linear + squares)

    def _gains_of_swaps(self, full: int, mine: np.ndarray) -> np.ndarray:
        """The same, for each expert that travels, if expert i of the fullest rank changes places with another."""
        slots = self._slots
        moved = self._shares[mine][:, None, None] - self._shares[slots][None]
        gain = 2 * moved * (self._ranks[full] - self._ranks)[None, :, None] - 2 * moved**2
        to_empty = slots == self._none
        held = (self._holds[full][slots] > 0) & ~to_empty
        refused = held[None] | (self._holds.T[mine] > 0)[:, :, None] | (mine == self._none)[:, None, None]
        return np.where(refused, 0, np.where(to_empty[None], gain, gain // 2))


def _share(loads: np.ndarray, replicas: np.ndarray) -> np.ndarray:
    """Load of one of an expert's replicas, rounded up: a plan is never worse than it looks."""
    return -(-loads // replicas)


def _fresh(loads: np.ndarray, num_ranks: int, slots: int) -> _Table:
    plan = _Table(loads, _longest_first(loads, _count_replicas(loads, num_ranks, slots), num_ranks, slots))
    even = int(loads.sum()) * EVEN[0] // (EVEN[1] * num_ranks)
    plan.improve(even)
    if len(loads) % num_ranks == 0:
        default = _Table(loads, Placement.default(len(loads), num_ranks, slots).to_tensor().numpy())
        # The longest first may come out worse. Shares that were rounded up, one for each slot, do not tell.
        if default.fullest < plan.fullest - slots:
            default.improve(even)
            return default
    return plan


def _count_replicas(loads: np.ndarray, num_ranks: int, slots: int) -> list[int]:
    """Replicas of each expert: every spare slot goes to the expert that then has most load in a replica."""
    replicas = [1] * len(loads)
    waiting = [(-int(load), 1, expert) for expert, load in enumerate(loads)]
    heapq.heapify(waiting)
    spare = num_ranks * slots - len(loads)
    while spare and waiting:
        _, count, expert = heapq.heappop(waiting)
        if count == num_ranks:
            continue  # each rank has one
        replicas[expert] = count + 1
        spare -= 1
        heapq.heappush(waiting, (-math.ceil(int(loads[expert]) / (count + 1)), count + 1, expert))
    return replicas


def _longest_first(loads: np.ndarray, replicas: list[int], num_ranks: int, slots: int) -> np.ndarray:
    """Put the replicas with most load first, each onto the emptiest rank that has a free slot and not the expert."""
    share = [-(-int(load) // count) for load, count in zip(loads, replicas, strict=True)]
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    filled = [0] * num_ranks
    for expert in sorted(range(len(loads)), key=lambda each: (-share[each], each)):
        for _ in range(replicas[expert]):
            free = [rank for rank in range(num_ranks) if len(ranks[rank]) < slots and expert not in ranks[rank]]
            if free:
                rank = min(free, key=lambda each: (filled[each], each))
            else:
                rank = _make_room(ranks, filled, share, slots, expert)
            ranks[rank].append(expert)
            filled[rank] += share[expert]
    return np.array([each + [EMPTY] * (slots - len(each)) for each in ranks], dtype=np.int64).reshape(num_ranks, slots)


def _make_room(ranks: list[list[int]], filled: list[int], share: list[int], slots: int, expert: int) -> int:
    """Move another expert to a rank with a free slot, all of which hold this one, and return the rank it leaves."""
    _, rank, to, other = min(
        (max(filled[rank] - share[other] + share[expert], filled[to] + share[other]), rank, to, other)
        for rank, experts in enumerate(ranks)
        if expert not in experts
        for to, its in enumerate(ranks)
        if len(its) < slots
        for other in experts
        if other not in its
    )
    ranks[rank].remove(other)
    filled[rank] -= share[other]
    ranks[to].append(other)
    filled[to] += share[other]
    return rank


def _along(fresh: np.ndarray, current: np.ndarray) -> np.ndarray:
    """The same plan, with ranks and slots in the order that leaves most experts where they are."""
    num_ranks = len(fresh)
    now, planned = ([set(map(int, row)) - {EMPTY} for row in table] for table in (current, fresh))
    pairs = sorted(
        (-len(now[rank] & planned[row]), rank, row) for rank in range(num_ranks) for row in range(num_ranks)
    )
    row_of: dict[int, int] = {}
    for _, rank, row in pairs:
        if rank not in row_of and row not in row_of.values():
            row_of[rank] = row
    table = np.full_like(current, EMPTY)
    for rank in range(num_ranks):
        left = sorted(planned[row_of[rank]])
        for slot, expert in enumerate(current[rank].tolist()):
            if expert in left:
                table[rank, slot] = expert
                left.remove(expert)
        for slot in np.flatnonzero(table[rank] == EMPTY)[: len(left)].tolist():
            table[rank, slot] = left.pop(0)
    return table


def _read_counts(expert_counts: Any) -> list[int]:
    """Counts as whole numbers, in proportion. Reads them from their device.

    Raises:
        ShapeMismatch: not a tensor [E] of at least one expert.
        InvalidArgument: a count is negative or not finite.
    """
    if not isinstance(expert_counts, torch.Tensor) or expert_counts.dim() != 1 or not len(expert_counts):
        shape = list(expert_counts.shape) if isinstance(expert_counts, torch.Tensor) else a_type(expert_counts)
        raise ShapeMismatch(
            f"expert_counts is {shape}, expected a tensor [num_experts] of routes; sum those of several layers first"
        )
    counts = expert_counts.detach().cpu()
    if counts.dtype.is_complex or counts.dtype == torch.bool:
        raise InvalidArgument(f"expert_counts is {counts.dtype}, expected whole or floating numbers, such as int64")
    values = counts.tolist()
    for expert, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            raise InvalidArgument(
                f"expert_counts[{expert}] is {value}, expected finite counts of at least 0; reset the statistics"
            )
    if not counts.is_floating_point():
        return values
    if all(value == int(value) for value in values):
        return [int(value) for value in values]
    largest = max(values)
    return [round(value / largest * UNITS) for value in values]


def _require_sizes(num_experts: int, num_ranks: Any, slots_per_rank: Any) -> None:
    """Check that these ranks have a slot for each expert.

    Raises:
        InvalidArgument: they have not, or a size is no whole number above 0.
    """
    for name, value in (("num_ranks", num_ranks), ("slots_per_rank", slots_per_rank)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidArgument(f"{name} is {value!r}, expected a whole number of at least 1")
    if num_ranks * slots_per_rank < num_experts:
        raise InvalidArgument(
            f"slots_per_rank is {slots_per_rank}, expected at least {-(-num_experts // num_ranks)}: {num_experts} "
            f"experts on {num_ranks} ranks need a slot each"
        )


def _require_same_sizes(current: object, num_experts: int, num_ranks: int, slots_per_rank: int) -> None:
    if not isinstance(current, Placement):
        raise InvalidArgument(f"current is {a_type(current)}, expected a tokenloom.Placement")
    if (current.num_ranks, current.slots_per_rank) != (num_ranks, slots_per_rank):
        raise InvalidArgument(
            f"current has {current.num_ranks} ranks with {current.slots_per_rank} slots, expected {num_ranks} with "
            f"{slots_per_rank}; pass its sizes, or leave current out"
        )
    if current.num_experts != num_experts:
        raise InvalidArgument(
            f"current has {current.num_experts} experts, expert_counts has {num_experts}; count all its experts"
        )
