"""Takes the samples of ``tokenloom bench mega`` on one rank: ours and a rival, in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from tokenloom.bench import timing
from tokenloom.bench.mega_rival import DeepGemm, difference
from tokenloom.bench.mega_rows import Measured, Samples
from tokenloom.bench.mega_trace import TracedCall
from tokenloom.bench.mega_work import MegaShape
from tokenloom.inference.mega_moe import MegaMoE
from tokenloom.inference.schedules import schedule_for
from tokenloom.ops.gemm import interleave_gate_and_up
from tokenloom.runtime.processes import RankContext

FLUSHED_L2S = 4
"""Sizes of L2 that are overwritten before a cold sample: more than two, for L2 need not evict what is oldest."""
WEIGHT_SEED = 1_000_000
"""Of expert 0; not that of a rank, whose tokens would be like the weights."""


@torch.no_grad()
def measure_on_rank(
    context: RankContext,
    shape: MegaShape,
    tokens: Sequence[int],
    iterations: int,
    cold: bool,
    against: bool,
    traced: bool = False,
) -> list[Measured]:
    """For each number of tokens, what this rank found. Collective.

    Args:
        cold: overwrite L2 before each sample, and let a sample be one call.
        against: measure deep_gemm too.
        traced: look at a call of the last number of tokens.
    """
    sizes = (shape.num_experts, shape.hidden, shape.intermediate, shape.top_k, max(tokens))
    clock = Clock(context, cold)
    found: list[Measured] = []
    with MegaMoE(context.group, *sizes, num_shared_experts=shape.num_shared_experts, device=context.device) as mega:
        w1, w1_scales, w2, w2_scales = make_weights(shape, context)
        rival = DeepGemm(context.group, shape, max(tokens), (w1, w1_scales), (w2, w2_scales)) if against else None
        w1 = interleave_gate_and_up(w1)
        mega.use_weights(w1, w1_scales, w2, w2_scales)
        for i, num_tokens in enumerate(tokens):
            if context.rank == 0:
                context.report(f"{num_tokens} tokens on every rank")
            last = i == len(tokens) - 1
            found.append(_measure(clock, mega, rival, shape, num_tokens, iterations, traced and last))
        # Only now: after a failure the others may never come to what is collective.
        if rival is not None:
            rival.close()
    return found


def make_weights(
    shape: MegaShape, context: RankContext
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of this rank's E / W experts and the shared ones, random, with outputs of about the size of inputs.

    Returns:
        w1: float8_e4m3fn [E / W + S, 2I, H], gates first; float32 [E / W + S, 2I / 128, H / 128]; w2: float8_e4m3fn
        [E / W + S, H, I]; float32 [E / W + S, H / 128, I / 128].
    """
    device, local = context.device, shape.num_experts // context.num_ranks
    experts = [*range(context.rank * local, (context.rank + 1) * local)]
    # Numbers that no rank has: shared experts are the same everywhere.
    experts += range(shape.num_experts, shape.num_experts + shape.num_shared_experts)
    sizes = ((2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate))
    found: list[torch.Tensor] = []
    for rows, columns in sizes:
        found.append(torch.empty(len(experts), rows, columns, dtype=torch.float8_e4m3fn, device=device))
        found.append(torch.empty(len(experts), rows // 128, columns // 128, device=device))
    w1, w1_scales, w2, w2_scales = found
    for i, expert in enumerate(experts):
        generator = torch.Generator(device).manual_seed(WEIGHT_SEED + expert)
        for values, scales in ((w1[i], w1_scales[i]), (w2[i], w2_scales[i])):
            values.copy_(torch.randn(values.shape, generator=generator, device=device))
            # Not all alike, so that outputs differ if somebody takes the scale of another block.
            scales.uniform_(0.5, 1.5, generator=generator).mul_(values.shape[1] ** -0.5)
    return w1, w1_scales, w2, w2_scales


def _measure(
    clock: Clock,
    mega: MegaMoE,
    rival: DeepGemm | None,
    shape: MegaShape,
    num_tokens: int,
    iterations: int,
    traced: bool,
) -> Measured:
    context = clock.context
    generator = torch.Generator(context.device).manual_seed(context.rank)
    x = torch.randn(num_tokens, shape.hidden, generator=generator, device=context.device).bfloat16()
    ids = shape.topk_ids(context.rank, num_tokens).to(context.device)
    weights = torch.rand(num_tokens, shape.top_k, generator=generator, device=context.device)
    weights.masked_fill_(ids < 0, 0)  # not every layer promises to leave the weight of an unused place unread
    out = torch.empty_like(x)

    def call() -> None:
        mega(x, ids, weights, out=out)

    _warm_up(call)
    ours = Contestant(call, out, clock.capture(call), Samples())
    staged = StagedGraph(clock, mega, call)
    contestants = [ours]
    theirs = None
    if rival is not None:
        theirs = _contestant(clock, rival, x, ids, weights)
        contestants.append(theirs)
    take_turns(clock, contestants, staged, iterations)
    found = Measured(ours.samples)
    if theirs is not None:
        found = Measured(ours.samples, theirs.samples, difference(ours.output(clock), theirs.output(clock)))
    if traced:
        found = replace(found, traced=_traced_call(clock, mega, num_tokens, call))
    mega.check()
    return found


def _traced_call(clock: Clock, mega: MegaMoE, num_tokens: int, call: Callable[[], Any]) -> TracedCall:
    gemm1, gemm2 = mega.trace_gemms()
    mega.schedule = replace(schedule_for(num_tokens, clock.context.num_ranks), waves=1)  # or stages would overlap
    _warm_up(call)
    staged = StagedGraph(clock, mega, call)
    staged.sample()
    for times in (gemm1, gemm2):
        times.zero_()
    stages = staged.sample()
    return TracedCall(stages, {"gemm1": gemm1.cpu(), "gemm2": gemm2.cpu()})


def _warm_up(call: Callable[[], Any]) -> None:
    """A capture may neither compile nor allocate buffers."""
    for _ in range(timing.EAGER_CALLS):
        call()
    torch.cuda.synchronize()


def _contestant(
    clock: Clock, rival: DeepGemm, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> Contestant:
    out = torch.empty_like(x)
    call = rival.prepared_call(x, ids, weights, out)
    _warm_up(call)
    graph, why_not = try_capture(clock, call, out)
    return Contestant(call, out, graph, Samples(why_no_graph=why_not))


class Clock:
    """Takes samples, in microseconds, on one rank. Everything is collective.

    Args:
        context: the rank, on a GPU.
        cold: overwrite L2 before each sample, so that weights come from HBM. A graph then has one call, for the next
            would find what the first has left.

    Attributes:
        calls: in a graph.
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
        return _capture(lambda: [call() for _ in range(self.calls)])

    def cool(self) -> None:
        """Overwrite L2 if samples are cold; the next sample on the current stream waits for it."""
        if self._overwritten is not None:
            self._overwritten.zero_()

    def replay_us(self, graph: torch.cuda.CUDAGraph) -> float:
        """Of one of the calls in a graph."""
        self.cool()
        # It divides by the calls of timing.capture's graphs.
        return timing.one_replay(self.context, graph) * timing.GRAPH_CALLS / self.calls

    def call_us(self, call: Callable[[], Any]) -> float:
        """Of an eager call."""
        self.cool()
        return timing.one_call(self.context, call)


def _capture(calls: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    # A capture that fails leaves its own stream current; the outer context brings back the one before.
    # thread_local: NCCL's watchdog thread asks for its events meanwhile, which would end a capture of the other modes.
    same_stream = torch.cuda.stream(torch.cuda.current_stream())
    with same_stream, torch.cuda.graph(graph, capture_error_mode="thread_local"):
        calls()
    return graph


def try_capture(clock: Clock, call: Callable[[], Any], out: torch.Tensor) -> tuple[torch.cuda.CUDAGraph | None, str]:
    """A graph of somebody else's calls, whose replays were seen to write ``out``; or None and why not. Collective, and
    the same on all ranks."""
    context = clock.context
    graph, why_not = None, ""
    try:
        graph = clock.capture(call)
    except Exception as error:  # whatever a library raises where it does what a capture forbids
        first = error.__context__ or error  # the end of a capture fails too, and says less
        why_not = (str(first).splitlines() or [type(first).__name__])[0]
    if not _on_all_ranks(context, graph is not None):
        return None, why_not or "another rank could not"
    assert graph is not None
    out.fill_(torch.nan)
    clock.replay_us(graph)
    # Kernels that went to another stream ran during the capture, and are not in the graph.
    if not _on_all_ranks(context, not out.isnan().any()):
        return None, "a replay did not write its output"
    return graph, ""


def _on_all_ranks(context: RankContext, ours: bool) -> bool:
    answer = torch.tensor(int(ours), device=context.device)
    dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=context.group)
    return bool(answer)


@dataclass(frozen=True)
class Contestant:
    """A layer that is measured on fixed inputs.

    Attributes:
        call: an eager call, which writes ``out``, bfloat16 [T, H].
        graph: of Clock.calls calls, or None.
        samples: filled as they are taken.
    """

    call: Callable[[], Any]
    out: torch.Tensor
    graph: torch.cuda.CUDAGraph | None
    samples: Samples

    def output(self, clock: Clock) -> torch.Tensor:
        """``out``, wiped and written once more by what was measured."""
        self.out.fill_(torch.nan)
        if self.graph is None:
            clock.call_us(self.call)
        else:
            clock.replay_us(self.graph)
        return self.out


class StagedGraph:
    """One call of ours in a graph, with an event behind each stage. Collective."""

    def __init__(self, clock: Clock, mega: MegaMoE, call: Callable[[], Any]) -> None:
        self._clock = clock
        self._events: list[tuple[str, torch.cuda.Event]] = []

        def staged_call() -> None:
            self._record("begin")
            mega.after_stage = self._record
            call()
            mega.after_stage = None

        self._graph = _capture(staged_call)

    def _record(self, stage: str) -> None:
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()
        self._events.append((stage, event))

    def sample(self) -> dict[str, float]:
        """Microseconds of each stage of one replay, in their order; ranks meet in a collective right before it."""
        self._clock.replay_us(self._graph)
        pairs = zip(self._events, self._events[1:], strict=False)
        return {stage: before.elapsed_time(after) * 1e3 for (_, before), (stage, after) in pairs}


def take_turns(clock: Clock, contestants: Sequence[Contestant], staged: StagedGraph, iterations: int) -> None:
    """Fill everybody's samples in timing.ROUNDS rounds, so that clocks that drift meet all alike; the first contestant
    is the one whose stages are measured."""
    for count in timing.shares(iterations):
        # The first call after somebody else's, or by another clock, finds cold caches, and the host's code cold too.
        for each in contestants:
            if each.graph is not None:
                clock.replay_us(each.graph)
                each.samples.graph.extend(clock.replay_us(each.graph) for _ in range(count))
        for each in contestants:
            clock.call_us(each.call)
            each.samples.events.extend(clock.call_us(each.call) for _ in range(count))
        staged.sample()
        for _ in range(count):
            for stage, us in staged.sample().items():
                contestants[0].samples.stages.setdefault(stage, []).append(us)
