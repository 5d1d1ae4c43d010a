"""CUDA graphs that use a communicator keep it alive.

A graph replays kernels with the addresses they were captured with, long after Python may have dropped their owner. The
driver can tell when a graph, and everything that was instantiated from it, is gone: it calls a function of our choice.
That function must not run Python, for it may be called from any thread, at exit even. So it is ``sem_post`` of the C
library, on a semaphore whose value Python reads when it has time.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from tokenloom.jit.kernel import checked, load_driver
from tokenloom.runtime.deferred_release import undo_later

_SEMAPHORE_BYTES = 64
"""More than sem_t has on any Linux."""

_alive: dict[GraphReferences, tuple[object, ...]] = {}
"""Objects that graphs use, by the counter of the graphs."""


class GraphReferences:
    """The graphs into which calls of one communicator were captured."""

    def __init__(self) -> None:
        self._num_held = 0
        self._captures: set[int] = set()
        self._semaphore = 0

    def hold(self, stream: int, *owners: object) -> None:
        """Keep the owners as long as the graph that this stream is captured into, or anything made from it.

        Args:
            stream: its raw handle, while it is captured.
        """
        driver = load_driver()
        _, capture, graph, *_ = checked(driver.cuStreamGetCaptureInfo(stream))
        if int(capture) in self._captures:
            return
        if not self._semaphore:
            self._semaphore = _new_semaphore()
        posted = driver.CUhostFn(ctypes.cast(_library().sem_post, ctypes.c_void_p).value)
        flags = driver.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
        user_object = checked(driver.cuUserObjectCreate(self._semaphore, posted, 1, flags.value))
        move = driver.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
        checked(driver.cuGraphRetainUserObject(graph, user_object, 1, move.value))
        self._captures.add(int(capture))
        self._num_held += 1
        if self not in _alive:
            undo_later(self._let_go)
        _alive[self] = owners

    def are_gone(self) -> bool:
        """Whether no graph is left that may replay a call."""
        if not self._num_held:
            return True
        posted = ctypes.c_int()
        _library().sem_getvalue(ctypes.c_void_p(self._semaphore), ctypes.byref(posted))
        return posted.value >= self._num_held

    def _let_go(self) -> bool:
        if not self.are_gone():
            return False
        _alive.pop(self, None)
        return True


@cache
def _library() -> Any:
    return ctypes.CDLL(None)


def _new_semaphore() -> int:
    """Address of a semaphore that is never freed: graphs of a process that ends post it at the last moment."""
    library = _library()
    library.calloc.restype = ctypes.c_void_p
    address = library.calloc(1, _SEMAPHORE_BYTES)
    library.sem_init(ctypes.c_void_p(address), 0, 0)
    return int(address)
