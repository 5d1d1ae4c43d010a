"""Halves of backends "gin" and "padded" on the emulator: two calls open at once, in graphs too, and what ends between
them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.backends.test_gin import CASE, comm_of, each_way, there_and_back
from tests.support import emulator
from tests.support.cases import BF16, FP8, Case, Problem, expert_rows, make_problem, same_bits, same_routed
from tests.support.emulator.graphs import capture
from tests.support.emulator.group import EmulatedRanks, here
from tests.support.on_ranks import on_ranks
from tests.support.slow import mostly_slow
from tokenloom import reference
from tokenloom.runtime.processes import RankContext

EXPERIMENTAL = True

pytestmark = pytest.mark.skipif(emulator.CXX is None, reason="no g++")

CALLS = 14
SOON_S = 0.003
"""Some seconds of the emulator, where a broken rule would let ranks wait for ever."""


class Batch:
    """A micro-batch: what it gives to its dispatch and its combine, and what must come of that.

    Args:
        layout: "slots" or "rank".
    """

    def __init__(self, context: RankContext, comm: tl.Communicator, case: Case, layout: str) -> None:
        self.problem: Problem = make_problem(case, context.num_ranks)
        self.context, self.comm, self.layout = context, comm, layout
        self.given = self.problem.arguments(context)
        self.bounds: dict[str, Any] = {"sizes": "bounded"}
        if layout == "slots":
            self.bounds = {"capacity": 2 * self.problem.plan.max_tokens_per_rank * context.num_ranks}
        capacity = {name: value for name, value in self.bounds.items() if name == "capacity"}
        self.want = self.problem.dispatched(layout, **capacity)
        self.ys = expert_rows(self.problem, self.want, BF16)
        self.y = self.ys[context.rank].clone()
        self.weighted = None if layout == "rank" else self.problem.topk_weights is not None
        self.routed: Any = None
        self.out: Any = None

    def dispatch(self, send: bool) -> Any:
        make = self.comm.send_dispatch if send else self.comm.dispatch
        return make(*self.given, layout=self.layout, **self.bounds)

    def combine(self, send: bool) -> Any:
        make = self.comm.send_combine if send else self.comm.combine
        return make(self.y, self.routed, mode="per_node", weighted=self.weighted)

    def overwrite(self) -> None:
        """What was sent is the caller's again."""
        x, ids, weights = self.given
        for each in (*(x if isinstance(x, tuple) else (x,)), *(() if weights is None else (weights,))):
            each.view(torch.uint8).fill_(255)
        ids.fill_(0)

    def take(self, kind: str, result: Any) -> None:
        if kind == "dispatch":
            self.routed = result
        else:
            self.out = result

    def check(self) -> None:
        rank = self.context.rank
        if self.routed is not None:
            same_routed(self.routed, self.want[rank], self.problem.plan, bounded=True)
        if self.out is None:
            return
        weights = self.problem.topk_weights if self.layout == "slots" else None
        nodes = self.comm.engine.ranks.topology.nodes
        wanted = reference.combine(
            self.problem.plan, self.ys, self.want, self.problem.topk_ids, weights, mode="per_node", nodes=nodes
        )
        same_bits(self.out, wanted[rank], "sums")


def schedule(chance: random.Random) -> list[tuple[str, str, int]]:
    """Calls, whole or in halves, in any order that is allowed: (what to do, kind, batch)."""
    steps: list[tuple[str, str, int]] = []
    pending: list[tuple[int, str, int]] = []
    ready: list[int] = []  # batches that can be combined
    batches = 0

    def receive(place: int) -> None:
        _, kind, batch = pending.pop(place)
        steps.append(("receive", kind, batch))
        if kind == "dispatch":
            ready.append(batch)

    for number in range(CALLS):
        while pending and (pending[0][0] < number - 1 or chance.random() < 0.35):
            receive(0 if pending[0][0] < number - 1 else chance.randrange(len(pending)))
        kind, batch = "dispatch", batches
        if ready and chance.random() < 0.6:
            kind, batch = "combine", ready.pop(chance.randrange(len(ready)))
        batches += kind == "dispatch"
        if chance.random() < 0.25:
            steps.append(("make", kind, batch))
            if kind == "dispatch":
                ready.append(batch)
        else:
            steps.append(("send", kind, batch))
            pending.append((number, kind, batch))
    while pending:
        receive(chance.randrange(len(pending)))
    return steps


