"""Groups that go on without ranks that do not come."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.runtime.test_masked_ranks import LONG_S, together
from tests.runtime.test_rank_group import (
    ALL,
    NOTICE_S,
    PAIR,
    TIMEOUT_S,
    GoneStore,
    Pools,
    call,
    in_time,
    on_group,
    open_call,
    run,
    send_rows,
)
from tests.support.patience import done, when_done
from tests.support.slow import mostly_slow
from tokenloom.runtime import membership, waiting
from tokenloom.runtime.links import Links
from tokenloom.runtime.processes import RankContext, RankFailed, RankPool
from tokenloom.runtime.rank_group import RankGroup

MASKED_S = TIMEOUT_S + membership.ROLL_CALL_S + waiting.LOOK_EVERY_S + 6.0
"""A rank that does not come is masked within its deadline, a roll call, a look, and what a busy machine needs."""


def begin_in_time(ranks: RankGroup) -> None:
    """Late ranks are masked from now on. Until here none is late, however busy the machine is."""
    with in_time(ranks):
        ranks.mask_late()
        together(ranks, ALL)


@pytest.mark.parametrize("late", mostly_slow([0, 2], [0]))
def test_late(pools: Pools, late: int) -> None:
    """The others mask it and go on, all with the same; it is told so when it comes."""
    seen = run(pools, ALL, check_late, late, late=[late])
    assert 0.9 * TIMEOUT_S < max(seen) < MASKED_S


def check_late(ranks: RankGroup, late: int) -> float:
    """Returns: how long this rank waited for the late one, in seconds."""
    begin_in_time(ranks)
    there = [rank for rank in ALL if rank != late]
    if ranks.rank == late:
        when_done(ranks, there)
        with pytest.raises(
            tl.CommunicatorBroken, match=rf"other ranks have masked rank {late}: rank \d waited in"
        ) as told:
            send_rows(ranks)
        assert f"no answer within {TIMEOUT_S:g} s" in str(told.value)
        with pytest.raises(tl.CommunicatorBroken):
            ranks.mask([1])
        return 0.0
    began = time.monotonic()
    assert open_call(ranks).flatten().tolist() == [rank if rank in there else 0 for rank in ALL]
    waited_s = time.monotonic() - began
    assert ranks.masked == {late}
    assert f"no answer within {TIMEOUT_S:g} s" in ranks.why_masked()[late]
    for _ in range(3):
        together(ranks, there)
    assert ranks.num_losses == 1, "nobody waits for it again"
    done(ranks)
    return waited_s


@on_group(ALL, late=[1])
def test_late_in_the_middle_of_a_call(ranks: RankGroup) -> None:
    """What it did not send is zero, with its name; what others sent at the same time is there."""
    ranks.mask_late()
    open_call(ranks)
    if ranks.rank == 1:
        when_done(ranks, [0, 2, 3])
        return
    rows = torch.full((4, 2), float(ranks.rank))
    first, second = (ranks.start_all_to_all(rows, [1] * 4, [1] * 4, "test") for _ in range(2))
    for transfer in (second, first):
        assert transfer.wait()[:, 0].tolist() == [0.0, 0.0, 2.0, 3.0]
        assert transfer.lost == {1}
    together(ranks, [0, 2, 3])
    done(ranks)


@on_group(ALL, late=[3])
def test_what_comes_behind_the_end(ranks: RankGroup) -> None:
    """A rank is held up when it begins a collective, and the others go on without it. What it sends then still
    arrives, but changes no result."""
    ranks.mask_late()
    open_call(ranks)
    others = [0, 1, 2]
    rows = torch.full((4, 2), float(ranks.rank))
    if ranks.rank == 3:
        real = Links.start

        def start(*arguments: Any) -> Any:
            when_done(ranks, others)
            return real(*arguments)

        with mock.patch.object(Links, "start", start):
            sent = ranks.start_all_to_all(rows, [1] * 4, [1] * 4, "test")
        time.sleep(0.5)  # what is on its way arrives
        done(ranks, "sent")
        when_done(ranks, others, "seen")
        del sent
        return
    result = ranks.start_all_to_all(rows, [1] * 4, [1] * 4, "test").wait()
    done(ranks)
    when_done(ranks, [3], "sent")
    assert result[:, 0].tolist() == [0.0, 1.0, 2.0, 0.0]
    done(ranks, "seen")


@on_group([0, 1, 2], timeout_s=LONG_S)
@pytest.mark.parametrize("how", ["dropped", "in vain"])
def test_transfers_that_nobody_waits_for(ranks: RankGroup, how: str) -> None:
    """What arrives for them does not stand in the way of later ones. One is in vain where ranks were lost before it:
    the others that began it did not know of that yet."""
    ranks.mask_late()
    call(ranks)

    def begin() -> None:
        with ranks.in_vain_after(0), pytest.raises(tl.PeerTimeout, match="the others go on without a rank"):
            open_call(ranks)

    if how == "dropped":
        if ranks.rank:
            when_done(ranks, [0])
        ranks.start_all_gather(torch.tensor([ranks.rank]), "test")
        done(ranks)
    elif ranks.rank == 0:
        when_done(ranks, [1], "lost")
        time.sleep(1.1 * waiting.LOOK_EVERY_S)  # it looks before it begins
        begin()
    elif ranks.rank == 1:
        when_done(ranks, [2], "begins")
        time.sleep(0.2)
        with mock.patch.object(membership.Membership, "roll_call", lambda _, absent: set(absent)):
            ranks.lose_absent("test", [])  # nobody is
        done(ranks, "lost")
    else:
        done(ranks, "begins")
        begin()
    if how == "in vain":
        ranks.settle_losses("test", "ended/0")
    began = time.monotonic()
    call(ranks)
    assert time.monotonic() - began < NOTICE_S


@on_group(ALL)
@pytest.mark.slow
def test_who_is_held_up_is_not_late(ranks: RankGroup) -> None:
    """A rank that waits for a late one itself is not masked with it, although others wait for both as long."""
    begin_in_time(ranks)
    if ranks.rank == 3:
        when_done(ranks, [0, 1, 2])
        return
    if ranks.rank == 2:  # only rank 2 waits for rank 3 in this step, and begins later than the others wait for both
        time.sleep(0.5 * TIMEOUT_S)
    receives = [0, 0, 0, 1] if ranks.rank == 2 else [0] * 4
    ranks.start_all_to_all(torch.zeros(0, 1), [0] * 4, receives, "test").wait()
    assert open_call(ranks).flatten().tolist() == [0, 1, 2, 0]
    assert ranks.masked == {3}
    done(ranks)


@on_group(ALL, timeout_s=LONG_S)
@pytest.mark.parametrize("how", ["close", "abort"])
def test_who_leaves_is_masked_at_once(ranks: RankGroup, how: str) -> None:
    """A rank that closes its communicator, or fails in the middle of a call, will not come."""
    begin_in_time(ranks)
    if ranks.rank == 0:
        ranks.close() if how == "close" else ranks.abort(ValueError("the test"))
        return
    began = time.monotonic()
    together(ranks, [1, 2, 3])
    assert time.monotonic() - began < NOTICE_S + 1.0


@on_group(ALL, timeout_s=LONG_S)
def test_several_one_after_the_other(ranks: RankGroup) -> None:
    """Until one rank is left, which goes on alone."""
    ranks.mask_late()
    for there in (ALL, [1, 2, 3], [1, 3], [3]):
        if ranks.rank not in there:
            ranks.close()
            return
        together(ranks, there)


@on_group(ALL, late=[0, 3])
@pytest.mark.slow
def test_two_at_once(ranks: RankGroup) -> None:
    """Whoever decides first masks one or both; in the end all agree."""
    begin_in_time(ranks)
    if ranks.rank in (0, 3):
        when_done(ranks, [1, 2])
        return
    together(ranks, [1, 2])
    assert ranks.masked == {0, 3}
    done(ranks)


@on_group(ALL, late=[2, 3])
@pytest.mark.slow
def test_a_mask_beside_a_late_rank(ranks: RankGroup) -> None:
    """Users mask a rank while only some know of another one that it is late, and mask both when they know."""
    begin_in_time(ranks)
    if ranks.rank > 1:
        when_done(ranks, [0, 1])
        return
    receives = [0, 0, ranks.rank == 0, 0]  # rank 0 alone waits for rank 2
    ranks.start_all_to_all(torch.zeros(0, 1), [0] * 4, receives, "test").wait()
    assert ranks.masked == ({2} if ranks.rank == 0 else set())
    ranks.mask([3])
    together(ranks, [0, 1])
    ranks.mask([2, 3])
    assert ranks.masked == {2, 3}
    assert ranks.why_masked()[3] == "mask_ranks"
    assert "no answer" in ranks.why_masked()[2]
    together(ranks, [0, 1])
    done(ranks)


# -- the rows of a rank that ends in a gather -------------------------------------------------------------------


def reaches(ranks: RankGroup, reached: Sequence[int]) -> Any:
    """What this rank starts reaches some ranks only."""
    real = Links.start

    def start(self: Links, waiter: Any, others: Any, parts: Any, places: Any, number: int) -> Any:
        parts = [part if rank in reached or rank == ranks.rank else part[:0] for rank, part in enumerate(parts)]
        return real(self, waiter, others, parts, places, number)

    return mock.patch.object(Links, "start", start)


@pytest.mark.parametrize("reached", [[0], [0, 1], []], ids=["one", "two", "nobody"])
def test_everybody_sees_the_same_rows(pools: Pools, reached: list[int]) -> None:
    """A rank that ends in a gather may have reached some ranks, which go on. The others learn its row from those, so
    that all mean the same call; who was not reached may not go on before."""
    seen = run(pools, ALL, check_same_rows, reached, timeout_s=LONG_S)
    assert seen[:3] == [[0, 1, 2, 3 if reached else 0]] * 3


def check_same_rows(ranks: RankGroup, reached: list[int]) -> list[int]:
    begin_in_time(ranks)
    if ranks.rank == 3:
        with reaches(ranks, reached):
            transfer = ranks.start_all_gather(torch.tensor([3]), "test")
            when_done(ranks, reached)
        ranks.close()
        del transfer
        return []
    rows = open_call(ranks).flatten().tolist()
    done(ranks)
    together(ranks, [0, 1, 2])
    return rows


def test_who_holds_a_row_may_end_too(pools: Pools) -> None:
    """Then nobody else has it, and those that are left agree."""
    seen = run(pools, ALL, check_holder_ends, timeout_s=LONG_S)
    assert seen[1] == seen[2]


def check_holder_ends(ranks: RankGroup) -> list[int]:
    begin_in_time(ranks)
    if ranks.rank == 3:
        with reaches(ranks, [0]):
            transfer = ranks.start_all_gather(torch.tensor([3]), "test")
            when_done(ranks, [0])
        ranks.close()
        del transfer
        return []
    rows = open_call(ranks).flatten().tolist()
    done(ranks)
    if ranks.rank == 0:
        assert rows == [0, 1, 2, 3]
        ranks.close()
        return []
    together(ranks, [1, 2])
    return rows


# -- ranks that die ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.8], ids=["at once", "while others wait"])
def test_dead_process(delay_s: float) -> None:
    """The others go on within a second or two, long before a deadline."""
    heard: list[tuple[int, float]] = []
    with RankPool(4) as pool:
        with pytest.raises(RankFailed, match="exit code 7") as failed:
            pool.run(check_death, 2, delay_s, on_event=heard.append)
        assert failed.value.rank == 2
    assert sorted(rank for rank, _ in heard) == [0, 1, 3]
    assert max(waited_s for _, waited_s in heard) < delay_s + NOTICE_S + 1.0


def check_death(context: RankContext, dying: int, delay_s: float) -> None:
    ranks = RankGroup(context.group, timeout_s=60.0)
    begin_in_time(ranks)
    if context.rank == dying:
        time.sleep(delay_s)
        os._exit(7)
    began = time.monotonic()
    together(ranks, [0, 1, 3])
    context.report((context.rank, time.monotonic() - began))
    together(ranks, [0, 1, 3])
    ranks.close()


@on_group(PAIR, late=[1])
@pytest.mark.slow
def test_store_is_gone(ranks: RankGroup) -> None:
    """Nobody can agree any more, so a rank that does not come is an error; without one all goes on."""
    ranks.mask_late()
    call(ranks)
    ranks.notes._store = GoneStore()
    call(ranks)
    if ranks.rank == 1:
        time.sleep(TIMEOUT_S + 1.5)
        return
    with pytest.raises(tl.PeerTimeout, match="hosts the store of the process group is gone") as timeout:
        open_call(ranks)
    assert timeout.value.peers == (1,)
    with pytest.raises(tl.CommunicatorBroken):
        open_call(ranks)


@on_group(PAIR, late=[1])
@pytest.mark.slow
def test_the_store_is_left_clean(ranks: RankGroup) -> None:
    """The last of those that stay deletes all but what tells a masked rank that it is masked, however late."""
    store, prefix = ranks.notes.store, ranks.notes.key("")
    ranks.mask_late()
    call(ranks)
    if ranks.rank == 1:
        while not store.check(["the test is over"]):
            time.sleep(0.1)
        with pytest.raises(tl.CommunicatorBroken, match="have masked rank 1"):
            call(ranks)
        return
    together(ranks, [0])
    ranks.mask([1])
    ranks.close()
    left = [key.partition(prefix)[2] for key in store.list_keys() if prefix in key]
    assert sorted(left) == ["change/1/0", "loss/1"]
    store.set("the test is over", "")
