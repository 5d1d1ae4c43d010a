"""A collective that is under way."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Transfer:
    """A collective that has been started. Transfers of a group are waited for in the order they were started.

    Args:
        result: what the collective fills.
        wait: waits for it on the host or on the stream, and returns the ranks whose part did not come.
    """

    def __init__(self, result: torch.Tensor, wait: Callable[[], frozenset[int]] | None) -> None:
        self._result, self._wait = result, wait
        self._lost: frozenset[int] = frozenset()

    def wait(self) -> torch.Tensor:
        """The result. Over gloo the host waits for it. Over NCCL the current stream does, and the host too for what
        opens a call.

        Raises:
            PeerTimeout: where the host waits, ranks are missing. CommunicatorBroken: they were in an earlier wait.
        """
        if self._wait is not None:
            self._lost, self._wait = self._wait(), None
        return self._result

    @property
    def lost(self) -> frozenset[int]:
        """Ranks whose part did not come, since they are masked: it is zero. Known once the transfer was waited for."""
        return self._lost