def play(steps: list[tuple[str, str, int]], batches: Any, overwrites: bool = False) -> list[Batch]:
    """Make the calls; ``batches`` makes the batch of a number."""
    made: dict[int, Batch] = {}
    pending: dict[tuple[str, int], Any] = {}
    for step, kind, number in steps:
        batch = made[number] = made.get(number) or batches(number)
        if step == "receive":
            batch.take(kind, pending.pop((kind, number)).receive())
            continue
        result = getattr(batch, kind)(step == "send")
        if step == "make":
            batch.take(kind, result)
            continue
        pending[kind, number] = result
        if overwrites and kind == "dispatch":
            batch.overwrite()
        elif overwrites:
            batch.y.fill_(torch.nan)
    return list(made.values())


@pytest.mark.slow
@each_way
@pytest.mark.parametrize("overwrites", [False, True], ids=["", "overwritten"])
@pytest.mark.parametrize("sizes", [(4, 2), (2, 1), (6, 2)], ids=str)
def test_interleaved(sizes: tuple[int, int], overwrites: bool, way: str) -> None:
    """Two are open at a time, of both kinds and layouts, received in either order; whole calls go between them."""
    for seed in range(2):
        ranks = EmulatedRanks(emulator._shared_folder(), sizes[0], seed)
        ranks.run(check_interleaved, sizes[1], seed, overwrites, way)


def check_interleaved(context: RankContext, ranks_per_node: int, seed: int, overwrites: bool, way: str) -> None:
    case = replace(CASE, hidden=256, dtype=FP8) if seed % 2 else CASE
    chance = random.Random(seed)

    def batch(number: int) -> Batch:
        return Batch(context, comm, replace(case, seed=number % 5), ("slots", "rank")[number % 2])

    plan = make_problem(case, context.num_ranks).plan
    with comm_of(context, plan, way, ranks_per_node=ranks_per_node) as comm:
        made = play(schedule(chance), batch, overwrites)
        comm.check()
        for each in made:
            each.check()


@on_ranks("emulated_four")
@pytest.mark.slow
@each_way
def test_in_graphs(context: RankContext, way: str) -> None:
    """Halves of two batches in turns, captured once and replayed with other routings between eager ones."""
    case = replace(CASE, tokens=(5, 0, 5, 4), ids_dtype=torch.int32)  # others are converted by torch
    with comm_of(context, make_problem(case, context.num_ranks).plan, way, timeout_s=SOON_S) as comm:

        def batch(number: int) -> Batch:
            return Batch(context, comm, replace(case, seed=number), ("slots", "rank")[number % 2])

        for each in play(TURNS, batch):
            each.check()
        with capture() as graph:
            captured = play(TURNS, batch)
        for seed in range(3):
            news = [Batch(context, comm, replace(case, seed=10 * seed + i), b.layout) for i, b in enumerate(captured)]
            for old, new in zip(captured, news, strict=True):
                for tensor, value in zip((*old.given, old.y), (*new.given, new.y), strict=True):
                    tensor.copy_(value)
                old.problem, old.want, old.ys = new.problem, new.want, new.ys
            graph.replay()
            for each in captured:
                each.check()
            for each in play(TURNS[:4], batch):
                each.check()
        comm.check()


TURNS = [
    ("send", "dispatch", 0),
    ("send", "dispatch", 1),
    ("receive", "dispatch", 1),
    ("receive", "dispatch", 0),
    ("send", "combine", 0),
    ("send", "combine", 1),
    ("receive", "combine", 1),
    ("receive", "combine", 0),
    ("send", "dispatch", 2),
    ("receive", "dispatch", 2),
]


# -- between halves -------------------------------------------------------------------------------------------------


