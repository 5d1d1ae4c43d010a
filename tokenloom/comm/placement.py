"""Placement: which physical slots hold which expert."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from tokenloom.errors import InvalidArgument, ShapeMismatch, a_type
from tokenloom.ops.split_batch import EMPTY
from tokenloom.plan import Plan


class Placement:
    """Which physical slots hold which expert: a table of W ranks with the same number of slots each.

    Every expert has one slot or several, its replicas, on any ranks. Slots may be empty. A placement never changes,
    equals another one of the same table, and can be a key.

    Args:
        table: integers [W, slots_per_rank], the expert in each slot, -1 for an empty one. A tensor on any device, or
            lists. It is copied.
        num_experts: E.

    Attributes:
        num_experts: E.
        num_ranks: W.
        slots_per_rank: slots of each rank.

    Raises:
        ShapeMismatch: the table does not have two dimensions, or is empty.
        InvalidArgument: it does not hold integers, an entry is no expert and not -1, or an expert has no slot.
    """

    num_experts: int
    num_ranks: int
    slots_per_rank: int
    _rows: tuple[tuple[int, ...], ...]

    def __init__(self, table: torch.Tensor | Any, *, num_experts: int) -> None:
        if isinstance(num_experts, bool) or not isinstance(num_experts, int) or num_experts < 1:
            raise InvalidArgument(f"num_experts is {num_experts!r}, expected a positive integer")
        try:
            found = torch.as_tensor(table)
        except (TypeError, ValueError, RuntimeError):
            raise InvalidArgument(f"table is {a_type(table)}, expected integers [ranks, slots of a rank]") from None
        if found.dim() != 2 or 0 in found.shape:  # before the dtype, which torch makes up for lists without values
            raise ShapeMismatch(f"table is {list(found.shape)}, expected [ranks, slots of a rank]")
        if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
            raise InvalidArgument(f"table is {found.dtype}, expected integers: an expert for each slot, or -1")
        rows = tuple(map(tuple, found.tolist()))
        slots: list[list[tuple[int, int]]] = [[] for _ in range(num_experts)]
        for rank, row in enumerate(rows):
            for slot, expert in enumerate(row):
                if not EMPTY <= expert < num_experts:
                    raise InvalidArgument(
                        f"table[{rank}, {slot}] is {expert}, expected -1 (empty) or 0..{num_experts - 1}"
                    )
                if expert != EMPTY:
                    slots[expert].append((rank, slot))
        without = [expert for expert, its in enumerate(slots) if not its]
        if without:
            raise InvalidArgument(
                f"expert {without[0]} has no slot ({len(without)} of {num_experts} experts have none, in "
                f"{found.numel()} slots); give every expert at least one"
            )
        values = self.__dict__
        values["num_experts"], (values["num_ranks"], values["slots_per_rank"]) = num_experts, found.shape
        values["_rows"], values["_slots"] = rows, tuple(map(tuple, slots))

    @classmethod
    def default(cls, num_experts: int, num_ranks: int, slots_per_rank: int | None = None) -> Placement:
        """Place expert e on rank ``e // (E / W)``, in ascending slots. Other slots are empty.

        Args:
            num_experts: E, divisible by W.
            num_ranks: W.
            slots_per_rank: at least E / W, which is what None means.

        Raises:
            InvalidArgument: W does not divide E, or ``slots_per_rank`` is less than E / W.
        """
        local = Plan(num_ranks, num_experts, 1, 1, 1).experts_per_rank
        if slots_per_rank is None:
            slots_per_rank = local
        if isinstance(slots_per_rank, bool) or not isinstance(slots_per_rank, int) or slots_per_rank < local:
            raise InvalidArgument(
                f"slots_per_rank is {slots_per_rank!r}, expected at least {local}, the experts of a rank"
            )
        table = torch.full((num_ranks, slots_per_rank), EMPTY, dtype=torch.int64, device="cpu")
        table[:, :local] = torch.arange(num_experts, device="cpu").view(num_ranks, local)
        return cls(table, num_experts=num_experts)

    def to_tensor(self) -> torch.Tensor:
        """Return the table, int64 [W, slots_per_rank] on the CPU, -1 for an empty slot."""
        return torch.tensor(self._rows, dtype=torch.int64, device="cpu")

    def slots_of(self, expert: int) -> tuple[tuple[int, int], ...]:
        """Return the slots (rank, slot of the rank) of an expert, ascending."""
        if not 0 <= expert < self.num_experts:
            raise InvalidArgument(f"expert is {expert}, expected 0..{self.num_experts - 1}")
        return self.__dict__["_slots"][expert]

    def slot_ids(self, without: Collection[int] = ()) -> list[list[int]]:
        """List the slots of each expert as backends number them, rank * slots_per_rank + slot, ascending.

        Args:
            without: ranks whose slots are left out.
        """
        slots: tuple[tuple[tuple[int, int], ...], ...] = self.__dict__["_slots"]
        return [[rank * self.slots_per_rank + slot for rank, slot in its if rank not in without] for its in slots]

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Return the expert in each slot of a rank, -1 for an empty one."""
        if not 0 <= rank < self.num_ranks:
            raise InvalidArgument(f"rank is {rank}, expected 0..{self.num_ranks - 1}")
        return self._rows[rank]

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """Number of slots of each expert, at least 1."""
        return tuple(len(slots) for slots in self.__dict__["_slots"])

    @cached_property
    def num_empty(self) -> int:
        """Number of slots that hold no expert."""
        return self.num_ranks * self.slots_per_rank - sum(self.replicas)

    def lost_without(self, ranks: Collection[int]) -> list[int]:
        """List the experts all of whose slots are on these ranks."""
        if not ranks:
            return []
        return [e for e in range(self.num_experts) if all(rank in ranks for rank, _ in self.slots_of(e))]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        return self.num_experts == other.num_experts and self._rows == other._rows

    def __hash__(self) -> int:
        return hash((self.num_experts, self._rows))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a placement never changes; make another one instead of setting {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a placement never changes; {name} cannot be deleted")

    def __repr__(self) -> str:
        return f"Placement({[list(row) for row in self._rows]}, num_experts={self.num_experts})"

    def __str__(self) -> str:
        return (
            f"{self.num_experts} experts in {self.num_ranks} x {self.slots_per_rank} slots: {self.num_empty} "
            f"empty, {self._replicated_in_words()}"
        )

    def _replicated_in_words(self, most: int = 8) -> str:
        """Name replicated experts, the first few of many, with the number of their slots."""
        several = [f"{e} ({number})" for e, number in enumerate(self.replicas) if number > 1]
        if not several:
            return "no expert replicated"
        named = ", ".join(several[:most]) + (", ..." if len(several) > most else "")
        return f"{len(several)} experts replicated (slots): {named}"


def placement_of(placement: Placement | None, spare_slots: int, num_experts: int, num_ranks: int) -> Placement | None:
    """Return the placement that is asked for: itself, or the default one with spare slots on each rank, or None.

    Raises:
        InvalidArgument: both are asked for, or the number is none.
    """
    if isinstance(spare_slots, bool) or not isinstance(spare_slots, int) or spare_slots < 0:
        raise InvalidArgument(f"spare_slots is {spare_slots!r}, expected a number of slots of each rank, 0 or more")
    if not spare_slots:
        return placement
    if placement is not None:
        raise InvalidArgument("both placement and spare_slots were passed; a placement has its spare slots itself")
    local = Plan(num_ranks, num_experts, 1, 1, 1).experts_per_rank
    return Placement.default(num_experts, num_ranks, local + spare_slots)


def plan_of_slots(plan: Plan, placement: Placement | None) -> Plan:
    """Return the plan of which backends know: its experts are the physical slots of a placement."""
    if placement is None:
        return plan
    return replace(plan, num_experts=placement.num_ranks * placement.slots_per_rank)


def placement_terms(placement: Placement | None) -> dict[str, str]:
    """Name what all ranks must have alike in a placement. The first that differs tells the first expert that does."""
    if placement is None:
        return {"slots_per_rank": "none, as there is no placement"}
    slots = {f"slots of expert {e}": str(list(placement.slots_of(e))) for e in range(placement.num_experts)}
    return {"slots_per_rank": str(placement.slots_per_rank)} | slots


def require_fits(placement: object, plan: Plan, slots_per_rank: int | None = None) -> None:
    """Raise InvalidArgument unless it is a placement of a plan's experts on its ranks.

    Args:
        slots_per_rank: that the communicator was made for; None: any number.
    """
    if not isinstance(placement, Placement):
        raise InvalidArgument(f"placement is {a_type(placement)}, expected a tokenloom.Placement")
    for name, wanted, of_whom in (
        ("num_ranks", plan.num_ranks, "the group has"),
        ("num_experts", plan.num_experts, "the communicator has"),
        ("slots_per_rank", slots_per_rank, "the communicator was made for"),
    ):
        has = getattr(placement, name)
        if wanted is not None and has != wanted:
            raise InvalidArgument(f"placement has {name}={has}, {of_whom} {wanted}; pass one of {name}={wanted}")
