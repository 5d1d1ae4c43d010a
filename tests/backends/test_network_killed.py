"""Backend "network" over gloo when processes are killed or stopped in the middle of a call, or while one is made.

Ranks halt before a transfer, and tell the test, which waits until all have come there before it ends some. So what
they were doing is known, on a busy machine too. Those that are left are asked for as long as they may need to answer.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.backends.test_network_faults import CASE
from tests.support.cases import make_comm, make_problem
from tests.support.patience import PATIENCE_S, only_late
from tests.support.server import Server
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.rank_group import RankGroup

EXPERIMENTAL = True

pytestmark = pytest.mark.slow

KILLED, STOPPED = signal.SIGKILL, signal.SIGSTOP
NUM_RANKS = 4
LONG_S = 300.0
"""A deadline that must not pass. A killed process is noticed by its connections, long before."""
DEADLINE_S = 3.0
"""Where somebody is stopped, of the waits for that one alone: nothing else tells that it is gone."""
ARRIVE_S = 2.0
"""What is on its way arrives. Where it does not, a test finds the same as without."""
NOTICE_S = 3 * PATIENCE_S
"""What ranks take beyond a deadline: looks and a roll call, and whatever else the machine does."""
START_S, END_S = 180.0, 240.0
MAKING = {1: "making a Communicator", 3: "making a backend"}
"""Transfers while a communicator is made: the first of each phase."""
STEP = {
    1: "the handshake of dispatch",
    2: "dispatch, between nodes",
    3: "dispatch, inside nodes",
    4: "the handshake of combine",
    5: "combine, inside nodes",
    6: "combine, sums, between nodes",
    7: "the handshake of rows again",
    10: "the handshake of combine",
    12: "combine, partial sums, between nodes",
    13: "the handshake of gradient of weights",
    15: "dispatch, gradient of weights, between nodes",
}
"""Transfers of a dispatch, a combine with sums per node, and their gradients: one for each phase at least."""


@dataclass(frozen=True)
class Loss:
    """Who is lost, and when.

    Attributes:
        dead: ranks that are killed or stopped.
        how: KILLED or STOPPED.
        transfer: they have not begun this one.
        making: it is one of making the communicator, else of a step of training.
    """

    dead: tuple[int, ...]
    how: signal.Signals
    transfer: int
    making: bool = False


@dataclass(frozen=True)
class Told:
    """What a rank was told: attributes of its PeerTimeout, and when it came."""

    rank: int
    peers: tuple[int, ...]
    nodes: tuple[int, ...]
    phase: str
    epoch: int
    text: str
    after_s: float


by_how = pytest.mark.parametrize("how", [KILLED, STOPPED], ids=["killed", "stopped"])


@by_how
@pytest.mark.parametrize("dead", [(3,), (2, 3)], ids=["rank", "node"])
@pytest.mark.parametrize("transfer", STEP)
def test_in_each_phase(how: signal.Signals, dead: tuple[int, ...], transfer: int) -> None:
    """All others are told who, on which node, where they waited and in which step; the same, and in time."""
    for told in those_left(Loss(dead, how, transfer)):
        assert (told.peers, told.nodes, told.phase) == (dead, (1,), STEP[transfer])
        who = f"rank(s) {', '.join(map(str, dead))} on node(s) 1"
        assert f"rank {told.rank} waited in {told.phase} (step {told.epoch}) for {who}:" in told.text


@by_how
@pytest.mark.parametrize("dead", [(0,), (0, 1)], ids=["rank", "node"])
@pytest.mark.parametrize("transfer", MAKING)
def test_while_one_is_made(how: signal.Signals, dead: tuple[int, ...], transfer: int) -> None:
    """Ranks have not agreed on nodes before the first phase ends, so that names ranks alone."""
    for told in those_left(Loss(dead, how, transfer, making=True)):
        assert (told.peers, told.phase) == (dead, MAKING[transfer])
        assert told.nodes == (() if transfer == 1 else (0,))


@by_how
@pytest.mark.parametrize("transfer", [2, 3, 5])
def test_one_hop_further(how: signal.Signals, transfer: int) -> None:
    """Who was lost had sent to some and not to others, so these wait in the next transfer, for those as well. They
    name the rank that is lost, and none that waits for it too: nobody has to look at ranks that are there."""
    ranks = range(NUM_RANKS)
    dead, behind, *ahead = 3, 0, 1, 2
    with Server(NUM_RANKS, lose, Loss((dead,), how, transfer), device="cpu") as server:
        for rank in ranks:
            server.hear(rank, "there", START_S)
        for rank in (dead, *ahead):
            server.pipes[rank].send("go on")
        time.sleep(ARRIVE_S)
        signal_all(server, [dead], how)
        server.pipes[behind].send("go on")
        told: dict[int, Told] = {rank: server.hear(rank, "returned", END_S) for rank in (behind, *ahead)}
    assert told[behind].phase == STEP[transfer]
    assert {told[rank].phase for rank in ahead} == {STEP[transfer + 1]}
    assert {told[rank].epoch for rank in ahead} == {told[behind].epoch + 1}
    assert {each.peers for each in told.values()} == {(dead,)}


def those_left(loss: Loss) -> list[Told]:
    """What the ranks that are left are told. Those that were stopped go on afterwards, and are told too."""
    left = [rank for rank in range(NUM_RANKS) if rank not in loss.dead]
    with Server(NUM_RANKS, lose, loss, device="cpu") as server:
        for rank in range(NUM_RANKS):
            server.hear(rank, "there", START_S)
        signal_all(server, loss.dead, loss.how)
        for rank in left:
            server.pipes[rank].send("go on")
        told: list[Told] = [server.hear(rank, "returned", END_S) for rank in left]
        if loss.how == STOPPED:
            signal_all(server, loss.dead, signal.SIGCONT)
            for rank in loss.dead:
                server.pipes[rank].send("go on")
            for rank in loss.dead:
                late: Told = server.hear(rank, "returned", END_S)
                assert late.after_s < NOTICE_S
                assert not set(late.peers) & set(loss.dead)
    assert len({each.epoch for each in told}) == 1
    for each in told:
        assert each.after_s < NOTICE_S < LONG_S
        assert loss.how == KILLED or each.after_s > 0.9 * DEADLINE_S
    return told


def signal_all(server: Server, ranks: Sequence[int], how: signal.Signals) -> None:
    """Return once the ranks do nothing more: on a busy machine threads of a process go on for a while."""
    for rank in ranks:
        pid = server.processes[rank].pid
        assert pid is not None
        os.kill(pid, how)
        gone = time.monotonic() + PATIENCE_S
        while how == signal.SIGSTOP and not all(state_of(thread) == "T" for thread in threads_of(pid)):
            assert time.monotonic() < gone, "it does not stop"
            time.sleep(0.001)


def threads_of(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())


def state_of(thread: Path) -> str:
    """One letter, as of proc(5): T is stopped."""
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


def lose(context: RankContext, pipe: Connection, loss: Loss) -> Told:
    """Halt before the transfer, and go on when the test says so."""
    problem = make_problem(CASE, context.num_ranks)
    x, ids, weights = problem.arguments(context)
    for each in (x, weights):
        assert isinstance(each, torch.Tensor)
        each.requires_grad_()
    began = 0.0

    def halt(ranks: RankGroup) -> None:
        nonlocal began
        pipe.send(("there", None))
        assert pipe.recv() == "go on"
        began = time.monotonic()
        if loss.how == STOPPED:
            ranks.timeout_s = ranks.open_timeout_s = DEADLINE_S

    def make() -> tl.Communicator:
        return make_comm(context, "network", problem.plan, timeout_s=LONG_S, open_timeout_s=LONG_S)

    def step(comm: tl.Communicator) -> None:
        routed = comm.dispatch(x, ids, weights)
        comm.combine(routed.tokens, routed, mode="per_node").sum().backward()

    with ExitStack() as stack:
        if context.rank not in loss.dead:
            stack.enter_context(only_late(loss.dead))
        if not loss.making:
            comm = make()
            step(comm)
        stack.enter_context(before_transfer(loss.transfer, halt))
        with pytest.raises(tl.PeerTimeout) as timeout:
            make() if loss.making else step(comm)
        error = timeout.value
        told = Told(
            error.rank, error.peers, error.nodes, error.phase, error.epoch, str(error), time.monotonic() - began
        )
        if not loss.making:
            with pytest.raises(tl.CommunicatorBroken):
                step(comm)
            comm.close()
    return told


@contextmanager
def before_transfer(number: int, halt: Callable[[RankGroup], None]) -> Iterator[None]:
    """Call ``halt`` with the group before the transfer of this number in this block, from 1 on."""
    begun = 0

    def counted(real: Any) -> Any:
        def start(ranks: RankGroup, *arguments: Any, **options: Any) -> Any:
            nonlocal begun
            begun += 1
            if begun == number:
                halt(ranks)
            return real(ranks, *arguments, **options)

        return start

    with ExitStack() as stack:
        for name in ("start_all_gather", "start_all_to_all"):
            stack.enter_context(mock.patch.object(RankGroup, name, counted(getattr(RankGroup, name))))
        yield
