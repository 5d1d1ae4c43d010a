"""Rows of experts on their way between slots: sums at owners, copies to replicas, and from one placement to another.

A tensor of slots has a row for each slot of this rank, [slots_per_rank, ...]. Each expert's owner is its first slot in
ascending (rank, slot), of the ranks that take part. The owner alone has what exists once: gradients and the state of
an optimizer. All slots of an expert have its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from tokenloom.comm.engine import Engine
from tokenloom.comm.placement import Placement
from tokenloom.comm.slot_rows import Move, arrivals, living_slots
from tokenloom.errors import InvalidArgument
from tokenloom.ops.split_batch import EMPTY
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.rendezvous import agree
from tokenloom.runtime.streams import on_device
from tokenloom.runtime.torch_modes import require_eager

Held = Literal["by owners", "by all slots"]
"""Who holds an expert's row: one slot, or all of them alike."""


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


@torch.no_grad()
def moved(ranks: RankGroup, moves: Sequence[Move], rows: torch.Tensor, num_slots: int, phase: str) -> torch.Tensor:
    """Return a new tensor of ``num_slots`` slots with what arrives there, and zeros elsewhere. Collective."""
    values = rows.view(torch.uint8) if rows.itemsize == 1 else rows  # torch indexes no FP8
    out = values.new_zeros(num_slots, *rows.shape[1:])
    for move, row in arrivals(ranks, moves, values, phase):
        out[move.slot] = row
    return out.view(rows.dtype)


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
