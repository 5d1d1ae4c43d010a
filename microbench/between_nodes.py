"""Times calls between nodes that are pretended on one host, beside the parts that they consist of.

    python microbench/between_nodes.py [--ranks-per-node 2] [--tokens 4096] [--few-tokens 128] [--json FILE]

All GPUs, one rank each, or 4 ranks on the CPU, which show that it runs. NCCL takes pretended nodes for hosts. Its rows
go over the loopback card of tests/support/gin_loopback, where gcc compiles that, so compare times within a run alone:

- many tokens: dispatch and combine of backend "network", with sums per node; the all-to-alls of the same rows in a
  rail alone; dispatch and combine of the same rows inside a node alone; and plain all-to-alls of a row for each route;
- few tokens, on GPUs: dispatch and combine by GIN, and the same calls without tokens, which take the card's one way.

Numbers are microseconds, medians of the slowest rank, and all take turns. The exit status is 1 if a promise is broken;
on CPUs rows alone are judged.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tokenloom as tl
from tokenloom.backends.nodes.nccl import loaded_library
from tokenloom.errors import BackendUnavailable
from tokenloom.jit.nccl_headers import find_headers
from tokenloom.runtime.processes import RankContext, RankPool

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a script finds its own folder only
from tests.support import gin_loopback

NUM_EXPERTS, TOP_K = 256, 8
BOTH, RAIL, INSIDE, PLAIN = "dispatch + combine", "rail alone", "inside alone", "all-to-all of routes"
LOOP = 4
"""Calls between two waits. The card stops when the device's queue is full."""
Call = Callable[[], Any]


def timed_us(context: RankContext, call: Call) -> float:
    """Microseconds of a call in a short loop. It waits for no more than this rank's work, as the card needs it."""
    dist.barrier(context.group)
    began = time.perf_counter()
    for _ in range(LOOP):
        call()
    if context.device.type == "cuda":
        event = torch.cuda.Event()
        event.record()
        while not event.query():
            time.sleep(2e-5)
    return (time.perf_counter() - began) / LOOP * 1e6


