"""Messages between pairs of ranks over torch.distributed, with a deadline, and clocks around them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tokenloom.errors import PeerTimeout
from tokenloom.runtime.rank_group import RankGroup

POLL_S = 50e-6
Message = tuple[torch.Tensor, int]
"""A tensor, and the rank that it goes to or comes from."""


class Wire:
    """The messages of one rank. Over gloo the host waits for each of them, over NCCL the stream does."""

    def __init__(self, ranks: RankGroup) -> None:
        self.ranks = ranks
        self.device = ranks.device
        self._on_stream = ranks.device.type == "cuda"
        self._peers: set[int] = set()

    def transfer(self, sends: Sequence[Message], receives: Sequence[Message], phase: str) -> None:
        """Send and receive all of these together.

        Args:
            phase: what is going on, for errors.

        Raises:
            PeerTimeout: a message was not sent or did not come in time; names the ranks at their other ends.
        """
        group = self.ranks.process_group
        assert group is not None
        peers = {rank for _, rank in (*sends, *receives)}
        operations = [(dist.isend, each) for each in sends] + [(dist.irecv, each) for each in receives]
        asked: list[Any] = [
            dist.P2POp(start, tensor, dist.get_global_rank(group, rank), group) for start, (tensor, rank) in operations
        ]
        deadline = time.monotonic() + self.ranks.timeout_s
        try:
            for work in dist.batch_isend_irecv(asked):
                if self._on_stream:
                    work.wait()  # the stream waits, not the host
                else:
                    work.wait(timedelta(seconds=max(0.01, deadline - time.monotonic())))
        except RuntimeError as error:
            raise self._lost(peers, phase, str(error).splitlines()[0]) from error
        self._peers |= peers

    def finish(self, phase: str) -> None:
        """Wait on the host until all transfers are done.

        Raises:
            PeerTimeout: they were not in time.
        """
        peers, self._peers = self._peers, set()
        if not self._on_stream:
            return
        done, deadline = self.mark(), time.monotonic() + self.ranks.timeout_s
        try:
            while not done.query():
                if time.monotonic() > deadline:
                    raise self._lost(peers, phase, f"no answer within {self.ranks.timeout_s:g} s")
                time.sleep(POLL_S)
        except RuntimeError as error:  # of CUDA or NCCL
            raise self._lost(peers, phase, str(error).splitlines()[0]) from error

    def mark(self) -> Any:
        """A point in time: on a GPU an event on the stream, else seconds."""
        if not self._on_stream:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def us_between(self, first: Any, last: Any) -> float:
        """Microseconds between two marks, both of which are over (see :meth:`finish`)."""
        return float(first.elapsed_time(last) * 1e3 if self._on_stream else (last - first) * 1e6)

    def bytes_of(self, size: int) -> torch.Tensor:
        """uint8 [size] of zeros, on the device."""
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def _lost(self, peers: set[int], phase: str, cause: str) -> PeerTimeout:
        """Tell the ranks that wait elsewhere; the error to raise."""
        timeout = PeerTimeout(self.ranks.rank, sorted(peers), phase, self.ranks.step, cause)
        with suppress(RuntimeError):  # the store may be gone with the rank that hosts it
            self.ranks.mark_broken(timeout)
        return timeout


def pattern(sender: int, receiver: int, turn: int, size: int, device: torch.device) -> torch.Tensor:
    """uint8 [size]: bytes that differ by place, and by who sends to whom in which turn. Both ends know them."""
    start = (sender * 2654435761 + receiver * 40503 + turn * 97) % 2**31
    numbers = torch.arange(-(-size // 4), dtype=torch.int64, device=device)
    words = ((numbers + start) * 2654435761 % 2**32 - 2**31).to(torch.int32)
    return words.view(torch.uint8)[:size].contiguous()
