"""Transfers between pairs of ranks, as the thread that waits for them and its users see them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest

from tests.support.patience import PATIENCE_S
from tokenloom.runtime import links
from tokenloom.runtime.links import PairTransfers, Waiter


class Work:
    """One of gloo with a rank that does not come: only a wait that expires ends the others."""

    def __init__(self) -> None:
        self.is_waited_for, self.is_closed = threading.Event(), threading.Event()

    def wait(self, limit: timedelta) -> None:
        self.is_waited_for.set()
        if limit < timedelta(seconds=1):
            self.is_closed.set()
        assert self.is_closed.wait(PATIENCE_S)
        raise RuntimeError("Application timeout caused pair closure")


def transfers_with(waiter: Waiter, *ranks: int) -> tuple[PairTransfers, dict[int, Work]]:
    works = {rank: Work() for rank in ranks}
    started: Any = {rank: [work] for rank, work in works.items()}
    return PairTransfers(waiter, started, {}, [], frozenset()), works


def test_connections_that_break_while_one_looks() -> None:
    """The thread says what has ended at any moment, also between two looks of a rank that lists what broke before."""
    transfers = PairTransfers(Waiter(), {rank: [] for rank in range(4)}, {}, [], frozenset())
    transfers.ended(0, "broke")
    for rank in transfers.broken:
        assert rank == 0
        transfers.ended(1, "broke too")
    for _ in transfers.pending:
        transfers.ended(2, None)
    assert transfers.pending == {3}
    assert transfers.broken == {0: "broke", 1: "broke too"}
    transfers.give_up([0, 3])
    assert not transfers.pending
    assert list(transfers.broken) == [1]


@pytest.mark.parametrize("end", [Waiter.close, lambda _: links._end_threads()], ids=["closed", "Python ends"])
def test_threads_that_ranks_hold_up_end(end: Callable[[Waiter], None]) -> None:
    """Those that nobody wants to hear of any more, and the one in their place."""
    waiter = Waiter()
    transfers, works = transfers_with(waiter, 1, 2)
    transfers.wait(0)
    assert works[1].is_waited_for.wait(PATIENCE_S)
    transfers.give_up([1])
    assert works[2].is_waited_for.wait(PATIENCE_S)
    threads = list(waiter._at)
    assert len(threads) == 2
    end(waiter)
    assert not any(thread.is_alive() for thread in threads)
    assert not waiter._at


def test_a_thread_with_nothing_to_do_ends() -> None:
    """And at once, since no wait must expire first."""
    waiter = Waiter()
    transfers, _ = transfers_with(waiter, 1)
    transfers._works[1] = []
    assert transfers.wait(PATIENCE_S)
    (thread,) = waiter._at
    waiter.close()
    assert not thread.is_alive()


def test_a_waiter_that_was_dropped_ends_with_python() -> None:
    """Its thread keeps it."""
    waiter = Waiter()
    transfers, works = transfers_with(waiter, 1)
    transfers.wait(0)
    assert works[1].is_waited_for.wait(PATIENCE_S)
    (thread,) = waiter._at
    del waiter, transfers
    gc.collect()
    links._end_threads()
    assert not thread.is_alive()


def test_a_thread_that_cannot_start() -> None:
    """Whoever waits hears of it, and the next wait has one. Else all ranks would seem to be late."""
    waiter = Waiter()
    try:
        error = RuntimeError("can't start new thread")
        with mock.patch.object(threading.Thread, "start", side_effect=error), pytest.raises(RuntimeError, match="new"):
            transfers_with(waiter, 1)[0].wait(0)
        transfers = PairTransfers(waiter, {2: []}, {}, [], frozenset())
        for task in list(waiter._tasks):
            task[0].break_off(task[1])
        assert transfers.wait(PATIENCE_S)
    finally:
        waiter.close()
