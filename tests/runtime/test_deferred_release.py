"""What finalizers queue, and when it is undone."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from tokenloom.runtime import deferred_release
from tokenloom.runtime.deferred_release import release_dropped, undo_later, undo_when_dropped


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    """Whatever other tests have left is put back afterwards."""
    kept = list(deferred_release._waiting)
    deferred_release._waiting.clear()
    yield
    deferred_release._waiting.clear()
    deferred_release._waiting.extend(kept)


class Owner:
    pass


def test_what_is_not_done_is_tried_again() -> None:
    """Undoing returns False where others are not ready, and raises where a driver fails; neither stops the rest."""
    first, second, third = mock.Mock(side_effect=[False, True]), mock.Mock(), mock.Mock(return_value=True)
    second.side_effect = [RuntimeError("the driver fails"), True]
    for undo in (first, second, third):
        undo_later(undo)
    for _ in range(3):
        release_dropped()
    assert [undo.call_count for undo in (first, second, third)] == [2, 2, 1]


def test_an_interrupt_loses_nothing() -> None:
    """Ctrl-C goes on to the caller. What it interrupted, and the rest, wait for the next time."""
    interrupted, other = mock.Mock(side_effect=[KeyboardInterrupt, True]), mock.Mock(return_value=True)
    undo_later(interrupted)
    undo_later(other)
    with pytest.raises(KeyboardInterrupt):
        release_dropped()
    release_dropped()
    assert (interrupted.call_count, other.call_count) == (2, 1)


def test_queued_when_the_owner_is_garbage() -> None:
    """Not before, also in a cycle, and not at once."""
    undo = mock.Mock(return_value=True)
    owner: list[object] = [Owner()]
    undo_when_dropped(owner[0], undo)
    owner.append(owner)
    release_dropped()
    assert not deferred_release._waiting
    del owner
    gc.collect()
    undo.assert_not_called()
    release_dropped()
    undo.assert_called_once()


def test_not_during_a_capture() -> None:
    """Neither GPU nor store may be waited for then."""
    undo = mock.Mock(return_value=True)
    undo_later(undo)
    with (
        mock.patch.object(torch.cuda, "is_initialized", return_value=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
    ):
        release_dropped()
        undo.assert_not_called()
    release_dropped()
    undo.assert_called_once()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch has threads
def test_a_child_undoes_nothing_of_its_parent() -> None:
    """What was queued before the fork, and what is dropped after it, is its parent's; what the child makes is its own,
    even if it was forked in the middle of a release."""
    called: list[str] = []

    def undo(name: str) -> bool:
        called.append(name)
        return True

    owner = [Owner()]
    undo_when_dropped(owner[0], lambda: undo("dropped"))
    undo_later(lambda: undo("queued"))
    deferred_release._at_work.acquire()
    child = os.fork()
    if child == 0:
        owner.clear()
        gc.collect()
        undo_later(lambda: undo("made by the child"))
        release_dropped()
        os._exit(0 if called == ["made by the child"] else 1)
    deferred_release._at_work.release()
    assert os.waitpid(child, 0)[1] == 0
    assert not called
    owner.clear()
    release_dropped()
    assert called == ["queued", "dropped"]


def test_one_thread_at_a_time() -> None:
    """A second one goes on at once: it must not wait for the first, which may wait for it."""
    started, go_on = threading.Event(), threading.Event()

    def wait() -> bool:
        started.set()
        return go_on.wait(20.0)

    undo_later(wait)
    thread = threading.Thread(target=release_dropped)
    thread.start()
    assert started.wait(20.0)
    other = mock.Mock(return_value=True)
    undo_later(other)
    release_dropped()
    other.assert_not_called()
    go_on.set()
    thread.join()
    release_dropped()
    other.assert_called_once()
