"""Clocks of one rank: microseconds of a call, alone or in a CUDA graph, with a warm or a cold L2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tokenloom.runtime.processes import RankContext
from tokenloom.tune.samples import call_us

Made = TypeVar("Made")
GRAPH_CALLS = 10
"""Calls in a captured graph. Even, because dispatches alternate between two receive buffers: each replay then starts
with the buffer that the one before started with."""
STEADY_WARM_S, STEADY_S = 0.6, 0.8
"""Replays without a pause before a steady sample, and those of it. A GPU at its power limit lowers its clock within
tens of milliseconds; behind a pause a call is up to 16% faster (microbench/notebook/gemm.md)."""
EAGER_CALLS = 2
"""Calls before a capture, which may neither compile nor allocate: one for each receive buffer."""


def one_call(context: RankContext, call: Callable[[], Any], queued: bool = False) -> float:
    """Microseconds of one call, as :func:`tokenloom.tune.samples.call_us` takes them."""
    return call_us(context.group, context.device, call, queued)


def warm_up(call: Callable[[], Any]) -> int:
    """Make the calls that a capture needs before it, and wait for them. Collective if the call is.

    Returns:
        Bytes of memory that they have taken and not given back.
    """

    def calls() -> None:
        for _ in range(EAGER_CALLS):
            call()

    return taken_bytes(calls)[1]


def taken_bytes(make: Callable[[], Made]) -> tuple[Made, int]:
    """Return what is made, and the bytes of GPU memory that it takes."""
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    made = make()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return made, before - torch.cuda.mem_get_info()[0]


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


def replays_us(graph: torch.cuda.CUDAGraph, warm: int, timed: int, midway: Callable[[], Any] | None = None) -> float:
    """Microseconds of one of the timed replays, which follow those that warm up, all without a pause.

    Args:
        midway: function to call while the GPU is in the middle of the timed replays, or None.
    """
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    for _ in range(warm):
        graph.replay()
    start.record()
    for number in range(timed):
        if midway is not None and number == timed // 2:
            middle.record()
        graph.replay()
    end.record()
    if midway is not None:
        middle.synchronize()
        midway()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / timed


FLUSHED_L2S = 4
"""Size of what is overwritten before a cold sample, in sizes of L2. More than two, because L2 need not evict the
oldest lines."""


class Clock:
    """Takes samples, in microseconds, on one rank. Everything is collective.

    Args:
        context: the rank, on a GPU.
        cold: overwrite L2 before each sample, so that weights come from HBM. A graph then has one call, because the
            next would find what the first has left.
    """

    def __init__(self, context: RankContext, cold: bool) -> None:
        self.context, self.cold = context, cold
        self.calls = 1 if cold else GRAPH_CALLS
        self._overwritten: torch.Tensor | None = None
        if cold:
            l2_bytes = torch.cuda.get_device_properties(context.device).L2_cache_size
            self._overwritten = torch.empty(FLUSHED_L2S * l2_bytes, dtype=torch.uint8, device=context.device)

    def capture(self, call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        """A graph of ``calls`` calls."""
        return capture(call, self.calls)

    def cool(self) -> None:
        """Overwrite L2 if samples are cold; the next sample on the current stream waits for it."""
        if self._overwritten is not None:
            self._overwritten.zero_()

    def replay_us(self, graph: torch.cuda.CUDAGraph) -> float:
        """Microseconds of one of the calls in a graph of :meth:`capture`."""
        self.cool()
        return one_replay(self.context, graph, self.calls)

    def steady_us(
        self,
        graph: torch.cuda.CUDAGraph,
        warm_s: float = STEADY_WARM_S,
        timed_s: float = STEADY_S,
        midway: Callable[[], Any] | None = None,
    ) -> float:
        """Microseconds of one of the calls in a graph, in replays that follow each other without a pause.

        Args:
            warm_s, timed_s: seconds of the replays before the sample, and of those in it.
            midway: as in :func:`replays_us`.
        """
        one_us = torch.tensor(self.replay_us(graph) * self.calls, dtype=torch.float64, device=self.context.device)
        dist.all_reduce(one_us, op=dist.ReduceOp.MAX, group=self.context.group)  # as many replays on all ranks
        warm, timed = (int(seconds * 1e6 / float(one_us)) + 1 for seconds in (warm_s, timed_s))
        return replays_us(graph, warm, timed, midway) / self.calls

    def call_us(self, call: Callable[[], Any]) -> float:
        """Microseconds of an eager call."""
        self.cool()
        return one_call(self.context, call)


def try_capture(clock: Clock, call: Callable[[], Any], out: torch.Tensor) -> tuple[torch.cuda.CUDAGraph | None, str]:
    """Capture somebody else's calls, whose replays must be seen to write ``out``. Collective.

    Returns:
        The graph, or None and the reason; the same on all ranks.
    """
    context = clock.context
    graph, why_not = None, ""
    try:
        graph = clock.capture(call)
    except Exception as error:  # whatever a library raises where it does what a capture forbids
        first = error.__context__ or error  # the end of a capture fails too, and says less
        why_not = str(first).strip().partition("\n")[0] or type(first).__name__
    reasons: list[str] = [""] * context.num_ranks
    dist.all_gather_object(reasons, why_not, group=context.group)
    for rank, reason in enumerate(reasons):
        if reason:
            return None, f"rank {rank}: {reason}"
    assert graph is not None
    out.fill_(torch.nan)
    clock.replay_us(graph)
    # Kernels on another stream ran during the capture, and are not in the graph.
    if not _on_all_ranks(context, not out.isnan().any()):
        return None, "a replay did not write its output"
    return graph, ""


def _on_all_ranks(context: RankContext, ours: bool) -> bool:
    answer = torch.tensor(int(ours), dtype=torch.int64, device=context.device)
    dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=context.group)
    return bool(answer)
