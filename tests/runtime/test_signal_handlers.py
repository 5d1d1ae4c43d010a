"""A signal handler may raise what torch raises, while torch is called: it is not taken for an error of torch."""

from __future__ import annotations

import functools
import gc
import inspect
import signal
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from tokenloom.runtime import collectives, deferred_release
from tokenloom.runtime.collectives import Collective
from tokenloom.runtime.deferred_release import release_dropped, undo_later
from tokenloom.runtime.links import Links, Waiter
from tokenloom.runtime.store_notes import StoreNotes


class Watchdog(RuntimeError):
    pass


def bark(*_: object) -> None:
    raise Watchdog


def bark_once(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise Watchdog


class Dog:
    def __call__(self, *_: object) -> None:
        raise Watchdog

    def bark(self, *_: object) -> None:
        raise Watchdog


@pytest.fixture(
    params=[bark, bark_once, functools.partial(bark, 1), Dog(), Dog().bark],
    ids=["function", "once", "partial", "object", "method"],
)
def handler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(collectives, "_unended", set())
    monkeypatch.setattr(deferred_release, "_waiting", deque())
    before = signal.signal(signal.SIGUSR2, request.param)
    yield
    signal.signal(signal.SIGUSR2, before)


class Torch:
    """Whatever is called of torch, the signal comes meanwhile."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_: signal.raise_signal(signal.SIGUSR2)


def start_transfer() -> None:
    links = Links(None, 0, [0], 1.0)
    links._group, links._index = Torch(), {0: 0, 1: 1}
    rows = list(torch.zeros(2, 1))
    links.start(Waiter(), [1], rows, rows, 0)


def ask_store() -> None:
    store: Any = Torch()
    StoreNotes(store, 0, 1, True).call("add", "key", 1)


def wait_for_collective() -> None:
    work: Any = Torch()
    group: Any = None
    collective = Collective(lambda: work, group)
    collective.wait(1.0)


def undo_something() -> None:
    undo: Any = Torch().undo
    undo_later(undo)
    release_dropped()


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize(
    "call", [start_transfer, ask_store, wait_for_collective, undo_something], ids=lambda call: call.__name__
)
def test_what_a_handler_raises_comes_through(call: Callable[[], None]) -> None:
    """Else a healthy rank would be missed, or the store."""
    with pytest.raises(Watchdog):
        call()


def test_others_errors_are_theirs() -> None:
    """Whatever variables are called, and frames that lie about."""

    def torch_fails(frame: object) -> None:
        raise RuntimeError("of torch")

    collective = Collective(lambda: torch_fails(inspect.currentframe().f_code), None)  # type: ignore
    assert collective.broken == {-1: "of torch"}


def test_a_wait_that_was_long_keeps_nothing(gc_off: None) -> None:
    """torch ends a wait by an error. What it kept until Python's next garbage collection is a communicator, whose
    notes would stay in the store."""
    collective: Any = Collective(lambda: SlowWork(), None)  # type: ignore
    assert not collective.wait(0.0)
    kept = weakref.ref(collective)
    collectives._unended.clear()
    del collective
    assert kept() is None


class SlowWork:
    def wait(self, limit: timedelta) -> None:
        raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return False


@pytest.fixture
def gc_off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(collectives, "_unended", set())
    gc.disable()
    yield
    gc.enable()
