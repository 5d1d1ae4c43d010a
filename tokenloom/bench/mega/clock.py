"""How ``tokenloom bench mega`` times calls: eager, in graphs, stage by stage, with a warm or a cold L2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tokenloom.bench.common import timing
from tokenloom.inference.mega_moe import MegaMoE
from tokenloom.runtime.processes import RankContext

FLUSHED_L2S = 4
"""Size of what is overwritten before a cold sample, in sizes of L2. More than two, because L2 need not evict the
oldest lines."""


class Clock:
    """Takes samples, in microseconds, on one rank. Everything is collective.

    Args:
        context: the rank, on a GPU.
        cold: overwrite L2 before each sample, so that weights come from HBM. A graph then has one call, because the
            next would find what the first has left.

    Attributes:
        context: the rank.
        calls: calls in a graph.
    """

    def __init__(self, context: RankContext, cold: bool) -> None:
        self.context = context
        self.calls = 1 if cold else timing.GRAPH_CALLS
        self._overwritten: torch.Tensor | None = None
        if cold:
            l2_bytes = torch.cuda.get_device_properties(context.device).L2_cache_size
            self._overwritten = torch.empty(FLUSHED_L2S * l2_bytes, dtype=torch.uint8, device=context.device)

    def capture(self, call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        """A graph of ``calls`` calls."""
        return timing.capture(call, self.calls)

    def cool(self) -> None:
        """Overwrite L2 if samples are cold; the next sample on the current stream waits for it."""
        if self._overwritten is not None:
            self._overwritten.zero_()

    def replay_us(self, graph: torch.cuda.CUDAGraph) -> float:
        """Microseconds of one of the calls in a graph of :meth:`capture`."""
        self.cool()
        return timing.one_replay(self.context, graph, self.calls)

    def call_us(self, call: Callable[[], Any]) -> float:
        """Microseconds of an eager call."""
        self.cool()
        return timing.one_call(self.context, call)


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


class StagedGraph:
    """One call of ours in a graph, with an event behind each stage. Making one is collective."""

    def __init__(self, clock: Clock, mega: MegaMoE, call: Callable[[], Any]) -> None:
        self._clock = clock
        self._events: list[tuple[str, torch.cuda.Event]] = []

        def staged_call() -> None:
            self._record("begin")
            mega.after_stage = self._record
            call()
            mega.after_stage = None

        self._graph = timing.capture(staged_call, calls=1)

    def _record(self, stage: str) -> None:
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()
        self._events.append((stage, event))

    def sample(self) -> dict[str, float]:
        """Microseconds of each stage of one replay, in their order. Ranks meet in a collective right before it."""
        self._clock.replay_us(self._graph)
        pairs = zip(self._events, self._events[1:], strict=False)
        return {stage: before.elapsed_time(after) * 1e3 for (_, before), (stage, after) in pairs}
