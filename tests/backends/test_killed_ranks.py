"""Servers on GPUs, of which one process is killed: the others make all of their calls, and lose the routes to it."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.backends.test_nvlink_late_ranks import serve
from tests.backends.test_nvlink_masks import same_step
from tests.conftest import Ranks
from tests.support.cases import make_comm
from tests.support.graph_cases import EXPERT, ROUNDS, Captured, Step, plan_of
from tokenloom.runtime.processes import RankContext

pytestmark = [pytest.mark.alone, pytest.mark.gpu]

BACKEND = "nvlink"
START_S, END_S = 180.0, 240.0


@pytest.fixture
def group(hoppers: Ranks) -> Ranks:
    """Groups in which somebody can be missing. Their processes have nothing to do here, but wait."""
    if hoppers.num_ranks == 1:
        pytest.skip("a rank alone has nobody to lose")
    return hoppers


def rank_main(body: Callable[..., Any], rank: int, num_ranks: int, port: int, pipe: Connection, args: Any) -> None:
    """Run ``body(context, pipe, *args)`` on a GPU, and say what it returns, or how it failed."""
    try:
        torch.cuda.set_device(rank)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=num_ranks)
        context = RankContext(rank, num_ranks, dist.group.WORLD, torch.device("cuda", rank), None)  # type: ignore[arg-type]
        pipe.send(("returned", body(context, pipe, *args)))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
    os._exit(0)  # NCCL may wait for the dead rank


class Server:
    """Processes, one on each GPU. The store is this process's."""

    def __init__(self, num_ranks: int, body: Callable[..., Any], *args: Any) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        spawn = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(num_ranks):
            ours, theirs = spawn.Pipe()
            main_args = (body, rank, num_ranks, self._store.port, theirs, args)
            process = spawn.Process(target=rank_main, args=main_args, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def hear(self, rank: int, word: str, limit_s: float) -> Any:
        """What the rank says with this word, or a later call's number."""
        deadline = time.monotonic() + limit_s
        while wait([self.pipes[rank]], max(0.0, deadline - time.monotonic())):
            said, value = self.pipes[rank].recv()
            assert said != "failed", f"rank {rank}: {value}"
            if said == word:
                return value
        raise AssertionError(f"rank {rank} has not said {word!r} within {limit_s:g} s")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_in_the_middle_of_10000_calls(group: Ranks, how: signal.Signals) -> None:
    """At some moment, whatever its kernels and its host do: the others all lose it in the same call."""
    num_pairs, victim = 5000, group.num_ranks - 1
    with Server(group.num_ranks, serve_calls, num_pairs) as server:
        server.hear(victim, "half", START_S)
        time.sleep(random.random() * 0.05)
        os.kill(server.processes[victim].pid, how)
        histories = [server.hear(rank, "returned", END_S) for rank in range(group.num_ranks) if rank != victim]
        os.kill(server.processes[victim].pid, signal.SIGKILL)
    assert all(history == histories[0] for history in histories)
    assert histories[0][0] == []
    assert histories[0][-1] == [victim]
    assert len(histories[0]) == 2 * num_pairs


def serve_calls(context: RankContext, pipe: Connection, num_pairs: int) -> list[list[int]]:
    def report(rank: int, number: int) -> None:
        if number == num_pairs // 2:
            pipe.send(("half", number))

    return serve(context, num_pairs, report, timeout_s=5.0)


def test_graphs_go_on(group: Ranks) -> None:
    """Between replays: all that are left mask the dead rank, and replay the graphs that they captured with it."""
    victim = 0
    with Server(group.num_ranks, replay, victim) as server:
        for rank in range(group.num_ranks):
            server.hear(rank, "ready", START_S)
        os.kill(server.processes[victim].pid, signal.SIGKILL)
        server.processes[victim].join()
        left = [rank for rank in range(group.num_ranks) if rank != victim]
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
