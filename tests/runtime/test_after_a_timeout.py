"""Behind a timeout the ranks of a process group have come to different collectives, which match no more.

Over gloo a message of another length than the receiver awaits would end its process. So every rank is told to make a
new process group, whichever communicator it calls or makes next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch.distributed as dist

import tokenloom as tl
from tests.comm.test_first_messages import dispatch, make_comm, works
from tests.runtime.test_interrupted_waits import LIMIT_S, NUM_RANKS, ODD, at_once
from tests.support.on_ranks import on_ranks
from tests.support.server import Server
from tests.support.slow import mostly_slow
from tokenloom.runtime import waiting
from tokenloom.runtime.processes import RankContext

SHORT_S = 0.5
OTHERS: dict[str, Any] = {"timeout_s": 30.0, "open_timeout_s": 30.0}
"""Of communicators whose ranks are told, or would wait this long."""


@pytest.mark.parametrize("late_rank", mostly_slow(["calls late", "calls another", "makes another"], ["calls late"]))
def test_all_ranks_make_a_new_process_group(late_rank: str) -> None:
    with Server(NUM_RANKS, check_told, late_rank, device="cpu") as server:
        for rank in (rank for rank in range(NUM_RANKS) if rank != ODD):
            server.hear(rank, "timed out", LIMIT_S)
        server.pipes[ODD].send("go on")
        server.hear_all("returned", LIMIT_S)


def check_told(context: RankContext, pipe: Connection, late_rank: str) -> None:
    other, comm = make_comm(context, 2, **OTHERS), make_comm(context, **OTHERS | {"open_timeout_s": SHORT_S})
    works(other)
    works(comm)
    if context.rank != ODD:
        missed = at_once(lambda: dispatch(comm), tl.PeerTimeout)
        assert "make a new process group, and a communicator on it" in str(missed)
        pipe.send(("timed out", None))
    else:
        pipe.recv()
        if late_rank == "calls late":
            at_once(lambda: dispatch(comm), tl.PeerTimeout)
        elif late_rank == "calls another":
            told = at_once(lambda: dispatch(other), tl.CommunicatorBroken)
            assert "has waited in vain in the handshake of dispatch; make a new process group" in str(told)
    for call in (lambda: make_comm(context, **OTHERS), lambda: dispatch(other)):
        assert "make a new process group" in str(at_once(call, tl.CommunicatorBroken))
    context.group = dist.new_group(list(range(NUM_RANKS)))
    works(make_comm(context))


@on_ranks("new_three")
@pytest.mark.slow
def test_pairs_go_on(context: RankContext) -> None:
    """They use no collective of the group, however long one of them takes."""
    by_pairs, late, other = (make_comm(context, open_timeout_s=limit_s) for limit_s in (30.0, SHORT_S, 30.0))
    works(by_pairs, late, other)
    if context.rank == 2:
        return
    by_pairs.mask_ranks([2])
    at_once(lambda: dispatch(late), tl.PeerTimeout)
    calls: list[Callable[[], object]] = [
        lambda: dispatch(by_pairs),
        lambda: other.mask_ranks([2]),
        lambda: dispatch(other),
    ]
    for call in calls:
        if context.rank == 1:
            time.sleep(3 * waiting.LOOK_EVERY_S)  # the other one looks meanwhile
        call()
