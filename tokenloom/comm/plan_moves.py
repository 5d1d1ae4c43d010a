"""Plans how experts get from the slots of one placement to those of another, while calls go on between the copies.

A move has stages. Each ends with a placement of its own, and the placement before rules until all copies of the stage
are there. So a slot that is empty is filled where it is. A slot that holds an expert is not touched before the stage
ends: its new content waits in the scratch memory of its rank, which has room for one expert.

The order of the slots of a rank is the planner's choice: results do not depend on it. So experts that stay on a rank
stay in their slots, and an exchange of experts in a circle of ranks passes each rank once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import torch

from tokenloom.comm.placement import Placement
from tokenloom.errors import InvalidArgument
from tokenloom.ops.split_batch import EMPTY

Slot = tuple[int, int]
"""A rank, and the slot of it."""


@dataclass(frozen=True)
class Copy:
    """An expert on its way.

    Attributes:
        expert: which one.
        source: slot that it is read from. to: slot that it is for.
        by_scratch: ``to`` holds another expert until the stage ends, so this one waits in scratch memory of its rank.
    """

    expert: int
    source: Slot
    to: Slot
    by_scratch: bool


@dataclass(frozen=True)
class Stage:
    """Copies, in any order, and the placement that rules once they are all there.

    Attributes:
        copies: at most one of each rank goes by scratch.
        placement: of afterwards.
    """

    copies: tuple[Copy, ...]
    placement: Placement


@dataclass(frozen=True)
class Piece:
    """Bytes ``begin`` to ``end`` of the expert of a copy."""

    copy: Copy
    begin: int
    end: int


def plan_moves(
    old: Placement, new: Placement, masked: Collection[int] = (), stale: Collection[int] = ()
) -> tuple[Stage, ...]:
    """Plan the stages from one placement to another, the same on all ranks.

    Args:
        old: placement of now. new: the wanted one, of the same sizes.
        masked: ranks that take no part. Their slots are neither read nor written, and get the table of ``new``.
        stale: ranks whose slots hold nothing yet, whatever ``old`` says: they came back. All are filled.

    Returns:
        The stages, none if nothing changes. Behind the last one each rank holds the experts of ``new``, those that it
        had in the same slots as before.

    Raises:
        InvalidArgument: an expert would have no slot but on masked ranks, or has none to be read from.
    """
    move = _Move(old, new, frozenset(masked), frozenset(stale))
    stages: list[Stage] = []
    while any(move.incoming.values()):
        stages.append(move.stage())
    last = move.last_table()
    if not stages:
        return () if last == old else (Stage((), last),)
    return (*stages[:-1], Stage(stages[-1].copies, last))


class _Move:
    """Where experts are, stage by stage.

    Attributes:
        rows: expert in each slot of each rank.
        incoming: experts that each living rank lacks, ascending.
        outgoing: slots of each living rank whose expert it is not to hold any more, ascending.
    """

    def __init__(self, old: Placement, new: Placement, masked: frozenset[int], stale: frozenset[int]) -> None:
        self._new, self._masked = new, masked
        self._living = [rank for rank in range(old.num_ranks) if rank not in masked]
        empty = (EMPTY,) * old.slots_per_rank
        self.rows = [list(empty if rank in stale else old.experts_of(rank)) for rank in range(old.num_ranks)]
        readable, wanted = (
            {e for rank in self._living for e in rows[rank] if e != EMPTY}
            for rows in (self.rows, [new.experts_of(rank) for rank in range(new.num_ranks)])
        )
        self._require(sorted(readable - wanted), "would have slots on masked ranks alone; give each a slot elsewhere")
        self._require(sorted(wanted - readable), "have no slot to be read from; load them with restore_experts")
        self.incoming: dict[int, list[int]] = {}
        self.outgoing: dict[int, list[int]] = {}
        for rank in self._living:
            lacking = Counter(e for e in new.experts_of(rank) if e != EMPTY)
            self.outgoing[rank] = []
            for slot, expert in enumerate(self.rows[rank]):
                if lacking[expert]:
                    lacking[expert] -= 1
                elif expert != EMPTY:
                    self.outgoing[rank].append(slot)
            self.incoming[rank] = sorted(lacking.elements())

    @staticmethod
    def _require(without: list[int], what: str) -> None:
        if without:
            raise InvalidArgument(f"experts {', '.join(map(str, without))} {what}")

    def stage(self) -> Stage:
        """Take as many experts as fit: all that go to empty slots, and one on each rank that takes another's place."""
        before = [list(row) for row in self.rows]
        filled: list[tuple[int, Slot, bool]] = []
        for rank in self._living:
            for slot, expert in enumerate(self.rows[rank]):
                if expert == EMPTY and self.incoming[rank]:
                    filled.append((self._put(rank, slot, self.incoming[rank][0]), (rank, slot), False))
        filled += self._exchange()
        return Stage(self._with_sources(before, filled), self._placement(self.rows))

    def _put(self, rank: int, slot: int, expert: int) -> int:
        self.incoming[rank].remove(expert)
        self.rows[rank][slot] = expert
        return expert

    def _exchange(self) -> list[tuple[int, Slot, bool]]:
        """Let experts take the slots of others, at most one on each rank, so that none is without a slot behind it."""
        found: list[tuple[int, Slot, bool]] = []
        counts = Counter(e for rank in self._living for e in self.rows[rank])
        used: set[int] = set()
        for first in self._living:
            if not self.incoming[first] or first in used:
                continue
            for rank, slot, expert in self._chain(first, counts, used):
                counts[self.rows[rank][slot]] -= 1
                counts[expert] += 1
                found.append((self._put(rank, slot, expert), (rank, slot), True))
                self.outgoing[rank].remove(slot)
                used.add(rank)
        return found

    def _chain(self, first: int, counts: Counter[int], used: set[int]) -> list[tuple[int, int, int]]:
        """Ranks that each take the expert which the one before gives up: (rank, slot, expert).

        The last one gives up a replica, or the chain is a circle. None if it meets a rank that is used.
        """
        path: list[tuple[int, int, int]] = []
        rank, expert = first, self.incoming[first][0]
        while True:
            row = self.rows[rank]
            slots = sorted(self.outgoing[rank], key=lambda slot: counts[row[slot]] < 2)
            path.append((rank, slots[0], expert))
            expert = row[slots[0]]
            if counts[expert] > 1:
                return path
            rank = next((r for r in self._living if expert in self.incoming[r] and r not in used), -1)
            if rank < 0:
                return []
            passed = [each for each, _, _ in path]
            if rank in passed:
                begin, slot, _ = path[passed.index(rank)]
                return [(begin, slot, expert), *path[passed.index(rank) + 1 :]]

    def _with_sources(self, before: list[list[int]], filled: list[tuple[int, Slot, bool]]) -> tuple[Copy, ...]:
        """Say where each expert is read from: its own rank, or else the one that sends least."""
        slots: dict[int, list[Slot]] = {}
        for rank in self._living:
            for slot, expert in enumerate(before[rank]):
                slots.setdefault(expert, []).append((rank, slot))
        sent: Counter[int] = Counter()
        copies = []
        for expert, to, by_scratch in filled:
            source = min(slots[expert], key=lambda each: (each[0] != to[0], sent[each[0]], each))
            sent[source[0]] += source[0] != to[0]
            copies.append(Copy(expert, source, to, by_scratch))
        return tuple(copies)

    def last_table(self) -> Placement:
        """The placement once nothing is incoming: outgoing experts are gone, and masked ranks have their new slots."""
        rows = [list(row) for row in self.rows]
        for rank in self._living:
            for slot in self.outgoing[rank]:
                rows[rank][slot] = EMPTY
        for rank in self._masked:
            rows[rank] = list(self._new.experts_of(rank))
        return self._placement(rows)

    def _placement(self, rows: list[list[int]]) -> Placement:
        return Placement(torch.tensor(rows, dtype=torch.int64), num_experts=self._new.num_experts)


def cut_into_pieces(copies: Collection[Copy], expert_bytes: int, piece_bytes: int) -> tuple[tuple[Piece, ...], ...]:
    """Cut the copies of a stage into steps, in each of which a rank sends and receives at most ``piece_bytes``.

    Args:
        expert_bytes: of each expert.

    Returns:
        The pieces of each step, at least one step.
    """
    left = {copy: 0 for copy in copies if expert_bytes}
    steps: list[tuple[Piece, ...]] = []
    while left:
        sent, received, pieces = Counter[int](), Counter[int](), []
        for copy, begin in left.items():
            of_source, of_target = sent[copy.source[0]], received[copy.to[0]]
            end = min(expert_bytes, begin + piece_bytes - max(of_source, of_target))
            if end > begin:
                pieces.append(Piece(copy, begin, end))
                sent[copy.source[0]] += end - begin
                received[copy.to[0]] += end - begin
        left |= {piece.copy: piece.end for piece in pieces}
        left = {copy: end for copy, end in left.items() if end < expert_bytes}
        steps.append(tuple(pieces))
    return tuple(steps) or ((),)
