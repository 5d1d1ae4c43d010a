"""Processes that a test may kill or stop: one for each rank of a group, and the store is the test's own."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from tokenloom import env
from tokenloom.runtime.processes import RankContext

LIMIT_S = 90.0


def rank_main(
    body: Callable[..., Any], rank: int, num_ranks: int, device: str, port: int, pipe: Connection, args: Any
) -> None:
    """Run ``body(context, pipe, *args)`` as a rank, and say what it returns, or how it failed."""
    try:
        own_device = torch.device(device)
        if device == "cuda":
            own_device = torch.device(device, rank % torch.cuda.device_count())
            torch.cuda.set_device(own_device)
            if num_ranks > torch.cuda.device_count():
                env.appear_as_a_host(f"host {rank}")  # NCCL refuses two ranks of one host on one GPU
        else:
            torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
        context = RankContext(rank, num_ranks, dist.group.WORLD, own_device, None)  # type: ignore[arg-type]
        pipe.send(("returned", body(context, pipe, *args)))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
    os._exit(0)  # NCCL may wait for the dead rank


class Server:
    """Processes of ranks, which talk to the test.

    Args:
        num_ranks: how many.
        body: ``body(context, pipe, *args)`` of each; what it sends are pairs of a word and a value.
        device: "cuda", one GPU each as long as there are some, or "cpu".
    """

    def __init__(self, num_ranks: int, body: Callable[..., Any], *args: Any, device: str = "cuda") -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes = multiprocessing.get_context("forkserver")  # see forked_ranks in conftest.py
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(num_ranks):
            ours, theirs = processes.Pipe()
            main_args = (body, rank, num_ranks, device, self._store.port, theirs, args)
            process: Any = processes.Process(target=rank_main, args=main_args, daemon=True)  # type: ignore[attr-defined]
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

    def hear_all(self, word: str, limit_s: float) -> list[Any]:
        """What each rank says with this word. The first that fails ends the wait: others may wait for it in vain."""
        deadline = time.monotonic() + limit_s
        heard: dict[int, Any] = {}
        while awaited := {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in heard}:
            ready = wait(list(awaited), max(0.0, deadline - time.monotonic()))
            assert ready, f"rank(s) {sorted(awaited.values())} have not said {word!r} within {limit_s:g} s"
            for pipe in ready:
                rank = awaited[pipe]  # type: ignore[index]
                said, value = self.pipes[rank].recv()
                assert said != "failed", f"rank {rank}: {value}"
                if said == word:
                    heard[rank] = value
        return [heard[rank] for rank in range(len(self.pipes))]

    def hear(self, rank: int, word: str, limit_s: float) -> Any:
        """What the rank says with this word; it may say others before."""
        deadline = time.monotonic() + limit_s
        while wait([self.pipes[rank]], max(0.0, deadline - time.monotonic())):
            said, value = self.pipes[rank].recv()
            assert said != "failed", f"rank {rank}: {value}"
            if said == word:
                return value
        raise AssertionError(f"rank {rank} has not said {word!r} within {limit_s:g} s")


class NewRanks:
    """A group for tests that may end a process: each run has processes of its own, over gloo.

    Args:
        num_ranks: how many.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def run(self, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S) -> list[Any]:
        """``function(context, *args)`` on each rank, all of which return; results by rank."""
        with Server(self.num_ranks, _without_pipe, function, args, device="cpu") as server:
            return server.hear_all("returned", limit_s)


def _without_pipe(context: RankContext, _: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(context, *args)
