"""A rank has made a communicator that failed, which the others have not: behind that all find each other all the same.

Where late ranks are masked, those that look for each other under different names would mask each other, in silence.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch

import tokenloom as tl
from tests.comm.test_first_messages import dispatch, make_comm
from tests.runtime.test_interrupted_waits import at_once
from tests.support.on_ranks import on_ranks
from tests.support.server import LIMIT_S, Server
from tokenloom.comm.communicators_by_shape import CommShape, Communicators
from tokenloom.runtime.processes import RankContext

NUM_RANKS, ODD = 3, 1
MASK: dict[str, Any] = {"on_timeout": "mask", "timeout_s": 10.0}


@on_ranks("new_three")
def test_a_new_shape_is_made_by_all(context: RankContext) -> None:
    communicators = Communicators(context.group, lambda: MASK)

    def call(hidden: int) -> frozenset[int]:
        ids = torch.arange(8).view(4, 2) % NUM_RANKS

        def make(comm: tl.Communicator) -> frozenset[int]:
            comm.dispatch(torch.ones(4, hidden), ids, layout="token")
            return frozenset(comm.masked_ranks())

        return communicators.run(CommShape(NUM_RANKS, hidden, 2), 4, context.device, make)

    assert call(8) == frozenset()
    at_once(lambda: make_comm(context) if context.rank == ODD else call(8), tl.PlanMismatch)
    assert call(16) == frozenset()


def test_a_group_that_came_apart_goes_on_by_pairs() -> None:
    with Server(NUM_RANKS, check_by_pairs, device="cpu") as server:
        for rank in (rank for rank in range(NUM_RANKS) if rank != ODD):
            server.hear(rank, "timed out", LIMIT_S)
        server.pipes[ODD].send("go on")
        server.hear_all("returned", LIMIT_S)


def check_by_pairs(context: RankContext, pipe: Connection) -> None:
    comm = make_comm(context)
    dispatch(comm)
    comm._ranks.open_timeout_s = 0.5
    if context.rank == ODD:
        pipe.recv()
        at_once(lambda: make_comm(context), tl.CommunicatorBroken)
    else:
        at_once(lambda: dispatch(comm), tl.PeerTimeout)
        pipe.send(("timed out", None))
    pairs = make_comm(context, **MASK)
    dispatch(pairs)
    assert pairs.masked_ranks() == []
