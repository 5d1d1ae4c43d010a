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
from tokenloom.runtime.links import Exchange, Waiter


class Transfer:
    """One of gloo with a rank that does not come: only a wait that expires ends the others."""

    def __init__(self) -> None:
        self.is_waited_for, self.is_closed = threading.Event(), threading.Event()

    def wait(self, limit: timedelta) -> None:
        self.is_waited_for.set()
        if limit < timedelta(seconds=1):
            self.is_closed.set()
        assert self.is_closed.wait(PATIENCE_S)
        raise RuntimeError("Application timeout caused pair closure")


def exchange_with(waiter: Waiter, *ranks: int) -> tuple[Exchange, dict[int, Transfer]]:
    transfers = {rank: Transfer() for rank in ranks}
    works: Any = {rank: [transfer] for rank, transfer in transfers.items()}
    return Exchange(waiter, works, {}, [], frozenset()), transfers


def test_connections_that_break_while_one_looks() -> None:
    """The thread says what has ended at any moment, also between two looks of a rank that lists what broke before."""
    exchange = Exchange(Waiter(), {rank: [] for rank in range(4)}, {}, [], frozenset())
    exchange.ended(0, "broke")
    for rank in exchange.broken:
        assert rank == 0
        exchange.ended(1, "broke too")
    for _ in exchange.pending:
        exchange.ended(2, None)
    assert exchange.pending == {3}
    assert exchange.broken == {0: "broke", 1: "broke too"}
    exchange.give_up([0, 3])
    assert not exchange.pending
    assert list(exchange.broken) == [1]


@pytest.mark.parametrize("end", [Waiter.close, lambda _: links._end_threads()], ids=["closed", "Python ends"])
def test_threads_that_ranks_hold_up_end(end: Callable[[Waiter], None]) -> None:
    """Those that nobody wants to hear of any more, and the one in their place."""
    waiter = Waiter()
    exchange, transfers = exchange_with(waiter, 1, 2)
    exchange.wait(0)
    assert transfers[1].is_waited_for.wait(PATIENCE_S)
    exchange.give_up([1])
    assert transfers[2].is_waited_for.wait(PATIENCE_S)
    threads = list(waiter._at)
    assert len(threads) == 2
    end(waiter)
    assert not any(thread.is_alive() for thread in threads)
    assert not waiter._at


def test_a_thread_with_nothing_to_do_ends() -> None:
    """And at once, since no wait must expire first."""
    waiter = Waiter()
    exchange, _ = exchange_with(waiter, 1)
    exchange._works[1] = []
    assert exchange.wait(PATIENCE_S)
    (thread,) = waiter._at
    waiter.close()
    assert not thread.is_alive()


def test_a_waiter_that_was_dropped_ends_with_python() -> None:
    """Its thread keeps it."""
    waiter = Waiter()
    exchange, transfers = exchange_with(waiter, 1)
    exchange.wait(0)
    assert transfers[1].is_waited_for.wait(PATIENCE_S)
    (thread,) = waiter._at
    del waiter, exchange
    gc.collect()
    links._end_threads()
    assert not thread.is_alive()


def test_a_thread_that_cannot_start() -> None:
    """Whoever waits hears of it, and the next wait has one. Else all ranks would seem to be late."""
    waiter = Waiter()
    try:
        error = RuntimeError("can't start new thread")
        with mock.patch.object(threading.Thread, "start", side_effect=error), pytest.raises(RuntimeError, match="new"):
            exchange_with(waiter, 1)[0].wait(0)
        exchange = Exchange(waiter, {2: []}, {}, [], frozenset())
        for transfer in list(waiter._tasks):
            transfer[0].break_off(transfer[1])
        assert exchange.wait(PATIENCE_S)
    finally:
        waiter.close()
