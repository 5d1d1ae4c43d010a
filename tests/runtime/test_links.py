"""Transfers between pairs of ranks, as the thread that waits for them and its users see them."""

from __future__ import annotations

from tokenloom.runtime.links import Exchange, Waiter


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
