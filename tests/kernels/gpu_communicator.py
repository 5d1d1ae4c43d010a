"""A communicator of backend "gin" or "padded" on a rank of several nodes, with a GPU of its own; see gpu_nodes.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist

import tokenloom as tl
from tests.support.cases import BF16, FP8, Case, Problem, expert_rows, make_problem, same_bits, same_routed
from tokenloom import reference
from tokenloom.runtime.processes import RankContext

CALLS, REPLAYS, PROBLEMS, MEASURED = 20, 50, 3, 100
AHEAD = 10
"""Pairs that the host launches before it waits. Where a launch waits for room in the device's queue, its thread holds
the driver, which the card's copies go through."""
TIMEOUT_S = 5.0


class Member(Protocol):
    """A rank as gpu_nodes.py has it."""

    @property
    def options(self) -> Any:
        """What the process was told."""

    @property
    def device(self) -> torch.device:
        """Of the rank."""

    @property
    def report(self) -> dict[str, Any]:
        """What it has to say in the end."""

    def meet(self) -> None:
        """All ranks have come here."""

    def wait(self) -> None:
        """Wait for the end of this rank's work, and for nothing else of the device."""


class Calls:
    """Pairs of a dispatch and a combine by one communicator.

    Args:
        member: the rank.
        case: of tokens. layout: "slots" or "rank".
    """

    def __init__(self, member: Member, case: Case, layout: str) -> None:
        options = member.options
        self.member, self.case, self.layout = member, case, layout
        self.problem = self._another(0)
        sizes = {name: value for name, value in vars(self.problem.plan).items() if name != "num_ranks"}
        self.comm = tl.Communicator(
            dist.group.WORLD,
            ranks_per_node=options.ranks_per_node,
            timeout_s=TIMEOUT_S,
            dtype=None if case.dtype == FP8 else case.dtype,
            **({"backend": "padded"} if options.scenario == "padded" else {"transport": "gin"}),
            **sizes,
        )
        between_nodes = "collective" if options.scenario == "padded" else "gin"
        assert self.comm.transports == {"own node": "nvlink", "other nodes": between_nodes}
        problems = [self._another(seed) for seed in range(PROBLEMS)]
        most = max(problem.rows_needed("slots") for problem in problems)
        self.bounds: dict[str, Any] = {"capacity": most} if layout == "slots" else {"sizes": "bounded"}
        self._known: dict[int, Any] = {}
        self.y: torch.Tensor | None = None
        self.given = [torch.clone(each) for each in self._tensors(self.problem)]

    def _another(self, seed: int) -> Problem:
        num_ranks = self.member.options.num_ranks
        return make_problem(replace(self.case, seed=seed), num_ranks)

    def _tensors(self, problem: Problem) -> list[torch.Tensor]:
        rank = RankContext(self.member.options.rank, problem.plan.num_ranks, None, self.member.device, None)  # type: ignore[arg-type]
        x, ids, weights = problem.arguments(rank)
        return [*(x if isinstance(x, tuple) else (x,)), ids, *(() if weights is None else (weights,))]

    def take(self, seed: int) -> None:
        """Other values and another routing, in the same memory."""
        self.problem = self._another(seed)
        for tensor, new in zip(self.given, self._tensors(self.problem), strict=True):
            tensor.copy_(new)
        capacity = {name: value for name, value in self.bounds.items() if name == "capacity"}
        if seed not in self._known:
            want = self.problem.dispatched(self.layout, **capacity)
            self._known[seed] = want, expert_rows(self.problem, want, BF16)
        self.want, self.ys = self._known[seed]
        mine = self.ys[self.member.options.rank].to(self.member.device)
        self.y = mine if self.y is None else self.y.copy_(mine)

    def make(self, first: bool = False) -> None:
        """Both calls, without the host."""
        x, ids, *weights = self._arguments()
        self.routed = self.comm.dispatch(x, ids, *weights, layout=self.layout, **self.bounds)
        self._load(first)
        assert self.y is not None
        self.out = self.comm.combine(self.y, self.routed, mode="per_node", weighted=self._weighted)

    def make_in_halves(self, first: bool = False) -> None:
        """Two of each call, both open at once and received in the other order."""
        x, ids, *weights = self._arguments()
        sent = [self.comm.send_dispatch(x, ids, *weights, layout=self.layout, **self.bounds) for _ in "ab"]
        second, self.routed = sent[1].receive(), sent[0].receive()
        self._load(first)
        assert self.y is not None
        sums = [
            self.comm.send_combine(self.y, routed, mode="per_node", weighted=self._weighted)
            for routed in (self.routed, second)
        ]
        _, self.out = sums[1].receive(), sums[0].receive()

    def _arguments(self) -> list[Any]:
        """x, ids, and weights if there are some."""
        if self.problem.scales is None:
            return list(self.given)
        return [tuple(self.given[:2]), *self.given[2:]]

    @property
    def _weighted(self) -> bool | None:
        return None if self.layout == "rank" else self.problem.topk_weights is not None

    def _load(self, first: bool) -> None:
        """The first calls load kernels, while no other waits on this GPU."""
        if first:
            self.member.wait()
            self.member.meet()

    def check(self) -> None:
        """Wait, and compare with the reference."""
        self.member.wait()
        rank, size = self.member.options.rank, self.member.options.ranks_per_node
        routed = SimpleNamespace(**{name: getattr(self.routed, name) for name in _FIELDS})
        same_routed(routed, self.want[rank], self.problem.plan, bounded=True)  # type: ignore[arg-type]
        by_route = self.layout == "slots"
        wanted = reference.combine(
            self.problem.plan,
            self.ys,
            self.want,
            self.problem.topk_ids,
            self.problem.topk_weights if by_route else None,
            mode="per_node",
            nodes=[range(first, first + size) for first in range(0, self.member.options.num_ranks, size)],
        )
        same_bits(self.out, wanted[rank], "sums")


_FIELDS = (
    "layout",
    "tokens",
    "scales",
    "topk_ids",
    "topk_weights",
    "num_rows",
    "source_counts",
    "expert_counts",
    "expert_offsets",
    "slot_ranges",
)


@torch.no_grad()
def communicator(member: Member, cases: dict[str, tuple[Case, str]]) -> None:
    """Eager calls, whole and in halves, a graph of each that is replayed with other routings, and the times of all."""
    for name, (case, layout) in cases.items():
        calls = Calls(member, case, layout)
        for how, make in {"both calls": calls.make, "two of both in halves": calls.make_in_halves}.items():
            for number in range(CALLS):
                calls.take(number % PROBLEMS)
                make(first=number == 0)
                calls.check()
                calls.comm.engine.check("calls")
                if number == 0:
                    member.meet()
            member.meet()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's threads go on meanwhile
                make()
            member.meet()
            for number in range(REPLAYS):
                calls.take(number % PROBLEMS)
                graph.replay()
                calls.check()
            _measure(member, {"eager": make, "graph": graph.replay}, f"{name}, {how}")
            member.meet()
            del graph
        calls.comm.close()
        member.meet()


def _measure(member: Member, ways: dict[str, Callable[[], None]], what: str) -> None:
    for how, make in ways.items():
        member.meet()
        began = time.perf_counter()
        for _ in range(MEASURED // AHEAD):
            for _ in range(AHEAD):
                make()
            member.wait()
        member.report[f"{what}, {how}: mean us"] = (time.perf_counter() - began) / MEASURED * 1e6
