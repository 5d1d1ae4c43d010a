"""Transfers beside the experts' GEMMs: on the communicator's own stream, or in order with the GEMMs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tokenloom.comm.engine import Engine
from tokenloom.runtime.streams import Event, tensors_in


class RunningTransfer:
    """Block of work beside the GEMMs, and its results that another stream uses."""

    def __init__(self) -> None:
        self.results: list[object] = []
        self.event: Event | None = None

    def wait(self) -> None:
        """Make the current stream wait for the block."""
        if self.event is not None:
            self.event.wait()


class TransferStream:
    """Stream that transfers run on: one of their own, or the current one.

    Args:
        engine: the communicator's engine.
        overlap: use the communicator's stream beside the GEMMs. Without it, and on CPUs, everything runs in order.
    """

    def __init__(self, engine: Engine, overlap: bool) -> None:
        self._side_stream, self._device = engine.side_stream, engine.ranks.device
        self.overlaps = overlap and self._device.type == "cuda"

    def mark(self) -> torch.cuda.Event | None:
        """Mark the work on the current stream so far, for transfers that begin after it. None without overlap."""
        return torch.cuda.current_stream(self._device).record_event() if self.overlaps else None

    @contextmanager
    def transfer(self, inputs: tuple[object, ...], after: torch.cuda.Event | None) -> Iterator[RunningTransfer]:
        """Run the block after a mark.

        Args:
            inputs: everything that the block reads: tensors, or tuples and dataclasses that hold tensors.
            after: mark from :meth:`mark`.
        """
        transfer = RunningTransfer()
        if not self.overlaps:
            yield transfer
            return
        with self._side_stream.run(inputs, after):
            yield transfer
            transfer.event = self._side_stream.event(tuple(tensors_in(tuple(transfer.results))))
