"""MegaMoE with on_timeout="mask" on GPUs, of which one process is killed or stopped; and graphs from before a return.

Ranks may share GPUs: `TOKENLOOM_TEST_RANKS=4`.
"""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.conftest import Ranks
from tests.inference.test_late_mega import STAGES, both, make_all
from tests.support.graph_cases import Captured
from tests.support.on_ranks import on_ranks
from tests.support.server import Server
from tokenloom.runtime.processes import RankContext

pytestmark = [pytest.mark.alone, pytest.mark.gpu]

TIMEOUT_S = 10.0
"""Ranks that share a GPU take turns on it."""
START_S, END_S = 240.0, 120.0
NUM_CALLS = 600
"""In the middle of which a process is killed or stopped."""


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("name", "which"), [("block", "all"), ("row", "some"), ("padded", "none")])
def test_killed_at_every_stage(several: Ranks, name: str, which: str, stage: str) -> None:
    """Between two calls, or as soon as one of its kernels is launched: the call that is hit, and all later ones, have
    the bits and the counts of a layer that has masked the rank before."""
    victim = several.num_ranks - 1
    with Server(several.num_ranks, lose, victim, name, which, stage) as server:
        server.hear(victim, "dies", START_S)
        for rank in range(victim):
            assert server.hear(rank, "returned", END_S) == [victim]


def lose(context: RankContext, pipe: Connection, victim: int, name: str, which: str, stage: str) -> list[int]:
    wanted = make_all(context, name, which, both(context, victim))

    def die(name: str) -> None:
        if name == stage:
            pipe.send(("dies", None))
            os.kill(os.getpid(), signal.SIGKILL)

    mega = wanted.make(on_timeout="mask", timeout_s=TIMEOUT_S)
    for _ in range(10):
        wanted.require(mega, [], ("",))
    graph = Captured(lambda: mega(*wanted.given))
    graph.replay()
    mega.check()
    assert torch.equal(graph.results, wanted.by_masked[()])
    if context.rank == victim:
        die("")
        mega.after_stage = die
        mega(*wanted.given)
        raise AssertionError(f"there is no stage {stage!r}")
    for _ in range(10):
        wanted.require(mega, [victim])
    for _ in range(10):
        graph.replay()
        mega.check()
        assert torch.equal(graph.results, wanted.by_masked[victim,])
    wanted.require(mega, [victim])
    mega.check()
    return mega.comm.masked_ranks()


@pytest.mark.parametrize(("name", "which"), [("block", "all"), ("row", "none")])
def test_killed_in_a_replay(several: Ranks, name: str, which: str) -> None:
    """What waits for the rank gives NaN, and the check says so on all ranks that are left. The graph goes on without
    the rank, with replicas of its experts."""
    victim = several.num_ranks - 1
    with Server(several.num_ranks, replay, name, which) as server:
        server.hear(victim, "half", START_S)
        time.sleep(0.02)
        os.kill(server.processes[victim].pid, signal.SIGKILL)
        again = [server.hear(rank, "returned", END_S) for rank in range(victim)]
    assert all(each == again[0] for each in again)
    assert [rank for rank, _ in again[0]] == [victim]


def replay(context: RankContext, pipe: Connection, name: str, which: str) -> list[tuple[int, int]]:
    """Replay with a check behind each; who was lost, and in which replay."""
    victim = context.num_ranks - 1
    wanted = make_all(context, name, which, both(context, victim))
    mega = wanted.make(on_timeout="mask", timeout_s=TIMEOUT_S)
    lost: list[tuple[int, int]] = []
    graph = Captured(lambda: mega(*wanted.given))
    for number in range(NUM_CALLS):
        if number == NUM_CALLS // 2:
            pipe.send(("half", None))
        graph.replay()
        try:
            mega.check()
        except tl.PeerError as error:
            lost.append((error.rank, number))
            graph.replay()
            mega.check()
        assert torch.equal(graph.results, wanted.by_masked[(victim,) if lost else ()]), number
    wanted.require(mega, [victim])
    return lost


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_lost_at_some_moment(several: Ranks, how: signal.Signals) -> None:
    """Whatever its kernels and its host do: each call is whole on all others, or without it on all of them."""
    victim = 0
    with Server(several.num_ranks, serve, victim) as server:
        server.hear(victim, "half", START_S)
        time.sleep(0.05)
        os.kill(server.processes[victim].pid, how)
        histories: list[Any] = [server.hear(rank, "returned", END_S) for rank in range(1, several.num_ranks)]
        server.processes[victim].kill()  # a stopped one would not end
    for of_call in zip(*histories, strict=True):
        assert len({which for which in of_call if which != "either"}) <= 1


def serve(context: RankContext, pipe: Connection, victim: int) -> list[str]:
    wanted = make_all(context, "block", "none", both(context, victim))
    whole, rest = wanted.by_masked[()], wanted.by_masked.get((victim,), wanted.by_masked[()])
    history: list[str] = []
    mega = wanted.make(on_timeout="mask", timeout_s=TIMEOUT_S)
    for number in range(NUM_CALLS):
        if number == NUM_CALLS // 2:
            pipe.send(("half", None))
        before = mega.comm.masked_ranks()
        out = mega(*wanted.given)
        is_whole, is_rest = torch.equal(out, whole), torch.equal(out, rest)
        assert is_whole or is_rest
        assert is_rest or not before, "it was lost before"
        history.append("either" if is_whole and is_rest else "whole" if is_whole else "rest")
    wanted.require(mega, [victim])
    return history


@on_ranks("several")
def test_graphs_from_before(context: RankContext) -> None:
    """They leave the rank out still, in memory of their own, between calls that have it again."""
    gone = 0
    wanted = make_all(context, "row", "no placement", both(context, gone))
    mega = wanted.make()
    graph = Captured(lambda: mega(*wanted.given))
    graph.replay()
    assert torch.equal(graph.results, wanted.by_masked[()])
    mega.check()
    if context.rank == gone:
        del graph
        mega.close()
        mega = wanted.make(rejoin=True)
        wanted.require(mega, [], ("", ""))
    else:
        mega.comm.mask_ranks([gone])
        graph.replay()
        assert torch.equal(graph.results, wanted.by_masked[gone,])
        mega.comm.unmask_ranks([gone])
        for _ in range(2):
            wanted.require(mega, [], ("",))
            graph.results.zero_()
            graph.replay()
            assert torch.equal(graph.results, wanted.by_masked[gone,])
    again = Captured(lambda: mega(*wanted.given))
    again.replay()
    assert torch.equal(again.results, wanted.by_masked[()])
    mega.check()
    mega.close()