class Rows:
    """Tokens of this rank, and where they go.

    Attributes:
        to_nodes: [T, N], whether a token has experts there.
    """

    def __init__(self, context: RankContext, ranks_per_node: int, tokens: int, hidden: int) -> None:
        self.context, self.ranks_per_node = context, ranks_per_node
        self.num_nodes, self.node = context.num_ranks // ranks_per_node, context.rank // ranks_per_node
        generator = torch.Generator().manual_seed(context.rank)
        self.x = torch.randn(tokens, hidden, generator=generator).to(context.device, torch.bfloat16)
        ids = torch.rand(tokens, NUM_EXPERTS, generator=generator).topk(TOP_K, dim=1).indices
        self.ids, self.weights = ids.to(context.device), torch.rand(tokens, TOP_K).to(context.device)
        self.experts_per_node = NUM_EXPERTS // self.num_nodes
        nodes = torch.arange(self.num_nodes)
        self.to_nodes = (ids[..., None] // self.experts_per_node == nodes).any(1)
        self.to_ranks = (ids // (NUM_EXPERTS // context.num_ranks)).flatten().bincount(minlength=context.num_ranks)
        firsts = range(0, context.num_ranks, ranks_per_node)
        rails = [dist.new_group([first + place for first in firsts]) for place in range(ranks_per_node)]
        inside = [dist.new_group(list(range(first, first + ranks_per_node))) for first in firsts]
        self.rail, self.inside = rails[context.rank % ranks_per_node], inside[self.node]

    def exchange(self, counts: list[int], group: dist.ProcessGroup) -> Call:
        """All-to-alls of so many rows to each rank of a group, and of as many back."""
        sent = torch.tensor(counts, device=self.context.device)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        there, hidden = received.tolist(), self.x.shape[1]
        out = self.x.new_zeros(sum(counts), hidden)
        into = self.x.new_zeros(sum(there), hidden)

        def call() -> None:
            dist.all_to_all_single(into, out, there, counts, group=group)
            dist.all_to_all_single(out, into, counts, there, group=group)

        return call

    def rail_alone(self) -> Call:
        """What crosses nodes in both calls: a row for each (token, node)."""
        counts = self.to_nodes.sum(0)
        counts[self.node] = 0
        return self.exchange(counts.tolist(), self.rail)

    def plain(self) -> Call:
        """A row for each route, to any rank."""
        return self.exchange(self.to_ranks.tolist(), self.context.group)

    def inside_alone(self) -> Call:
        """What ranks of a node send each other: the tokens of all ranks of this rail, to the node's experts."""
        everybody: Any = [None] * self.num_nodes
        dist.all_gather_object(everybody, (self.ids.cpu(), self.weights.cpu()), self.rail)
        ids, weights = (torch.cat(each).to(self.context.device) for each in zip(*everybody, strict=True))
        ids = ids - self.node * self.experts_per_node
        ids = torch.where((ids >= 0) & (ids < self.experts_per_node), ids, -1)
        chosen = (ids >= 0).any(1)
        ids, weights = ids[chosen], weights[chosen]
        x = self.x.new_zeros(len(ids), self.x.shape[1])
        most = max(_gathered(self.context, len(ids)))
        comm = tl.Communicator(
            self.inside,
            num_experts=self.experts_per_node,
            hidden=x.shape[1],
            top_k=TOP_K,
            max_tokens_per_rank=most,
            device=self.context.device,
        )
        return partial(both, comm, x, ids, weights)

    def whole(self) -> Call:
        """Both calls of backend "network"."""
        comm = self._communicator(self.x.shape[0], backend="network")
        return partial(both, comm, self.x, self.ids, self.weights, mode="per_node")

    def _communicator(self, tokens: int, **options: Any) -> tl.Communicator:
        return tl.Communicator(
            self.context.group,
            num_experts=NUM_EXPERTS,
            hidden=self.x.shape[1],
            top_k=TOP_K,
            max_tokens_per_rank=tokens,
            ranks_per_node=self.ranks_per_node,
            device=self.context.device,
            **options,
        )

    def by_gin(self) -> dict[str, Call]:
        """Dispatch and combine by GIN, with tokens and without."""
        comm = self._communicator(self.x.shape[0], transport="gin")
        capacity = self.x.shape[0] * self.context.num_ranks
        calls: dict[str, Call] = {}
        for name, tokens in (("", self.x.shape[0]), (", no tokens", 0)):
            given = self.x[:tokens], self.ids[:tokens], self.weights[:tokens]
            dispatch = partial(comm.dispatch, *given, layout="slots", capacity=capacity)
            routed = dispatch()
            calls[f"GIN dispatch{name}"] = dispatch
            calls[f"GIN combine{name}"] = partial(comm.combine, torch.zeros_like(routed.tokens), routed)
        return calls

    def rows_to_other_nodes(self) -> dict[str, float]:
        """Rows of a dispatch that cross nodes, for each token."""
        away = [rank for rank in range(self.context.num_ranks) if rank // self.ranks_per_node != self.node]
        tokens = len(self.x)
        return {
            BOTH: (int(self.to_nodes.sum()) - int(self.to_nodes[:, self.node].sum())) / tokens,
            PLAIN: int(self.to_ranks[away].sum()) / tokens,
        }


def both(comm: tl.Communicator, x: Any, ids: Any, weights: Any, **options: Any) -> None:
    routed = comm.dispatch(x, ids, weights)
    comm.combine(routed.tokens, routed, **options)


def _gathered(context: RankContext, value: Any) -> list[Any]:
    found: list[Any] = [None] * context.num_ranks
    dist.all_gather_object(found, value, context.group)
    return found


@torch.no_grad()
def measure(
    context: RankContext, ranks_per_node: int, tokens: int, few_tokens: int, hidden: int, iterations: int, card: bool
) -> dict[str, Any]:
    """Times of all calls, and rows that cross nodes."""
    gc.disable()  # a finalizer may free memory while a kernel waits for the card
    many = Rows(context, ranks_per_node, tokens, hidden)
    calls = {BOTH: many.whole(), RAIL: many.rail_alone(), INSIDE: many.inside_alone(), PLAIN: many.plain()}
    if card:
        calls |= Rows(context, ranks_per_node, few_tokens, hidden).by_gin()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(iterations + 1):
        for name, call in calls.items():
            sample = timed_us(context, call)
            if turn > 0:  # the first warms up
                times[name].append(sample)
    us: dict[str, float] = {}
    for name, samples in times.items():
        slowest = [max(each) for each in zip(*_gathered(context, samples), strict=True)]
        us[name] = statistics.median(slowest)
    rows = _gathered(context, many.rows_to_other_nodes())
    return {"us": us, "rows": {name: sum(each[name] for each in rows) / len(rows) for name in (BOTH, PLAIN)}}


@dataclass(frozen=True)
class Ratio:
    """What the project promises of two measurements.

    Attributes:
        what: is divided by what.
        value: measured.
        at_least, at_most: the promise.
        of_time: only times of GPUs say anything about it.
    """

    what: str
    value: float
    at_least: float = 0.0
    at_most: float | None = None
    of_time: bool = True

    @property
    def holds(self) -> bool:
        return self.at_least <= self.value and (self.at_most is None or self.value <= self.at_most)

    def __str__(self) -> str:
        promise = f"at least {self.at_least:g}" if self.at_most is None else f"at most {self.at_most:g}"
        return f"{f'{self.what}, {promise}':64} {self.value:6.2f}"


def ratios_of(found: dict[str, Any]) -> list[Ratio]:
    """What was promised, from the times and rows of :func:`measure`."""
    us, rows = found["us"], found["rows"]
    ratios = [
        Ratio("both calls / the longer of rail and inside", us[BOTH] / max(us[RAIL], us[INSIDE]), at_most=1.25),
        Ratio("time of plain all-to-alls / both calls", us[PLAIN] / us[BOTH], at_least=2),
        Ratio("rows of plain all-to-alls / both calls", rows[PLAIN] / rows[BOTH], at_least=2, of_time=False),
    ]
    for kind in ("dispatch", "combine"):
        if f"GIN {kind}" in us:
            value = us[f"GIN {kind}"] / us[f"GIN {kind}, no tokens"]
            ratios.append(Ratio(f"GIN {kind} / the same without tokens", value, at_most=2.5))
    return ratios


def broken(ratios: Sequence[Ratio], on_gpus: bool) -> list[Ratio]:
    """Promises that do not hold. Times of processes on a CPU promise nothing."""
    return [each for each in ratios if not each.holds and (on_gpus or not each.of_time)]


def card_here(folder: Path) -> bool:
    """Compile the card, and let all ranks use it: whether there is one."""
    if gin_loopback.WHY_NOT is not None:
        print(f"without a card: {gin_loopback.WHY_NOT}")
        return False
    try:
        headers = find_headers(loaded_library())
    except BackendUnavailable as error:
        print(f"without a card: {error}")
        return False
    os.environ.pop("NCCL_NET", None)
    os.environ.update(gin_loopback.build(folder, headers.runtime).environment())
    os.environ.update({"CUDA_MODULE_LOADING": "EAGER", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"})
    return True


def why_not(ranks: int, ranks_per_node: int) -> str | None:
    """Why there is nothing to measure on these ranks, None if there is. Backend "network" refuses the same ones."""
    if ranks_per_node < 2:
        return f"--ranks-per-node is {ranks_per_node}, expected 2 or more: ranks of a node share what it receives"
    if ranks % ranks_per_node or ranks < 2 * ranks_per_node:
        return f"{ranks} rank(s) do not make two or more nodes of {ranks_per_node}; choose other --ranks"
    if NUM_EXPERTS % ranks:
        return f"{ranks} ranks cannot have equally many of {NUM_EXPERTS} experts; choose other --ranks"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="default: all GPUs, or 4 on the CPU")
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--few-tokens", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    ranks = (gpus or 4) if arguments.ranks is None else arguments.ranks
    if why := why_not(ranks, arguments.ranks_per_node):
        parser.error(why)
    with tempfile.TemporaryDirectory() as folder:
        card = bool(gpus) and card_here(Path(folder))
        sizes = (arguments.tokens, arguments.few_tokens, arguments.hidden, arguments.iterations, card)
        with RankPool(ranks, "cuda" if gpus else "cpu", ranks_per_node=arguments.ranks_per_node) as pool:
            found = pool.run(measure, arguments.ranks_per_node, *sizes, limit_s=400)[0]
    for name, value in found["us"].items():
        print(f"{name:32} {value:12.1f} us")
    ratios = ratios_of(found)
    for each in ratios:
        print(each)
    if arguments.json:
        names = [torch.cuda.get_device_name(i) for i in range(gpus)]
        setup = {"gpus": names, "torch": torch.__version__, **vars(arguments), "ranks": ranks, "json": None}
        text = json.dumps({"setup": setup, **found, "ratios": [vars(each) for each in ratios]}, indent=1, default=str)
        arguments.json.write_text(text + "\n")
    if failing := broken(ratios, on_gpus=bool(gpus)):
        raise SystemExit("\n".join(["broken:", *map(str, failing)]))


if __name__ == "__main__":
    main()
