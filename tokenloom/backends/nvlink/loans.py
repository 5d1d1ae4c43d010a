"""Receive buffers whose rows their caller holds: as long as anybody looks at them, dispatches go to another buffer."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from tokenloom.backends.nvlink.launcher import Launcher
from tokenloom.runtime.symmetric_memory import lent


class Loan:
    """Whether rows of one receive buffer are lent."""

    def __init__(self) -> None:
        self._holders: list[weakref.ref[Any]] = []
        self._stream: torch.cuda.Stream | None = None

    @property
    def is_held(self) -> bool:
        """Whether anybody still looks at what was lent."""
        return any(holder() is not None for holder in self._holders)

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same contiguous tensor, for a caller to hold. The buffer is theirs meanwhile."""
        if not tensor.numel():
            return tensor.new_empty(tensor.shape)
        memory, holder = lent(tensor.view(torch.uint8).flatten())
        self._holders.append(holder)
        self._stream = torch.cuda.current_stream(tensor.device)
        return memory.view(tensor.dtype).view(tensor.shape)

    def take_back(self, launcher: Launcher) -> None:
        """Nobody holds it: let the current stream wait for that on which it was lent, and so for its last readers."""
        if self._stream is None:
            return
        stream, captured = launcher.current()
        if captured:  # which waits for nothing outside: the next call that is not has to
            return
        if self._stream.cuda_stream != stream:
            torch.cuda.current_stream(launcher.ranks.device).wait_stream(self._stream)
        self._holders, self._stream = [], None
