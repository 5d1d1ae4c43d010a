"""Loads experts that are lost with masked ranks into slots of those that live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from tokenloom.comm.communicator import Communicator
from tokenloom.comm.move_experts import SlotBytes
from tokenloom.comm.placement import Placement
from tokenloom.errors import DtypeMismatch, InvalidArgument, ShapeMismatch, a_type, require_type
from tokenloom.ops.split_batch import EMPTY
from tokenloom.runtime.rendezvous import agree
from tokenloom.runtime.streams import on_device

Restored = dict[int, tuple[int, int]]
"""The slot (rank, slot of the rank) of each expert that is to be loaded."""


def plan_restore(placement: Placement, masked: Collection[int]) -> tuple[Placement, Restored]:
    """Find a slot on living ranks for each expert that has none there, the same on all ranks.

    Experts go to empty slots first, on the living rank with the fewest experts. Then they take slots of the experts
    with the most living replicas, which keep one at least. What finds no slot stays lost.

    Returns:
        The placement with those slots, in which masked ranks keep theirs; and which they are.
    """
    rows = placement.to_tensor().tolist()
    living = [rank for rank in range(placement.num_ranks) if rank not in masked]
    found: Restored = {}
    for expert in placement.lost_without(masked):
        replicas = Counter(e for rank in living for e in rows[rank] if e != EMPTY)
        slots = [(rank, slot) for rank in living for slot in range(placement.slots_per_rank)]
        empty = [(rank, slot) for rank, slot in slots if rows[rank][slot] == EMPTY]
        spare = [(rank, slot) for rank, slot in slots if replicas[rows[rank][slot]] > 1]
        if empty:
            counts = {rank: sum(e != EMPTY for e in rows[rank]) for rank in living}
            rank, slot = min(empty, key=lambda each: (counts[each[0]], each))
        elif spare:
            rank, slot = min(spare, key=lambda each: (-replicas[rows[each[0]][each[1]]], each))
        else:
            break
        rows[rank][slot] = expert
        found[expert] = rank, slot
    return Placement(rows, num_experts=placement.num_experts), found


def restore_experts(
    comm: Communicator, tensors: Sequence[torch.Tensor], restore: Callable[[int], Sequence[torch.Tensor]]
) -> list[int]:
    """Load the experts of ``comm.lost_experts()`` into slots of living ranks, from the next call on.

    Collective among the ranks that are left, between calls. Slots that are empty come first, then those of experts
    with other living replicas. Masked ranks keep their slots in the table, and have them again if they come back.

    With ``on_timeout="mask"`` some ranks may learn of a loss one call before others. So call it where all ranks come
    by, such as behind every tenth call, lost experts or not.

    Args:
        comm: made with a placement.
        tensors: what each slot of this rank has, as in ``move_experts``.
        restore: returns the tensors of one expert, each with the shape and dtype of a slot, on any device. Called with
            the number of each expert that this rank is to hold. The others wait for it: with ``on_timeout="mask"`` no
            longer than ``timeout_s``.

    Returns:
        The experts that have a slot again, none if none was lost. ``comm.lost_experts()`` tells what did not fit.

    Raises:
        InvalidArgument: as ``set_placement``; or ``restore`` is no function, or does not return a tensor for
            each of ``tensors``.
        ShapeMismatch, DtypeMismatch: a tensor that it returned is not as above.
        PeerError: such an error of another rank, or what ``restore`` raised there. Nothing has changed then.
    """
    require_type("comm", comm, Communicator, "a tokenloom.Communicator")
    engine, slots = comm.engine, SlotBytes(tensors)
    loaded: dict[int, list[torch.Tensor]] = {}
    plans: list[tuple[Placement, Restored]] = []
    masked = frozenset[int]()

    def prepare() -> tuple[dict[str, Any], None]:
        engine.raise_known_errors()
        if comm.placement is None:
            raise InvalidArgument("this communicator was made without a placement, so no slot can take a lost expert")
        if not callable(restore):  # told before anything is lost
            raise InvalidArgument(f"restore is {a_type(restore)}, expected a function of an expert's number")
        slots.require_fits(comm)
        plans.append(plan_restore(comm.placement, masked))
        placement, found = plans[0]
        terms = engine.terms_of_next(placement)
        for expert, (rank, _) in found.items():
            if rank == comm.rank:
                loaded[expert] = _checked(expert, restore(expert), tensors)
        return terms, None

    with engine.ranks.turn, on_device(comm.device), torch.no_grad():
        masked = engine.agree_on_masked("restore_experts")
        agree(engine.ranks, prepare, "restore_experts")
        placement, found = plans[0]
        if not found:
            return []
        for expert, values in loaded.items():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.detach()[found[expert][1]].copy_(value)
        engine.place(placement)
        restored = {expert: rank for expert, (rank, _) in found.items() if rank not in engine.masked}
        engine.restored |= restored
    return sorted(restored)


def _checked(expert: int, values: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Check what ``restore`` returned."""
    if not isinstance(values, (list, tuple)) or len(values) != len(tensors):
        count = f" of {len(values)}" if isinstance(values, (list, tuple)) else ""
        raise InvalidArgument(
            f"restore({expert}) is {a_type(values)}{count}, expected a list of {len(tensors)} tensors, one for each "
            "that a slot has"
        )
    for index, (value, tensor) in enumerate(zip(values, tensors, strict=True)):
        name = f"restore({expert})[{index}]"
        if not isinstance(value, torch.Tensor):
            raise InvalidArgument(f"{name} is {a_type(value)}, expected a torch.Tensor")
        if value.shape != tensor.shape[1:]:
            raise ShapeMismatch(f"{name} is {list(value.shape)}, expected {list(tensor.shape[1:])}, as a slot has it")
        if value.dtype != tensor.dtype:
            raise DtypeMismatch(f"{name} is {value.dtype}, expected {tensor.dtype}, as a slot has it")
    return list(values)
