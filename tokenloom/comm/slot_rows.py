"""Rows of slots on their way between ranks.

A tensor of slots has a row for each slot of this rank, [slots_per_rank, ...].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from tokenloom.comm.placement import Placement
from tokenloom.runtime.rank_group import RankGroup

Slot = tuple[int, int]
"""(rank, slot of the rank)."""


class Move(NamedTuple):
    """A row of one slot that arrives at another, or stays."""

    source_rank: int
    source: int
    rank: int
    slot: int


def living_slots(placement: Placement, expert: int, masked: Collection[int]) -> list[Slot]:
    """List the slots of an expert on ranks that take part, ascending. The first is the owner."""
    return [each for each in placement.slots_of(expert) if each[0] not in masked]


def arrivals(
    ranks: RankGroup, moves: Sequence[Move], rows: torch.Tensor, phase: str
) -> list[tuple[Move, torch.Tensor]]:
    """Send rows along moves, the same list on all ranks, and return those that arrive here, in the order of the list.

    Nothing is sent where no row goes to another rank. Rows that stay on their rank are views.
    """
    if rows.ndim == 1:  # transfers cut bytes along the first dimension
        return [(move, row[0]) for move, row in arrivals(ranks, moves, rows[:, None], phase)]
    here = ranks.rank
    if all(move.source_rank == move.rank for move in moves):
        return [(move, rows[move.source]) for move in moves if move.rank == here]
    sent: dict[int, list[int]] = defaultdict(list)
    received: dict[int, list[Move]] = defaultdict(list)
    for move in moves:
        if move.source_rank == move.rank:
            continue
        if move.source_rank == here:
            sent[move.rank].append(move.source)
        elif move.rank == here:
            received[move.source_rank].append(move)
    order = [source for rank in range(ranks.num_ranks) for source in sent[rank]]
    outgoing = rows.index_select(0, torch.tensor(order, dtype=torch.int64, device=rows.device)).to(ranks.device)
    counts = [[len(each[rank]) for rank in range(ranks.num_ranks)] for each in (sent, received)]
    incoming = ranks.start_all_to_all(outgoing, counts[0], counts[1], phase).wait().to(rows.device)
    came = [move for rank in range(ranks.num_ranks) for move in received[rank]]
    by_move = dict(zip(came, incoming, strict=True))
    return [
        (move, rows[move.source] if move.source_rank == here else by_move[move]) for move in moves if move.rank == here
    ]


@torch.no_grad()
def copy_from_owners(ranks: RankGroup, moves: Sequence[Move], rows: torch.Tensor, phase: str) -> None:
    """Give replicas their owner's row, in place. Collective."""
    for move, row in arrivals(ranks, moves, rows, phase):
        rows[move.slot] = row


@torch.no_grad()
def sum_at_owners(ranks: RankGroup, moves: Sequence[Move], rows: torch.Tensor, phase: str) -> None:
    """Give owners the sum of their slots' rows, and replicas zeros, in place. Collective.

    It is summed in at least float32, in ascending (rank, slot), and rounded once to the dtype of the rows. So a
    second call changes nothing.

    Args:
        moves: of each row to its owner.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    terms: dict[int, list[tuple[Slot, torch.Tensor]]] = defaultdict(list)
    for move, row in arrivals(ranks, moves, rows, phase):
        terms[move.slot].append(((move.source_rank, move.source), row))
    sums = {}
    for slot, others in terms.items():
        own = (ranks.rank, slot), rows[slot]
        first, *rest = [row for _, row in sorted([own, *others], key=lambda term: term[0])]
        total = first.to(wide, copy=True)
        for row in rest:
            total += row
        sums[slot] = total
    for move in moves:
        if move.source_rank == ranks.rank:
            rows[move.source] = 0
    for slot, total in sums.items():
        rows[slot] = total
