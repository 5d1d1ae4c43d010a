"""Servers on GPUs, of which one process is killed: the others make all of their calls, and lose the routes to it."""

from __future__ import annotations

import os
import random
import signal
import time
from multiprocessing.connection import Connection

import pytest

import tokenloom as tl
from tests.backends.test_nvlink_late_ranks import serve
from tests.backends.test_nvlink_masks import same_step
from tests.conftest import Ranks
from tests.support.cases import make_comm
from tests.support.graph_cases import EXPERT, ROUNDS, SLOTS, Captured, Kind, Step, plan_of
from tests.support.server import Server
from tokenloom.runtime.processes import RankContext

pytestmark = [pytest.mark.alone, pytest.mark.gpu]

BACKEND = "nvlink"
START_S, END_S = 180.0, 240.0
TIMEOUT_S = 5.0


def number_of(ranks: Ranks, calls: int) -> int:
    """So many, or fewer where ranks take turns on a GPU."""
    return calls // 50 if ranks.shares_gpus else calls


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_in_the_middle_of_10000_calls(several: Ranks, how: signal.Signals) -> None:
    """At some moment, whatever its kernels and its host do: the others all lose it in the same call."""
    num_pairs, victim = number_of(several, 5000), several.num_ranks - 1
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

    return serve(context, num_pairs, report, timeout_s=TIMEOUT_S)


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


@pytest.mark.parametrize("kind", [EXPERT, SLOTS], ids=lambda kind: kind.name)
def test_lost_in_a_replay(several: Ranks, kind: Kind) -> None:
    """Whatever its kernels do: the others all hear of it behind the same replay, and replay again without it."""
    num_replays, victim = number_of(several, 5000), several.num_ranks - 1
    with Server(several.num_ranks, replay_on, kind, num_replays) as server:
        server.hear(victim, "half", START_S)
        time.sleep(random.random() * 0.05)
        os.kill(server.processes[victim].pid, signal.SIGKILL)
        histories = [server.hear(rank, "returned", END_S) for rank in range(victim)]
    assert all(history == histories[0] for history in histories)
    assert [rank for rank, _ in histories[0]] == [victim]


def replay_on(context: RankContext, pipe: Connection, kind: Kind, num_replays: int) -> list[tuple[int, int]]:
    """Who was lost, and in which replay."""
    plan = plan_of(context.num_ranks)
    comm = make_comm(context, BACKEND, plan, on_timeout="mask", timeout_s=TIMEOUT_S, checked=False)
    step, lost = Step(context, comm, kind), list[tuple[int, int]]()
    graph = Captured(step)
    for number in range(num_replays):
        if number == num_replays // 2:
            pipe.send(("half", number))
        graph.replay()
        try:
            comm.check()
        except tl.PeerError as error:
            lost.append((error.rank, number))
            graph.replay()
            comm.check()
        if number % 10 == 0 or lost:
            same_step(context, step, graph.results, ROUNDS[0], [rank for rank, _ in lost])
    step()
    comm.close()
    return lost
