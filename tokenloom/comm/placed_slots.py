"""Experts to slots on the way to a backend, which knows slots alone."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from tokenloom.comm.placement import Placement
from tokenloom.ops.slots_of_routes import BatchSplit, SlotTable, write_numbers
from tokenloom.ops.split_batch import EMPTY


class PlacedBatch(NamedTuple):
    """Where the routes of a batch go.

    Attributes:
        slot_ids: int32 [T, K], the slot of each route of this rank, -1 for none.
        slot_experts: int32 [slots_per_rank], the expert in each slot of this rank for this batch, -1 for none.
        placement: that ruled.
        split: of a balanced batch.
    """

    slot_ids: torch.Tensor
    slot_experts: torch.Tensor
    placement: Placement
    split: BatchSplit | None = None


class PlacedSlots:
    """The placement that rules a communicator's next dispatch, and its table on the device.

    Args:
        placement: the first one. rank: this one. device: of the routes.
        masked: ranks that take no part, whose slots count for nothing.

    Attributes:
        placement: the one that rules.
        table: on the device.
    """

    def __init__(self, placement: Placement, rank: int, device: torch.device, masked: frozenset[int]) -> None:
        self._rank, self._masked, self._taken = rank, masked, frozenset[int]()
        self.table = SlotTable(placement.num_experts, placement.num_ranks, placement.slots_per_rank, rank, device)
        # In memory that stays where it is, and in a tensor of its own for each placement.
        self._experts_of_replays = torch.empty(placement.slots_per_rank, dtype=torch.int32, device=device)
        self.place(placement)

    def place(self, placement: Placement) -> None:
        """Let another placement of the same sizes rule, from the next dispatch on."""
        self.placement, self._taken = placement, frozenset()
        write_numbers(self._experts_of_replays, placement.experts_of(self._rank))
        self._experts = self._experts_of_replays.clone()
        self._write()

    def take(self, slots: Collection[tuple[int, int]]) -> None:
        """Let no batch fill these slots, (rank, slot of it), and no others: experts are on their way to them.

        It holds until a placement rules anew, so all ranks call it alike.
        """
        self._taken = frozenset(rank * self.placement.slots_per_rank + slot for rank, slot in slots)
        self._write()

    def is_free(self, rank: int, slot: int) -> bool:
        """Whether batches may fill a slot: it is empty, and nothing is on its way there."""
        number = rank * self.placement.slots_per_rank + slot
        return self.placement.experts_of(rank)[slot] == EMPTY and number not in self._taken

    def follow(self, masked: frozenset[int]) -> None:
        """Leave out the slots of these ranks, and of no others."""
        if masked != self._masked:
            self._masked = masked
            self._write()

    def local_experts(self) -> torch.Tensor:
        """int32 [slots_per_rank], the expert in each slot of this rank, -1 for none.

        In a capture they lie where they follow the placement, as the graph does.
        """
        captured = self._experts.is_cuda and torch.cuda.is_current_stream_capturing()
        return self._experts_of_replays if captured else self._experts

    def _write(self) -> None:
        self.table.write(self.placement.slot_ids(without=self._masked), self._masked, self._taken)

    def place_routes(self, topk_ids: torch.Tensor, stream: int | None) -> PlacedBatch:
        """Find the slots of a batch's routes, by the placement alone."""
        return PlacedBatch(self.table.slots_of_routes(topk_ids, stream), self.local_experts(), self.placement)

    def split_routes(
        self, topk_ids: torch.Tensor, counts: torch.Tensor, rows_per_pull: int, always: bool, stream: int | None
    ) -> PlacedBatch:
        """Find them by a split of the batch.

        Args:
            counts: int32 [W, E], routes of each source rank to each expert.
            rows_per_pull, always: when it pays.
        """
        split = self.table.split(counts, rows_per_pull, always, stream)
        experts = split.slot_experts.view(self.placement.num_ranks, -1)[self._rank]
        slot_ids = self.table.slots_of_routes(topk_ids, stream, split)
        return PlacedBatch(slot_ids, experts, self.placement, split)
