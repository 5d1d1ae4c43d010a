"""Transfers between pairs of ranks over gloo, each of which may fail by itself.

A collective of torch.distributed fails as a whole when a member dies, and a member that hangs keeps it from ending.
Here every pair of ranks has a connection of its own: one that breaks is named, and the others carry on.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tokenloom.runtime.process_groups import raise_if_of_handler

FOREVER = timedelta(seconds=1e8)
"""How long a thread waits in gloo. When a wait of gloo expires, gloo closes the connections to all ranks."""
AT_ONCE = timedelta(milliseconds=1)
"""The shortest wait of gloo. It takes 0 for no limit at all."""
END_S = 10.0
"""Longest wait for threads to end whose waits have been ended."""


class Links:
    """A connection between each two of several ranks. Making one is collective among them.

    Args:
        store: where they find each other. The keys are theirs alone.
        rank: this rank.
        members: all of them, the same on each. One alone needs no connection.
        limit_s: longest wait for the others, in seconds.

    Raises:
        RuntimeError: a member did not come, or the store is gone.
    """

    def __init__(self, store: Any, rank: int, members: Iterable[int], limit_s: float) -> None:
        self._rank = rank
        self._index = {member: index for index, member in enumerate(sorted(members))}
        # Transfers that have not ended. Were one dropped, gloo would leave unread what arrives for it and behind it.
        self._open: list[dict[int, list[dist.Work]]] = []
        self._group: Any = None
        if len(self._index) > 1:
            limit = timedelta(seconds=limit_s)
            self._group = dist.ProcessGroupGloo(store, self._index[rank], len(self._index), limit)

    @staticmethod
    def keys(place: str, num_members: int) -> list[str]:
        """Keys that torch leaves in a store with this prefix, for members that find each other. It deletes none."""
        return [f"{place}/0/{index}" for index in range(num_members)]

    def start(
        self,
        waiter: Waiter,
        others: Collection[int],
        parts: Sequence[torch.Tensor],
        places: Sequence[torch.Tensor],
        number: int,
    ) -> PairTransfers:
        """Start to send a part to each rank, and to fill the place of each.

        Args:
            waiter: the thread that waits for them.
            others: the other ranks that take part.
            parts, places: contiguous tensors by rank, of all ranks of the group. Empty ones do not travel. Parts may
                not change before the transfers have ended; what is on a GPU goes through the host.
            number: of the collective that the transfers make up, the same on all ranks.
        """
        works: dict[int, list[dist.Work]] = {}
        broken: dict[int, str] = {}
        leaving = [part.cpu() for part in parts]
        # Not at its place: what a rank sends that nobody waits for any more may arrive at any time.
        arriving = [torch.empty(place.shape, dtype=place.dtype, device="cpu") for place in places]
        arriving[self._rank] = leaving[self._rank]
        for peer in sorted(others):
            started: list[dist.Work] = []
            try:
                if arriving[peer].numel():
                    started.append(self._group.recv([arriving[peer]], self._index[peer], number))
                if leaving[peer].numel():
                    started.append(self._group.send([leaving[peer]], self._index[peer], number))
            except RuntimeError as error:  # an earlier transfer broke the connection
                raise_if_of_handler(error)
                broken[peer] = str(error)
            else:
                if started:
                    works[peer] = started
        self._open = [*filter(None, self._open), works]
        absent = frozenset(range(len(places))) - {self._rank, *others}
        return PairTransfers(waiter, works, broken, list(zip(places, arriving, strict=True)), absent)


class PairTransfers:
    """Transfers with several ranks that make up one collective.

    Attributes:
        pending: ranks whose part has not ended.
        broken: why the part of a rank failed.

    Args:
        waiter: the thread that waits for it.
        works: the transfers with each rank. They are taken out when they have ended.
        broken: ranks with which none could be started, and why.
        places: where the part of each rank belongs, and where it arrives.
        absent: ranks that take no part.
    """

    def __init__(
        self,
        waiter: Waiter,
        works: dict[int, list[dist.Work]],
        broken: dict[int, str],
        places: Sequence[tuple[torch.Tensor, torch.Tensor]],
        absent: frozenset[int],
    ) -> None:
        # Both are replaced, not changed: users look at them while the thread goes on.
        self.pending = set(works)
        self.broken = broken
        self._waiter, self._works, self._places, self._absent = waiter, works, places, absent
        self._handed_over = False

    def wait(self, seconds: float) -> bool:
        """Wait until all parts have ended: whether they have, and none has failed. Returns early when one fails."""
        if not self._handed_over:
            self._handed_over = True
            self._waiter.take(self, sorted(self.pending))
        with self._waiter.changed:
            self._waiter.changed.wait_for(lambda: self.broken or not self.pending, max(seconds, 0))
            return not self.pending and not self.broken

    def give_up(self, ranks: Collection[int]) -> None:
        """Wait no longer for these ranks."""
        with self._waiter.changed:
            self._absent |= self.pending.union(self.broken).intersection(ranks)
            self.pending = self.pending.difference(ranks)
            self.broken = {rank: why for rank, why in self.broken.items() if rank not in ranks}
        self._waiter.leave(self, ranks)

    def finish(self) -> frozenset[int]:
        """Fill the places, with zeros where a part did not come: the ranks of these."""
        for rank, (place, arrival) in enumerate(self._places):
            if rank in self._absent:
                place.zero_()
            elif place.data_ptr() != arrival.data_ptr():
                place.copy_(arrival)
        return self._absent

    def wait_for(self, rank: int) -> str | None:
        """Wait for the transfers with a rank, without a deadline; why one failed, if so. For the waiter."""
        error = _wait(self._works[rank])
        del self._works[rank]
        return error

    def break_off(self, rank: int) -> None:
        """End the waits for a rank in all threads: one that expires closes the connections to all ranks."""
        for work in self._works.get(rank, ()):
            _wait([work], AT_ONCE)

    def ended(self, rank: int, error: str | None) -> None:
        """The waiter says that the part of a rank has ended."""
        self.pending = self.pending - {rank}
        if error is not None:
            self.broken = self.broken | {rank: error}


class Waiter:
    """A thread that waits in gloo, which cannot be asked whether a transfer has ended.

    It waits for one rank after the other. When nobody wants to hear of the rank that holds it up, another thread goes
    on in its place. The held one ends with the connection, or with :meth:`close`.

    No thread may be left when Python ends: a wait of gloo that returns then ends the process with SIGABRT.

    Attributes:
        changed: guards what the thread and its users share; it is notified when transfers have ended or failed.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._tasks: deque[tuple[PairTransfers, int]] = deque()
        self._thread: threading.Thread | None = None
        # All threads that have not ended, and what each of them waits for.
        self._at: dict[threading.Thread, tuple[PairTransfers, int] | None] = {}
        self._process = os.getpid()
        _waiters.add(self)

    def take(self, transfers: PairTransfers, ranks: Sequence[int]) -> None:
        """Wait for these parts of some transfers."""
        with self.changed:
            self._tasks.extend((transfers, rank) for rank in ranks)
            if self._thread is None and ranks:
                self._start()
            self.changed.notify_all()

    def leave(self, transfers: PairTransfers, ranks: Collection[int]) -> None:
        """Wait no longer for these parts of some transfers."""
        with self.changed:
            self._tasks = deque(task for task in self._tasks if not (task[0] is transfers and task[1] in ranks))
            at = self._at.get(self._thread) if self._thread is not None else None
            if at is not None and at[0] is transfers and at[1] in ranks:
                self._start()

    def close(self) -> None:
        """Wait for nothing any more, and end all threads. Where one is held up, all connections are closed."""
        if self._process != os.getpid():
            return  # a child has the connections of its parent, and none of its threads
        with self.changed:
            self._tasks.clear()
            self._thread = None
            self.changed.notify_all()
        threads, deadline = list(self._at), time.monotonic() + END_S
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
            for task in list(self._at.values()):
                if task is not None:
                    task[0].break_off(task[1])
            for thread in threads:  # again if it was only about to wait, or if the transfer ended for this thread
                thread.join(AT_ONCE.total_seconds())

    def _start(self) -> None:
        self._thread = thread = threading.Thread(target=self._run, name="tokenloom waiter", daemon=True)
        self._at[thread] = None
        try:
            thread.start()
        except BaseException:  # no more threads: the next wait tries again
            self._thread = None
            del self._at[thread]
            raise

    def _run(self) -> None:
        me = threading.current_thread()
        try:
            while self._wait_for_next(me):
                pass
        finally:
            del self._at[me]

    def _wait_for_next(self, me: threading.Thread) -> bool:
        """Wait for the next part; whether there may be another one for this thread."""
        with self.changed:
            self.changed.wait_for(lambda: self._thread is not me or bool(self._tasks))
            if self._thread is not me:
                return False
            self._at[me] = transfers, rank = self._tasks.popleft()
        error = transfers.wait_for(rank)
        with self.changed:
            self._at[me] = None
            if self._thread is not me:
                return False
            transfers.ended(rank, error)
            if transfers.broken or not transfers.pending:
                self.changed.notify_all()
        return True


_waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """Before Python ends, for communicators that nobody has closed."""
    for waiter in list(_waiters):
        waiter.close()


def _wait(works: Sequence[dist.Work], limit: timedelta = FOREVER) -> str | None:
    """Wait for transfers; why one failed, if so."""
    try:
        for work in works:
            work.wait(limit)
    except RuntimeError as error:
        raise_if_of_handler(error)
        return str(error)
    return None