@on_ranks("emulated_four")
@pytest.mark.sampled(3)
@each_way
@pytest.mark.parametrize("first", mostly_slow(["sent first", "sent last"], ["sent first"]))
@pytest.mark.parametrize("receives", [True, False], ids=["receives", "drops"])
@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_a_fault_while_a_call_is_open(context: RankContext, call: str, receives: bool, first: str, way: str) -> None:
    """Rank 3 fails in its second call. The first is right on all others, in whichever order they receive, and also if
    rank 3 never receives it."""
    with comm_of(context, make_problem(CASE, context.num_ranks).plan, way, timeout_s=SOON_S) as comm:

        def batch(seed: int) -> Batch:
            return Batch(context, comm, replace(CASE, seed=seed), "slots")

        one, two = batch(1), batch(2)
        if call == "combine":
            two.routed = two.dispatch(False)
        pending = one.dispatch(True)
        if context.rank == 3:
            two.given = (two.given[0][:, :8], *two.given[1:])  # type: ignore[index]
            two.y = two.y[:, :, :8]
            with pytest.raises(tl.ShapeMismatch):
                getattr(two, call)(True)
            if receives:
                one.routed = pending.receive()
            else:
                comm.engine.open_calls.clear()  # as if nobody had noticed
        else:
            refused = getattr(two, call)(True)
            if first == "sent first":
                one.routed = pending.receive()
                refused.receive()
            else:
                refused.receive()
                one.routed = pending.receive()
            with pytest.raises(tl.PeerError, match=r"rank 3.*ShapeMismatch"):
                comm.check()
        comm.check()
        if one.routed is not None:
            one.check()
        torch.distributed.barrier()  # of the hosts: nobody's next call helps
        there_and_back(context, comm, make_problem(CASE, context.num_ranks), "slots")


@on_ranks("emulated_four")
@pytest.mark.sampled(3)
@each_way
@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_a_pending_that_is_dropped(context: RankContext, call: str, way: str) -> None:
    """The next call says so on all ranks, and those behind it work."""
    with comm_of(context, make_problem(CASE, context.num_ranks).plan, way, timeout_s=SOON_S) as comm:
        batch = Batch(context, comm, CASE, "slots")
        batch.routed = batch.dispatch(False)
        getattr(batch, call)(True)
        with pytest.raises(tl.InvalidArgument, match=f"{call} was dropped unreceived"):
            batch.dispatch(False)
        there_and_back(context, comm, batch.problem, "slots")
        comm.check()


@on_ranks("emulated_four")
def test_halves_of_some_ranks_alone(context: RankContext) -> None:
    """A call means the same to all ranks, halves among it."""
    with comm_of(context, make_problem(CASE, context.num_ranks).plan, timeout_s=SOON_S) as comm:
        batch = Batch(context, comm, CASE, "slots")
        sent = batch.dispatch(context.rank == 2)
        if context.rank == 2:
            sent.receive()
        with pytest.raises(tl.PlanMismatch, match="rank 2 has halves=yes"):
            comm.check()
        there_and_back(context, comm, batch.problem, "slots")


@on_ranks("emulated_four")
@each_way
def test_exact_sizes(context: RankContext, way: str) -> None:
    """The host reads them when it receives."""
    problem = make_problem(CASE, context.num_ranks)
    want = problem.dispatched("rank")
    with comm_of(context, problem.plan, way, checked=context.num_ranks == 2) as comm:
        pending = [comm.send_dispatch(*problem.arguments(context), layout="rank") for _ in "ab"]
        for each in pending:
            same_routed(each.receive(), want[context.rank], problem.plan)


@on_ranks("emulated_four")
@pytest.mark.sampled(2)
@each_way
def test_a_forwarder_that_receives_late(context: RankContext, way: str) -> None:
    """Nobody takes rows before they are here, though a later call was received first."""
    with comm_of(context, make_problem(CASE, context.num_ranks).plan, way, timeout_s=SOON_S) as comm:
        batches = [Batch(context, comm, replace(CASE, seed=seed), "slots") for seed in range(2)]
        for _ in range(3):
            pending = [batch.dispatch(True) for batch in batches]
            batches[1].take("dispatch", pending[1].receive())
            batches[1].check()
            if context.rank != 1:
                batches[0].take("dispatch", pending[0].receive())
            torch.distributed.barrier()  # of the hosts
            if context.rank == 1:
                for _ in range(20):
                    here.group.pump()
                here.group.emulator.slow_down(1, 20)  # its counts are there long before its rows
                batches[0].take("dispatch", pending[0].receive())
            batches[0].check()
            if context.rank == 1:
                here.group.emulator.slow_down(1, 1)
        comm.check()
