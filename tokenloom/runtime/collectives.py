"""Collectives of torch that the host waits for, and those that may never end.

A thread of torch runs a collective of gloo. When it lets go of tensors that Python does not hold any more, it takes
Python's lock. While Python ends, that ends the process with SIGABRT (until Python 3.14). So nobody lets go of a
collective that has not ended, and Python ends only when those threads have nothing to let go of.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tokenloom.runtime.process_groups import raise_if_of_handler

SPIN_S, PAUSE_S = 1e-3, 1e-4
"""A host that waits for NCCL asks all the time for so long, and with pauses then."""
SHORTEST_S = 0.01
"""torch takes less than 1 ms as no limit at all."""
NO_ERROR = 0
"""SUCCESS of torch's WorkResult."""

gather_all = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Renamed in torch 2.13, which warns about the old name."""

UNNUMBERED = 0
"""The sequence number of gathers whose words cannot be stale."""
_gathers: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Gathers of NCCL that hosts have waited for, by process group: its communicators share NCCL's buffers."""

_open: set[CollectiveOnStream] = set()
"""Collectives of NCCL that this process has not seen the end of. After a PeerTimeout their kernels may go on."""
_unended: set[Collective] = set()
"""Collectives of gloo that this process has not seen the end of. A lost rank may leave some for ever."""

GLOO_THREAD = "pt_gloo_runloop"
"""Name of the threads in which torch runs collectives of gloo."""
QUIET_S = 0.01
"""A thread that waits for Python's lock asks for it more often."""
END_S = 5.0
"""Longest wait for these threads when Python ends. Some may work for a program that has not waited for them."""


class Collective:
    """A collective of torch.distributed, which waits for all ranks or none, and does not say for whom.

    Args:
        start: starts it. If that fails, it is as if the collective had failed a moment later.
        group: the process group.
    """

    def __init__(self, start: Callable[[], dist.Work], group: dist.ProcessGroup) -> None:
        self.pending: set[int] = set()
        self.broken: dict[int, str] = {}
        self._work: dist.Work | None = None
        self._group = group
        try:
            self._work = start()
        except RuntimeError as error:
            raise_if_of_handler(error)
            self.broken[-1] = str(error)
        else:
            self._keep()

    def _keep(self) -> None:
        """Keep it, and the group that runs it, until it has ended."""
        for collective in [each for each in list(_unended) if each.has_ended()]:  # other threads may add some
            _unended.discard(collective)
        _unended.add(self)

    @property
    def has_started(self) -> bool:
        """Whether it could be started."""
        return self._work is not None

    def wait(self, seconds: float) -> bool:
        if self._work is None:
            return not self.broken
        try:
            self._work.wait(timedelta(seconds=max(seconds, SHORTEST_S)))
            _unended.discard(self)
            return True
        except RuntimeError as error:
            raise_if_of_handler(error)
            return self._work.is_completed() and self._ended_well(self._work)

    def has_ended(self) -> bool:
        """Whether it has ended, with or without the parts of all ranks."""
        return self._work is None or self._work.is_completed()

    def _ended_well(self, work: dist.Work) -> bool:
        """Whether a collective that has ended did its work; waiting again tells."""
        try:
            work.wait()
            return True
        except RuntimeError as error:
            raise_if_of_handler(error)
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
        super().__init__(start, group)
        self._start = start

    def _keep(self) -> None:
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


def gather_sequence(group: dist.ProcessGroup) -> int:
    """The sequence number of the next gather of NCCL that hosts wait for: the same on all ranks, which send it along.

    Where a rank is lost, others may abort NCCL's communicator, or torch does as Python ends. Their kernels then send
    what is in their buffers. Elsewhere the collective ends as if all had answered, with words of earlier collectives.
    Those have other numbers, since NCCL matches collectives by their order.
    """
    return _gathers.get(group, UNNUMBERED) + 1


def count_gathers(group: dist.ProcessGroup, more: int = 1) -> None:
    """Count gathers that hosts wait for, and that this rank is about to start."""
    _gathers[group] = _gathers.get(group, UNNUMBERED) + more


def all_have_ended() -> bool:
    """Whether no collective of NCCL is left that may wait for a lost rank. A wait for the device would wait for it."""
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


@atexit.register
def _leave_threads_nothing() -> None:
    """Before Python ends: threads of gloo have let go of all that has ended, and never will of what has not."""
    for collective in list(_unended):
        if not collective.has_ended():
            _keep_for_ever(collective._work)
            _keep_for_ever(collective._group)  # its end would wait for the collective
    deadline, before = time.monotonic() + END_S, _gloo_threads()
    while before and time.monotonic() < deadline:
        time.sleep(max(QUIET_S, 2 * sys.getswitchinterval()))
        now = _gloo_threads()
        if now == before and all(state == "S" for state, _, _ in now.values()):
            return
        before = now


def _keep_for_ever(thing: object) -> None:
    """Keep it also when Python ends, and all else goes."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _gloo_threads() -> dict[str, tuple[str, str, str]]:
    """The state of each thread that runs collectives, and how often it has given up a processor, or has had to.

    A thread that sleeps, and has not run while Python's lock was free, does not wait for that lock.
    """
    found = {}
    for folder in Path("/proc/self/task").glob("*"):
        try:
            if (folder / "comm").read_text().strip() == GLOO_THREAD:
                lines = (folder / "status").read_text().splitlines()
                status = dict(line.split(":", 1) for line in lines)
                counts = (status["voluntary_ctxt_switches"], status["nonvoluntary_ctxt_switches"])
                found[folder.name] = (status["State"].strip()[0], *counts)
        except OSError:  # it has ended meanwhile
            pass
    return found
