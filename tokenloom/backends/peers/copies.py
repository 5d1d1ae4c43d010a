"""Rows that copy engines carry, for strategies all_gather and reduce_scatter."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenloom.backends.peers.buffers import Buffers, num_turns
from tokenloom.backends.peers.opening import Launcher, require_no_capture
from tokenloom.backends.peers.outcomes import CALLS_IN_FLIGHT
from tokenloom.plan import Plan
from tokenloom.runtime.openings import Fields
from tokenloom.runtime.symmetric_memory import SymmetricBuffer


class Copies:
    """Copies of one communicator. They take no SMs."""

    def __init__(self, plan: Plan, launcher: Launcher, buffers: Buffers) -> None:
        self._plan, self._launcher, self._buffers = plan, launcher, buffers

    def gather(self, x: torch.Tensor, fields: Fields) -> int:
        """Bring x to all other ranks. The address here of the rows of all ranks, there when the next call opens."""
        buffer, region = self.region(x.element_size(), fields)
        self.bring(buffer, region, lambda rank: x)
        return buffer.addresses[self._launcher.ranks.rank] + region

    def region(self, value_bytes: int, fields: Fields) -> tuple[SymmetricBuffer, int]:
        """The buffer, and the offset of the region of it that the next call uses. Copies into it may begin at once.

        Safe to overwrite. These calls have no halves, and those of others are received first. So call n - 1 has opened
        on all ranks: they have finished what call n - 2 put in this region, even if there are but two.
        """
        require_no_capture()
        self._launcher.finish_all()  # a half that sends ahead has waited for nobody
        buffer = self._buffers.gather(value_bytes, fields)
        # Raises what the launch would: then no copy is left on a stream that the next call may not follow.
        self._launcher.settle(CALLS_IN_FLIGHT)
        self._launcher.follow()
        return buffer, buffer.layout.offset(f"gathered{self._launcher.num_calls % num_turns(self._plan)}")

    def bring(self, buffer: SymmetricBuffer, region: int, rows_for: Callable[[int], torch.Tensor]) -> None:
        """Copy at most M rows to every other rank that is not masked. They are there when the next call has opened."""
        plan, me = self._plan, self._launcher.ranks.rank
        for distance in range(1, plan.num_ranks):
            rank = (me + distance) % plan.num_ranks
            if rank in self._launcher.masked:
                continue
            rows = rows_for(rank)
            buffer.copy_to(rank, region + me * plan.max_tokens_per_rank * plan.hidden * rows.element_size(), rows)
