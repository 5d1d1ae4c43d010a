"""Collectives of torch that the host waits for, and those of NCCL that may never end."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from datetime import timedelta

import torch.distributed as dist

SPIN_S, PAUSE_S = 1e-3, 1e-4
"""A host that waits for NCCL asks all the time for so long, and with pauses then."""
SHORTEST_S = 0.01
"""torch takes less than 1 ms as no limit at all."""
NO_ERROR = 0
"""SUCCESS of torch's WorkResult."""

gather_all = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Renamed in torch 2.13, which warns about the old name."""

_open: set[CollectiveOnStream] = set()
"""Collectives of NCCL that this process has not seen the end of. After a PeerTimeout their kernels may go on."""


class Collective:
    """A collective of torch.distributed, which waits for all ranks or none, and does not say for whom.

    Args:
        start: starts it. If that fails, it is as if the collective had failed a moment later.
    """

    def __init__(self, start: Callable[[], dist.Work]) -> None:
        self.pending: set[int] = set()
        self.broken: dict[int, str] = {}
        self._work: dist.Work | None = None
        try:
            self._work = start()
        except RuntimeError as error:
            self.broken[-1] = str(error)

    @property
    def has_started(self) -> bool:
        """Whether it could be started."""
        return self._work is not None

    def wait(self, seconds: float) -> bool:
        if self._work is None:
            return not self.broken
        try:
            self._work.wait(timedelta(seconds=max(seconds, SHORTEST_S)))
            return True
        except RuntimeError:
            return self._work.is_completed() and self._ended_well(self._work)

    def _ended_well(self, work: dist.Work) -> bool:
        """Whether a collective that has ended did its work; waiting again tells."""
        try:
            work.wait()
            return True
        except RuntimeError as error:
            self.broken[-1] = str(error)
            return False

    def give_up(self, ranks: Collection[int]) -> None:
        raise AssertionError("a collective of torch waits for all ranks")


class CollectiveOnStream(Collective):
    """A collective of NCCL. The host asks whether it has ended, and whether NCCL reports an error.

    torch's wait would abort NCCL's communicator, if it has a limit or if there is an error. Collectives that only come
    late would end with it. Worse, kernels that are aborted send what is in their buffers, and other ranks take that
    for the answers of all.

    Args:
        start: starts it, and refers to the memory that it works on, which is kept until its end.
        group: the process group.
    """

    def __init__(self, start: Callable[[], dist.Work], group: dist.ProcessGroup) -> None:
        super().__init__(start)
        self._start, self._group = start, group
        if self.has_started:
            _open.add(self)

    def wait(self, seconds: float) -> bool:
        if self._work is None:
            return not self.broken
        began = time.monotonic()
        while not self._work.is_completed():
            waited_s = time.monotonic() - began
            if waited_s >= seconds:
                return False
            if waited_s > SPIN_S:
                time.sleep(PAUSE_S)
        return self._ended_well(self._work)

    def _ended_well(self, work: dist.Work) -> bool:
        error = _has_error(work)
        if error:
            self.broken[-1] = "NCCL reports an error, which torch has printed"
            return False
        if error is None and not super()._ended_well(work):  # only waiting tells
            return False
        _open.discard(self)  # no stream has to wait: its kernel has ended
        return True

    def has_ended(self) -> bool:
        """Whether its kernel has ended, with or without the parts of all ranks."""
        assert self._work is not None
        if not _is_registered(self._group):
            return True  # it was aborted, or has waited for the end of all its work
        return self._work.is_completed() and not _has_error(self._work)  # torch calls complete what has an error


def all_have_ended() -> bool:
    """Whether no collective of NCCL is left that may wait for a lost rank, as whoever waits for the device would."""
    for collective in list(_open):  # other threads may have some
        if collective.has_ended():
            _open.discard(collective)
    return not _open


def _has_error(work: dist.Work) -> bool | None:
    """Whether torch has found an error of NCCL; None where it keeps no result, as for all that is not NCCL."""
    try:
        result = work.get_future_result()  # type: ignore[attr-defined]
    except RuntimeError:
        return None
    return result.done() and int(result.value()) != NO_ERROR


def _is_registered(group: dist.ProcessGroup) -> bool:
    """Whether torch still has the process group: nobody has aborted or destroyed it."""
    try:
        dist.get_process_group_ranks(group)
        return True
    except (KeyError, RuntimeError, ValueError):
        return False
