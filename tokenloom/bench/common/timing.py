"""How long a call takes: samples of one rank, in microseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tokenloom.runtime.processes import RankContext
from tokenloom.tune.samples import call_us

GRAPH_CALLS = 10
"""Calls in a captured graph. Even, because dispatches alternate between two receive buffers: each replay then starts
with the buffer that the one before started with."""
ROUNDS = 3
"""Turns of everybody measured, so that a drifting clock hits all of them alike."""
START_LIMIT_S, SAMPLE_LIMIT_S = 500.0, 5.0
"""Longest times to make what is measured, and for one sample of everybody."""
EAGER_CALLS = 2
"""Calls before a capture, which may neither compile nor allocate: one for each receive buffer."""


def shares(iterations: int) -> list[int]:
    """Samples to take in each of the ROUNDS turns."""
    return [iterations * (number + 1) // ROUNDS - iterations * number // ROUNDS for number in range(ROUNDS)]


def limit_s(iterations: int) -> float:
    """Longest time, in seconds, for so many samples of everybody who is measured together, and what goes before."""
    return START_LIMIT_S + SAMPLE_LIMIT_S * iterations


def one_call(context: RankContext, call: Callable[[], Any], queued: bool = False) -> float:
    """Microseconds of one call, as :func:`tokenloom.tune.samples.call_us` takes them."""
    return call_us(context.group, context.device, call, queued)


def warm_up(call: Callable[[], Any]) -> None:
    """Make the calls that a capture needs before it, and wait for them. Collective if the call is."""
    for _ in range(EAGER_CALLS):
        call()
    torch.cuda.synchronize()


def capture(call: Callable[[], Any], calls: int = GRAPH_CALLS) -> torch.cuda.CUDAGraph:
    """Capture ``calls`` calls, which need :func:`warm_up` first. Collective if the call is."""
    graph = torch.cuda.CUDAGraph()
    # A failed capture leaves its own stream current; the outer context restores the one before.
    same_stream = torch.cuda.stream(torch.cuda.current_stream())
    # thread_local: NCCL's watchdog thread queries events meanwhile, which would invalidate a capture in other modes.
    with same_stream, torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    return graph


def one_replay(context: RankContext, graph: torch.cuda.CUDAGraph, calls: int = GRAPH_CALLS) -> float:
    """Microseconds of one of the ``calls`` calls in a graph, by events around its replay.

    The replay is queued behind a collective, so that the GPUs start together: hosts leave a barrier tens of
    microseconds apart, as long as some calls take.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    aligned = torch.zeros(1, dtype=torch.float32, device=context.device)
    dist.barrier(context.group)
    dist.all_reduce(aligned, group=context.group)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / calls
