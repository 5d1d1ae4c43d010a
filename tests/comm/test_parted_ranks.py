"""Ranks that wait for each other in calls of different communicators, on connections where nothing tells them.

Where late ranks are masked, a rank that is alive and waits elsewhere is not late: all hear who waits where, and go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.comm.test_first_messages import MAKERS, ORDER, dispatch, make_comm, works
from tests.support.on_ranks import on_ranks
from tests.support.server import NewRanks
from tests.support.slow import mostly_slow
from tokenloom.runtime.processes import RankContext

TIMEOUT_S = 20.0
"""What ranks would wait before they mask each other; nobody may."""
MASK: dict[str, Any] = {"on_timeout": "mask", "timeout_s": TIMEOUT_S}
WHERE = r"rank \d has communicator=tokenloom/(?:left/)?\d+ \(.*\)"
WHO_AND_WHERE = f"{WHERE}, {WHERE}; {ORDER}"


def all_hear(call: Callable[[], Any]) -> None:
    began = time.monotonic()
    with pytest.raises(tl.PlanMismatch, match=WHO_AND_WHERE):
        call()
    assert time.monotonic() - began < TIMEOUT_S


@on_ranks("new_four")
@pytest.mark.slow
def test_two_that_mask(context: RankContext) -> None:
    comms = [make_comm(context, 2, **MASK), make_comm(context, 8, **MASK)]
    works(*comms)
    for odd in (0, 2):
        for comm in comms if context.rank != odd else reversed(comms):
            all_hear(lambda comm=comm: dispatch(comm))
        works(*comms)
    all_hear(lambda: dispatch(comms[context.rank == 3]))
    works(*comms)
    assert [comm.masked_ranks() for comm in comms] == [[], []]


def test_behind_a_loss(new_four: NewRanks) -> None:
    """The process group can make no collective any more: a member is gone."""
    assert new_four.run(check_behind_a_loss)[:3] == [[[3], [3]]] * 3


def check_behind_a_loss(context: RankContext) -> list[list[int]] | None:
    comms = [make_comm(context, 2, **MASK), make_comm(context, 8, **MASK)]
    works(*comms)
    if context.rank == 3:
        for comm in comms:
            comm.close()
        return None
    for comm in comms:
        dispatch(comm)
    for comm in comms if context.rank else reversed(comms):
        all_hear(lambda comm=comm: dispatch(comm))
    for comm in comms:
        routed = dispatch(comm)
        assert torch.isfinite(comm.combine(routed.tokens, routed)).all()
    return [comm.masked_ranks() for comm in comms]


@on_ranks("new_four")
@pytest.mark.slow
def test_ranks_that_users_mask(context: RankContext) -> None:
    """Without on_timeout="mask" they would wait as long as a call may take to open."""
    comms = [make_comm(context, 2), make_comm(context, 8)]
    if context.rank == 3:
        return
    for comm in comms:
        comm.mask_ranks([3])
        dispatch(comm)
    for comm in comms if context.rank else reversed(comms):
        all_hear(lambda comm=comm: dispatch(comm))
    for comm in comms:
        dispatch(comm)


@on_ranks("new_four")
@pytest.mark.parametrize("odd", mostly_slow([0, 2], [0]))
def test_one_that_masks_and_one_that_does_not(context: RankContext, odd: int) -> None:
    """Calls of one are collectives of the process group, where the others join to say why they do not come."""
    comms = [make_comm(context, 2, **MASK), make_comm(context, 8)]
    works(*comms)
    for _ in range(2):
        all_hear(lambda: dispatch(comms[context.rank == odd]))
        works(*comms)
        all_hear(lambda: dispatch(comms[context.rank != odd]))
        works(*comms)


@on_ranks("new_four")
@pytest.mark.parametrize("what", mostly_slow(list(MAKERS), ["Communicator"]))
def test_one_rank_makes_something(context: RankContext, what: str) -> None:
    comm = make_comm(context, **MASK)
    works(comm)
    for odd in (1, 0):
        all_hear(lambda odd=odd: MAKERS[what](context) if context.rank == odd else dispatch(comm))
        works(comm)
    assert comm.masked_ranks() == []
    works(comm, make_comm(context, 3), make_comm(context, 5, **MASK))


@on_ranks("new_four")
def test_a_rank_that_comes_later(context: RankContext) -> None:
    """It hears of it in its next call, and is in step again with those that did not wait for it."""
    comms = [make_comm(context, 2, **MASK), make_comm(context, 8, **MASK)]
    notes = comms[0].engine.ranks.notes
    works(*comms)
    if context.rank == 3:
        while notes.hear_at("the others know") != 3:
            time.sleep(0.05)
    all_hear(lambda: dispatch(comms[context.rank == 0]))
    if context.rank != 3 and notes.call("add", "how many know", 1) == 3:
        notes.say_at("the others know", 3)
    works(*comms)
    assert [comm.masked_ranks() for comm in comms] == [[], []]
