"""Servers on GPUs, of which one process is killed: the others make all of their calls, and lose the routes to it."""

from __future__ import annotations

import os
import random
import signal
import time
from multiprocessing.connection import Connection

import pytest

from tests.backends.test_nvlink_late_ranks import serve
from tests.backends.test_nvlink_masks import same_step
from tests.conftest import Ranks
from tests.support.cases import make_comm
from tests.support.graph_cases import EXPERT, ROUNDS, Captured, Step, plan_of
from tests.support.server import Server
from tokenloom.runtime.processes import RankContext

pytestmark = [pytest.mark.alone, pytest.mark.gpu, pytest.mark.usefixtures("own_gpus")]

BACKEND = "nvlink"
START_S, END_S = 180.0, 240.0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_in_the_middle_of_10000_calls(several: Ranks, how: signal.Signals) -> None:
    """At some moment, whatever its kernels and its host do: the others all lose it in the same call."""
    num_pairs, victim = 5000, several.num_ranks - 1
    with Server(several.num_ranks, serve_calls, num_pairs) as server:
        server.hear(victim, "half", START_S)
        time.sleep(random.random() * 0.05)
        os.kill(server.processes[victim].pid, how)
        histories = [server.hear(rank, "returned", END_S) for rank in range(several.num_ranks) if rank != victim]
        server.processes[victim].kill()  # a stopped one would not end; one that has ended may be gone
    assert all(history == histories[0] for history in histories)
    assert histories[0][0] == []
    assert histories[0][-1] == [victim]
    assert len(histories[0]) == 2 * num_pairs


def serve_calls(context: RankContext, pipe: Connection, num_pairs: int) -> list[list[int]]:
    def report(rank: int, number: int) -> None:
        if number == num_pairs // 2:
            pipe.send(("half", number))

    return serve(context, num_pairs, report, timeout_s=5.0)


def test_graphs_go_on(several: Ranks) -> None:
    """Between replays: all that are left mask the dead rank, and replay the graphs that they captured with it."""
    victim = 0
    with Server(several.num_ranks, replay, victim) as server:
        for rank in range(several.num_ranks):
            server.hear(rank, "ready", START_S)
        os.kill(server.processes[victim].pid, signal.SIGKILL)
        server.processes[victim].join()
        left = [rank for rank in range(several.num_ranks) if rank != victim]
        for rank in left:
            server.pipes[rank].send("it is gone")
        for rank in left:
            server.hear(rank, "returned", END_S)


def replay(context: RankContext, pipe: Connection, victim: int) -> None:
    comm = make_comm(context, BACKEND, plan_of(context.num_ranks), checked=False)
    step = Step(context, comm, EXPERT)
    graph = Captured(step)
    for _ in range(100):
        graph.replay()
    same_step(context, step, graph.results, ROUNDS[0], [])
    comm.check()
    pipe.send(("ready", None))
    assert pipe.recv() == "it is gone"
    comm.mask_ranks([victim])
    for _ in range(1000):
        graph.replay()
    same_step(context, step, graph.results, ROUNDS[0], [victim])
    comm.check()
    comm.close()
