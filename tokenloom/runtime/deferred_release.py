"""Releases that dropped objects leave for later: a finalizer may run anywhere, so it only makes a list longer.

The garbage collector runs finalizers in the middle of other work: while somebody's CUDA graph is captured, inside the
store's client, at exit, or in a forked child. CUDA and the store must not be touched there.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

from tokenloom.runtime.collectives import all_have_ended
from tokenloom.runtime.process_groups import raise_if_of_handler

Undo = Callable[[], bool]
"""Takes the next steps; returns whether it is done. If not, or if it raises, it is called again later."""

_waiting: deque[tuple[int, Undo]] = deque()
"""With the process that each belongs to."""
_at_work = threading.Lock()


def undo_when_dropped(owner: object, undo: Undo) -> weakref.finalize:
    """Queue ``undo`` when the owner is garbage; it must not refer to the owner. At exit nothing is done."""
    finalizer = weakref.finalize(owner, _waiting.append, (os.getpid(), undo))
    finalizer.atexit = False
    return finalizer


def undo_later(undo: Undo) -> None:
    """Queue it for the next :func:`release_dropped`."""
    _waiting.append((os.getpid(), undo))


def keep_until_idle(owner: object, device: torch.device, *memory: torch.Tensor) -> None:
    """Keep memory that kernels may still use when its owner is dropped, until the device has done all its work."""

    def drop(_: tuple[torch.Tensor, ...] = memory) -> bool:
        return all_have_ended() and wait_for(device)

    undo_when_dropped(owner, drop)


def wait_for(device: torch.device) -> bool:
    """Wait for all work of a device. While its current stream is captured: False, and nothing is done.

    Also False while a collective of NCCL waits for a rank that may never come: only the current stream is waited for.
    """
    if device.type != "cuda":
        return True
    with torch.cuda.device(device):
        return not torch.cuda.is_current_stream_capturing() and synchronize(device)


def synchronize(device: torch.device) -> bool:
    """The same as :func:`wait_for`, on a GPU whose current stream is not captured."""
    if all_have_ended():
        torch.cuda.synchronize(device)
        return True
    torch.cuda.current_stream(device).synchronize()
    return False


def release_dropped() -> None:
    """Undo what was queued, as far as it can be done now. Called where a user expects work: at a construction, a check
    or a close. While the current stream is captured, in another thread's turn, and in a forked child nothing happens.
    """
    captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    if not _waiting or captured or not _at_work.acquire(blocking=False):
        return
    try:
        for _ in range(len(_waiting)):  # what is queued meanwhile has its turn next time
            process, undo = _waiting.popleft()
            done = process != os.getpid()
            try:
                done = done or undo()
            except Exception as error:  # a GPU or a store that fails is no fault of the caller
                raise_if_of_handler(error)
            finally:
                if not done:
                    _waiting.append((process, undo))
    finally:
        _at_work.release()


def _unlock() -> None:
    """A child may be forked while a thread of its parent is at work; that thread does not exist in the child."""
    global _at_work
    _at_work = threading.Lock()


os.register_at_fork(after_in_child=_unlock)
