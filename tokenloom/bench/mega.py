"""``tokenloom bench mega``: the FP8 layer as a whole, and its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from tokenloom.bench import timing
from tokenloom.bench.rows import of_the_slowest, write_json
from tokenloom.bench.setup import run_setup
from tokenloom.launch import RankContext, RankPool
from tokenloom.mega import MegaMoE

LIMIT_S = 500.0
HBM_GBYTES_PER_S, LINK_GBYTES_PER_S, FP8_TFLOPS = 4370.0, 347.0, 1388.0
"""What an H200 reads, what its links carry out of it, and what cuBLAS reaches without block scales; for the floor."""
LEGEND = (
    "p50 and p99 of one call, of the slowest rank of each sample, in a replayed CUDA graph of {calls} calls; events: "
    "p50 around one call. TFLOP/s: of all ranks' routes, per rank. Floor: the largest of the touched experts' weights "
    "at {hbm:,.0f} GB/s, the arithmetic at {tflops:,.0f} TFLOP/s, and what leaves a rank at {link:,.0f} GB/s. Stages: "
    "of the slowest rank of each, in a graph of one call."
)


@dataclass(frozen=True)
class MegaShape:
    """A layer and its routing.

    Attributes:
        masked_ratio: share of routes that are -1.
        skew: experts are drawn with probability proportional to 1 / place^skew; 0: all alike.
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    masked_ratio: float = 0.0
    skew: float = 0.0

    def topk_ids(self, rank: int, num_tokens: int) -> torch.Tensor:
        """int32 [T, K] of one rank: different experts for each token."""
        generator = torch.Generator().manual_seed(rank)
        places = torch.randperm(self.num_experts, generator=torch.Generator().manual_seed(0)) + 1.0
        chances = (1 / places**self.skew).expand(num_tokens, -1)
        ids = torch.multinomial(chances, self.top_k, generator=generator) if num_tokens else chances[:, : self.top_k]
        masked = torch.rand(ids.shape, generator=generator) < self.masked_ratio
        return ids.masked_fill(masked, -1).to(torch.int32)


@dataclass(frozen=True)
class MegaRow:
    """Of one number of tokens.

    Attributes:
        name: mega/ranks/tokens/hidden/intermediate/experts/top-k/clock.
        p50_us, p99_us, slowest_rank: of a call in a graph. events_us: p50 around one eager call.
        tflops: per rank. weights_gbytes_per_s: the touched experts' weights on the rank that touches most, per p50.
        floor_us: see LEGEND. stages_us: p50 of each stage.
        setup: everything needed to repeat it, besides what all rows of a run share.
    """

    name: str
    p50_us: float
    p99_us: float
    slowest_rank: int
    events_us: float
    tflops: float
    weights_gbytes_per_s: float
    floor_us: float
    stages_us: dict[str, float]
    setup: dict[str, Any]


def run_mega(
    console: Console,
    num_ranks: int,
    shape: MegaShape,
    tokens: Sequence[int],
    *,
    command: Sequence[str],
    iterations: int,
    json_file: Path | None = None,
) -> None:
    """Measure every number of tokens on GPUs, print a table, write the file that was asked for.

    Raises:
        RankFailed: a rank failed.
    """
    setup = run_setup("cuda", num_ranks, command)
    with RankPool(num_ranks, "cuda") as pool, console.status(f"starting {num_ranks} ranks") as status:
        limit_s = LIMIT_S * len(tokens)
        results = pool.run(measure_on_rank, shape, list(tokens), iterations, limit_s=limit_s, on_event=status.update)
    rows = [
        make_row(shape, num_ranks, num_tokens, iterations, [result[i] for result in results])
        for i, num_tokens in enumerate(tokens)
    ]
    console.print(table(rows))
    console.print(
        LEGEND.format(calls=timing.GRAPH_CALLS, hbm=HBM_GBYTES_PER_S, tflops=FP8_TFLOPS, link=LINK_GBYTES_PER_S),
        markup=False,
    )
    if json_file is not None:
        write_json(json_file, setup, [], rows)
        console.print(f"rows written to {json_file}", markup=False)


@torch.no_grad()
def measure_on_rank(
    context: RankContext, shape: MegaShape, tokens: list[int], iterations: int
) -> list[dict[str, list[float]]]:
    """For each number of tokens: samples, in microseconds, of "graph", "events" and every stage. Collective."""
    sizes = (shape.num_experts, shape.hidden, shape.intermediate, shape.top_k, max(tokens))
    found: list[dict[str, list[float]]] = []
    with MegaMoE(context.group, *sizes, device=context.device) as mega:
        mega.use_weights(*_weights(mega))
        for num_tokens in tokens:
            if context.rank == 0:
                context.report(f"{num_tokens} tokens on every rank")
            generator = torch.Generator(context.device).manual_seed(context.rank)
            x = torch.randn(num_tokens, shape.hidden, generator=generator, device=context.device).bfloat16()
            ids = shape.topk_ids(context.rank, num_tokens).to(context.device)
            weights = torch.rand(num_tokens, shape.top_k, generator=generator, device=context.device)

            def call(x: Any = x, ids: Any = ids, weights: Any = weights) -> Any:
                return mega(x, ids, weights)

            graph, staged = timing.capture(call), _StagedGraph(mega, call)
            samples: dict[str, list[float]] = {}
            for count in timing.shares(iterations):
                timing.one_replay(context, graph)
                for _ in range(count):
                    samples.setdefault("graph", []).append(timing.one_replay(context, graph))
                timing.one_call(context, call)
                for _ in range(count):
                    samples.setdefault("events", []).append(timing.one_call(context, call))
                    for stage, us in staged.sample(context).items():
                        samples.setdefault(stage, []).append(us)
            mega.check()
            found.append(samples)
    return found


