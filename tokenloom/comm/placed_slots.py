"""Experts to slots on the way to a backend, which knows slots alone."""

from __future__ import annotations

from typing import Any

import torch

from tokenloom.backends.seam import DispatchOut, PreparedDispatch, Sent, Tokens
from tokenloom.comm.placement import Placement
from tokenloom.ops.slots_of_routes import SlotTable, write_numbers


class PlacedSlots:
    """The placement that rules a communicator's next dispatch, and its table on the device.

    Args:
        placement: the first one. rank: this one. device: of the routes.
        masked: ranks that take no part, whose slots count for nothing.

    Attributes:
        placement: the one that rules.
    """

    def __init__(self, placement: Placement, rank: int, device: torch.device, masked: frozenset[int]) -> None:
        self._rank, self._masked = rank, masked
        self._table = SlotTable(placement.num_experts, placement.num_ranks, placement.slots_per_rank, rank, device)
        # In memory that stays where it is, and in a tensor of its own for each placement.
        self._experts_of_replays = torch.empty(placement.slots_per_rank, dtype=torch.int32, device=device)
        self.place(placement)

    def place(self, placement: Placement) -> None:
        """Let another placement of the same sizes rule, from the next dispatch on."""
        self.placement = placement
        write_numbers(self._experts_of_replays, placement.experts_of(self._rank))
        self._experts = self._experts_of_replays.clone()
        self._write()

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
        self._table.write(self.placement.slot_ids(without=self._masked), self._masked)

    def placed(self, tokens: Tokens, stream: int | None) -> Tokens:
        """Return the same tokens with slots for ids, which are found on the current stream."""
        return tokens._replace(topk_ids=self.slots_of_routes(tokens.topk_ids, stream))

    def slots_of_routes(self, topk_ids: torch.Tensor, stream: int | None) -> torch.Tensor:
        """Return the slot of each route; see :meth:`tokenloom.ops.slots_of_routes.SlotTable.slots_of_routes`."""
        return self._table.slots_of_routes(topk_ids, stream)


class PlacedDispatch:
    """Makes dispatches of one kind, whose ids are experts, by a backend's, whose ids are slots.

    Args:
        prepared: the backend's. engine: whose placement and masks rule.
    """

    def __init__(self, prepared: PreparedDispatch, engine: Any) -> None:
        self._prepared, self._engine = prepared, engine

    @property
    def is_stale(self) -> bool:
        return self._prepared.is_stale

    @property
    def waits(self) -> bool:
        return self._prepared.waits

    def send(
        self, tokens: Tokens, out: DispatchOut | None = None, stream: int | None = None
    ) -> Sent[tuple[Any, torch.Tensor]]:
        """Find the slots, then send; see :meth:`tokenloom.backends.seam.PreparedDispatch.send`."""
        slots = self._engine.slots_of_now()
        return self._prepared.send(slots.placed(tokens, stream), out, stream)
