"""Rows of experts on their way between slots: sums at owners, copies to replicas, and from one placement to another.

A tensor of slots has a row for each slot of this rank, [slots_per_rank, ...]. Each expert's owner is its first slot in
ascending (rank, slot), of the ranks that take part. The owner alone has what exists once: gradients and the state of
an optimizer. All slots of an expert have its weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch

from tokenloom.comm.engine import Engine
from tokenloom.comm.placement import EMPTY, Placement
from tokenloom.errors import InvalidArgument
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.rendezvous import agree
from tokenloom.runtime.streams import on_device
from tokenloom.runtime.torch_modes import require_eager

Slot = tuple[int, int]
"""(rank, slot of the rank)."""
Held = Literal["by owners", "by all slots"]
"""Who holds an expert's row: one slot, or all of them alike."""


class Move(NamedTuple):
    """A row of one slot that arrives at another, or stays."""

    source_rank: int
    source: int
    rank: int
    slot: int


def living_slots(placement: Placement, expert: int, masked: Collection[int]) -> list[Slot]:
    """List the slots of an expert on ranks that take part, ascending. The first is the owner."""
    return [each for each in placement.slots_of(expert) if each[0] not in masked]


def moves_between(old: Placement, new: Placement, held: Held, masked: Collection[int] = ()) -> list[Move]:
    """List the moves that bring rows from where they lie by one placement to where they lie by another.

    A row comes from its own slot if it can, else from its own rank, else from the owner.
    """
    moves = []
    for expert in range(old.num_experts):
        sources, targets = (living_slots(each, expert, masked) for each in (old, new))
        if held == "by owners":
            sources, targets = sources[:1], targets[:1]
        for rank, slot in targets if sources else ():
            near = [each for each in sources if each[0] == rank]
            source = (rank, slot) if (rank, slot) in near else (near or sources)[0]
            moves.append(Move(*source, rank, slot))
    return moves


def moves_to_owners(placement: Placement, masked: Collection[int] = ()) -> list[Move]:
    """List the moves of each replica's row to its owner, in the order in which owners add them."""
    moves = []
    for expert in range(placement.num_experts):
        slots = living_slots(placement, expert, masked)
        moves += [Move(*copy, *slots[0]) for copy in slots[1:]]
    return moves


def moves_from_owners(placement: Placement, masked: Collection[int] = ()) -> list[Move]:
    """List the moves of each owner's row to its replicas."""
    return [Move(each.rank, each.slot, each.source_rank, each.source) for each in moves_to_owners(placement, masked)]


@contextmanager
def agreed(engine: Engine, phase: str, prepare: Callable[[], dict[str, Any]]) -> Iterator[RankGroup]:
    """Let all ranks begin the same, between calls. Inside, rows may travel.

    Args:
        engine: of the communicator that knows the ranks.
        phase: what is going on, for errors.
        prepare: checks what this rank has, and names what all ranks must have alike.
    """

    def terms() -> dict[str, Any]:
        if engine.open_calls.any_open():
            raise InvalidArgument(f"a pending call is open; receive it before {phase}")
        return prepare()

    with agreed_beside(engine.ranks, phase, terms) as ranks:
        yield ranks


@contextmanager
def agreed_beside(ranks: RankGroup, phase: str, prepare: Callable[[], dict[str, Any]]) -> Iterator[RankGroup]:
    """Do what :func:`agreed` does for ranks that no communicator uses for calls."""
    ranks.require_alive()

    def terms() -> tuple[dict[str, Any], None]:
        require_eager()
        return prepare(), None

    with ranks.turn, on_device(ranks.device):
        agree(ranks, terms, phase)
        yield ranks


def arrivals(
    ranks: RankGroup, moves: Sequence[Move], rows: torch.Tensor, phase: str
) -> list[tuple[Move, torch.Tensor]]:
    """Send rows along moves, the same list on all ranks, and return those that arrive here, in the order of the list.

    Nothing is sent where no row goes to another rank. Rows that stay on their rank are views.
    """
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
def moved(ranks: RankGroup, moves: Sequence[Move], rows: torch.Tensor, num_slots: int, phase: str) -> torch.Tensor:
    """Return a new tensor of ``num_slots`` slots with what arrives there, and zeros elsewhere. Collective."""
    values = rows.view(torch.uint8) if rows.itemsize == 1 else rows  # torch indexes no FP8
    out = values.new_zeros(num_slots, *rows.shape[1:])
    for move, row in arrivals(ranks, moves, values, phase):
        out[move.slot] = row
    return out.view(rows.dtype)


@torch.no_grad()
def copy_from_owners(ranks: RankGroup, moves: Sequence[Move], rows: torch.Tensor, phase: str) -> None:
    """Give replicas their owner's row, in place. Collective. ``moves``: :func:`moves_from_owners`."""
    for move, row in arrivals(ranks, moves, rows, phase):
        rows[move.slot] = row


@torch.no_grad()
def sum_at_owners(ranks: RankGroup, moves: Sequence[Move], rows: torch.Tensor, phase: str) -> None:
    """Give owners the sum of their slots' rows, and replicas zeros, in place. Collective.

    It is summed in at least float32, in ascending (rank, slot), and rounded once to the dtype of the rows. So a
    second call changes nothing.

    Args:
        moves: :func:`moves_to_owners`.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    terms: dict[int, list[torch.Tensor]] = defaultdict(list)
    for move, row in arrivals(ranks, moves, rows, phase):
        terms[move.slot].append(row)
    sums = {}
    for slot, others in terms.items():
        total = rows[slot].to(wide, copy=True)
        for other in others:
            total += other
        sums[slot] = total
    for move in moves:
        if move.source_rank == ranks.rank:
            rows[move.source] = 0
    for slot, total in sums.items():
        rows[slot] = total


Act = Callable[[RankGroup, Sequence[Move], torch.Tensor, str], None]
""":func:`sum_at_owners` or :func:`copy_from_owners`."""


def along(engine: Engine, moves: Sequence[Move], tensors: dict[str, torch.Tensor], act: Act, phase: str) -> None:
    """Change tensors of slots in place along the moves, which all ranks list alike. Collective if there are any."""
    if not moves:
        return
    with agreed(engine, phase, lambda: terms_of(tensors)) as ranks:
        for each in tensors.values():
            act(ranks, moves, each, phase)


def rows_of_slots(full: torch.Tensor, slot_experts: Sequence[int]) -> torch.Tensor:
    """Take the rows of this rank's slots from all experts', [E, ...], with zeros for empty slots."""
    index = torch.tensor(slot_experts, dtype=torch.int64, device=full.device)
    rows = full.index_select(0, index.clamp(min=0))
    rows[index == EMPTY] = 0
    return rows


def terms_of(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Name what all ranks must have alike where rows of these tensors travel."""
    return {"tensors": ", ".join(f"{name} {list(each.shape)} {each.dtype}" for name, each in tensors.items())}
