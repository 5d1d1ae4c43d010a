"""Which thread may make calls: one at a time, since all ranks make them in one order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import RLock
from types import TracebackType

from tokenloom.errors import InvalidArgument


class Turn:
    """Lets one thread in at a time. A thread that is in may enter again, as calls do that are parts of others.

    Attributes:
        take: tries to enter without waiting; False if another thread is in.
        leave: leaves.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self.take, self.leave = partial(self._lock.acquire, False), self._lock.release  # every call makes both

    def enter(self, limit_s: float) -> InvalidArgument | None:
        """Enter, if need be behind the thread that is in.

        Args:
            limit_s: longest wait for it, in seconds.

        Returns:
            The error of a thread that had to wait. It has its turn only to tell the other ranks: they may not have
            had two threads in at once, and wait for its call.

        Raises:
            InvalidArgument: the other thread has not left.
        """
        if self.take():
            return None
        fault = refusal()
        if not self._lock.acquire(timeout=limit_s):
            raise fault
        return fault

    @contextmanager
    def behind(self, limit_s: float) -> Iterator[InvalidArgument | None]:
        """Enter with :meth:`enter`, whose error the block is given, and leave behind the block."""
        fault = self.enter(limit_s)
        try:
            yield fault
        finally:
            self.leave()

    def __enter__(self) -> None:
        if not self.take():
            raise refusal()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


def refusal() -> InvalidArgument:
    """The error of a thread that finds another one in."""
    return InvalidArgument(
        "another thread is in a call of this communicator, or of its process group, and all ranks make calls in one "
        "order; let threads take turns"
    )
