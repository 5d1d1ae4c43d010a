"""Measures dispatch and combine: the whole operation, as a user calls it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from tokenloom import backends
from tokenloom.bench import traffic
from tokenloom.bench.cases import ROUTING_SEED, Case
from tokenloom.bench.rows import Row, make_row
from tokenloom.bench.setup import machine_setup
from tokenloom.communicator import Communicator, Layout
from tokenloom.launch import RankContext, RankPool
from tokenloom.quant import quantize_fp8

TRANSPORTS = {"cpu": "gloo", "cuda": "nccl"}
DEFAULT_ITERATIONS = {"cpu": 20, "cuda": 100}
LIMIT_S = 500.0
"""For one backend, layout and dtype."""


def measure(
    pool: RankPool, cases: list[Case], iterations: int, starting: Callable[[str], None] = lambda name: None
) -> Iterator[Row]:
    """Measure the cases over every backend that works here, row by row.

    Args:
        pool: the ranks.
        iterations: timed ones, after a fifth of their number to warm up.
        starting: is told what is about to be measured.

    Raises:
        RankFailed: a rank failed.
    """
    setup = machine_setup(pool.device)
    found = backends.availability(TRANSPORTS[pool.device], torch.device(pool.device))
    for case in cases:
        plan = case.plan(pool.num_ranks)
        rows = traffic.rows_between(plan, [case.topk_ids(rank) for rank in range(pool.num_ranks)])
        for backend in (each.name for each in found if each.works):
            for layout in case.layouts:
                for dtype in case.dtypes:
                    starting(f"{case.name}: {backend}, layout {layout}, {dtype}")
                    warm_up = max(1, iterations // 5)
                    arguments = (case, backend, layout, dtype, warm_up, iterations)
                    results = pool.run(measure_on_rank, *arguments, limit_s=LIMIT_S)
                    sizes = {
                        "case": case.name,
                        "backend": backend,
                        "layout": layout,
                        "dtype": dtype,
                        "num_ranks": plan.num_ranks,
                        "num_tokens": case.num_tokens,
                        "hidden": plan.hidden,
                        "top_k": plan.top_k,
                        "num_experts": plan.num_experts,
                        "routing": "uniform",
                        "routing_seed": ROUTING_SEED,
                        "iterations": iterations,
                        "warm_up_iterations": warm_up,
                    }
                    moved = {"dispatch": traffic.dispatch_traffic(plan, rows, dtype)}
                    if "combine" in results[0]:
                        moved["combine"] = traffic.combine_traffic(plan, rows, dtype)
                    for operation, bytes_moved in moved.items():
                        times = [result[operation] for result in results]
                        yield make_row(operation, times, bytes_moved, setup | sizes)


@torch.no_grad()
def measure_on_rank(
    context: RankContext, case: Case, backend: str, layout: Layout, dtype: str, warm_up: int, iterations: int
) -> dict[str, list[float]]:
    """Times on this rank, in microseconds, of every iteration, by operation. Collective.

    All ranks leave a barrier together before every operation. FP8 tokens have a dispatch only: what experts send
    home is BF16, and the same as after a dispatch of BF16.
    """
    plan = case.plan(context.num_ranks)
    generator = torch.Generator().manual_seed(context.rank)
    values = torch.randn(case.num_tokens, plan.hidden, generator=generator).bfloat16()
    weights = torch.rand(case.num_tokens, plan.top_k, generator=generator).to(context.device)
    ids = case.topk_ids(context.rank).to(context.device)
    x: Any = values.to(context.device)
    if dtype == "fp8":
        x = quantize_fp8(x)
    times: dict[str, list[float]] = {"dispatch": []} if dtype == "fp8" else {"dispatch": [], "combine": []}
    with Communicator(
        context.group,
        num_experts=plan.num_experts,
        hidden=plan.hidden,
        top_k=plan.top_k,
        max_tokens_per_rank=case.num_tokens,
        backend=backend,
        device=context.device,
    ) as comm:
        y = None
        for number in range(warm_up + iterations):
            routed, dispatch_us = _timed(context, comm.dispatch, x, ids, weights, layout=layout)
            taken = {"dispatch": dispatch_us}
            if dtype != "fp8":
                y = routed.tokens.clone() if y is None else y
                _, taken["combine"] = _timed(context, comm.combine, y, routed)
            if number >= warm_up:
                for operation, us in taken.items():
                    times[operation].append(us)
    return times


def _timed(context: RankContext, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, float]:
    """What the operation returns, and the microseconds it took: by events on a GPU, else by the host's clock."""
    dist.barrier(context.group)
    if context.device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = operation(*args, **kwargs)
        end.record()
        end.synchronize()
        return result, start.elapsed_time(end) * 1e3
    began = time.perf_counter()
    result = operation(*args, **kwargs)
    return result, (time.perf_counter() - began) * 1e6
