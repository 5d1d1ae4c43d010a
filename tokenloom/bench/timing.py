"""How long a call takes: samples of one rank, in microseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tokenloom.runtime.processes import RankContext
from tokenloom.tune.samples import call_us

GRAPH_CALLS = 10
"""Calls in a captured graph. Even, so that the two receive regions, which dispatches use in turn, take turns from
replay to replay too."""
ROUNDS = 3
"""Turns that everybody measured takes, so that clocks that drift meet all of them alike."""
EAGER_CALLS = 2
"""Before a capture, which may neither compile nor allocate buffers: one call for each receive region."""


def shares(iterations: int) -> list[int]:
    """Samples to take in each of the ROUNDS turns."""
    return [iterations * (number + 1) // ROUNDS - iterations * number // ROUNDS for number in range(ROUNDS)]


def one_call(context: RankContext, call: Callable[[], Any], queued: bool = False) -> float:
    """Microseconds of one call, as :func:`tokenloom.tune.samples.call_us` takes them."""
    return call_us(context.group, context.device, call, queued)


def capture(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of GRAPH_CALLS calls. Collective, as the calls are."""
    for _ in range(EAGER_CALLS):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's watchdog thread asks for its events meanwhile, which would end a capture of the other modes.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(GRAPH_CALLS):
            call()
    return graph


def one_replay(context: RankContext, graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one of the calls in a graph of :func:`capture`, by events around the replay.

    The replay is queued behind a collective, so that GPUs rather than their hosts start together: hosts leave a
    barrier tens of microseconds apart, as long as some calls take.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    aligned = torch.zeros(1, device=context.device)
    dist.barrier(context.group)
    dist.all_reduce(aligned, group=context.group)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / GRAPH_CALLS