def _weights(mega: MegaMoE) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random, with outputs of about the size of inputs."""
    plan, width, device = mega.comm.plan, mega.intermediate, mega.comm.device
    found = []
    for rows, columns in ((2 * width, plan.hidden), (plan.hidden, width)):
        experts = [
            torch.randn(rows, columns, device=device).to(torch.float8_e4m3fn)[None]
            for _ in range(plan.experts_per_rank)
        ]
        scales = torch.full((plan.experts_per_rank, rows // 128, columns // 128), columns**-0.5, device=device)
        found += [torch.cat(experts), scales]
    return found[0], found[1], found[2], found[3]


class _StagedGraph:
    """One call in a graph, with an event behind each stage."""

    def __init__(self, mega: MegaMoE, call: Any) -> None:
        self._events: list[tuple[str, torch.cuda.Event]] = []
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._record("begin")
            mega.after_stage = self._record
            call()
            mega.after_stage = None

    def _record(self, stage: str) -> None:
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()
        self._events.append((stage, event))

    def sample(self, context: RankContext) -> dict[str, float]:
        """Microseconds of each stage of one replay. Collective."""
        torch.distributed.barrier(context.group)
        self._graph.replay()
        torch.cuda.synchronize()
        pairs = zip(self._events, self._events[1:], strict=False)
        return {stage: before.elapsed_time(after) * 1e3 for (_, before), (stage, after) in pairs}


def make_row(
    shape: MegaShape, num_ranks: int, num_tokens: int, iterations: int, by_rank: Sequence[dict[str, list[float]]]
) -> MegaRow:
    """A row from all ranks' samples."""
    p50, p99, slowest_rank = of_the_slowest([samples["graph"] for samples in by_rank])
    ids = [shape.topk_ids(rank, num_tokens) for rank in range(num_ranks)]
    experts = torch.cat([each[each >= 0] for each in ids]).long()
    local = shape.num_experts // num_ranks
    touched = (torch.bincount(experts, minlength=shape.num_experts) > 0).view(num_ranks, local).sum(1).max().item()
    weight_bytes = touched * 3 * shape.hidden * shape.intermediate
    flops = len(experts) / num_ranks * 6 * shape.hidden * shape.intermediate
    busiest = (
        torch.bincount(experts // local, minlength=num_ranks).max().item() * 6 * shape.hidden * shape.intermediate
    )
    sent = max(_bytes_out(shape, num_ranks, rank, ids) for rank in range(num_ranks))
    floor = max(weight_bytes / HBM_GBYTES_PER_S / 1e3, busiest / FP8_TFLOPS / 1e6, sent / LINK_GBYTES_PER_S / 1e3)
    stages = [stage for stage in by_rank[0] if stage not in ("graph", "events")]

    def median(what: str) -> float:
        return of_the_slowest([samples[what] for samples in by_rank])[0]

    sizes = f"t{num_tokens}/h{shape.hidden}/i{shape.intermediate}/e{shape.num_experts}/k{shape.top_k}"
    return MegaRow(
        name=f"mega/ep{num_ranks}/{sizes}/graph",
        p50_us=p50,
        p99_us=p99,
        slowest_rank=slowest_rank,
        events_us=median("events"),
        tflops=flops / p50 / 1e6,
        weights_gbytes_per_s=weight_bytes / p50 / 1e3,
        floor_us=floor,
        stages_us={stage: median(stage) for stage in stages},
        setup=asdict(shape) | {"num_tokens": num_tokens, "num_ranks": num_ranks, "iterations": iterations},
    )


def _bytes_out(shape: MegaShape, num_ranks: int, rank: int, ids: Sequence[torch.Tensor]) -> int:
    """That leave a rank: rows of x in FP8, once for each other rank, and results in bfloat16 for others' tokens."""
    local = shape.num_experts // num_ranks
    holders = torch.where(ids[rank] >= 0, ids[rank] // local, rank)
    to_others = torch.zeros(len(holders), num_ranks, dtype=torch.bool).scatter_(1, holders.long(), True)
    to_others[:, rank] = False
    back = sum(int((ids[other] // local == rank).sum()) for other in range(num_ranks) if other != rank)
    return int(to_others.sum()) * (shape.hidden + shape.hidden // 32) + back * shape.hidden * 2


def table(rows: Sequence[MegaRow]) -> Table:
    """For people."""
    stages = list(rows[0].stages_us) if rows else []
    headers = ["tokens", "p50 µs", "p99 µs", "events", "TFLOP/s", "weights\nGB/s", "floor µs", "times\nfloor", *stages]
    result = Table(*headers, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in result.columns:
        column.justify = "right"
    for row in rows:
        numbers = (row.p50_us, row.p99_us, row.events_us, row.tflops, row.weights_gbytes_per_s, row.floor_us)
        ratio = f"{row.p50_us / row.floor_us:.2f}" if row.floor_us else "-"
        cells = [f"{value:,.0f}" for value in numbers] + [ratio] + [f"{us:,.0f}" for us in row.stages_us.values()]
        result.add_row(str(row.setup["num_tokens"]), *cells)
    return result
