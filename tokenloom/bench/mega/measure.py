"""Takes the samples of ``tokenloom bench mega`` on one rank: of our layer and others, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tokenloom.bench.common import timing
from tokenloom.bench.mega.clock import Clock, StagedGraph, try_capture
from tokenloom.bench.mega.others import OTHERS, Other
from tokenloom.bench.mega.rows import Beside, Measured, Samples
from tokenloom.bench.mega.work import MegaShape
from tokenloom.compat.deep_gemm.testing import calc_diff
from tokenloom.inference.mega_moe import MegaMoE
from tokenloom.inference.trace import MegaTimes
from tokenloom.ops.gemm import interleave_gate_and_up
from tokenloom.runtime.processes import RankContext

WEIGHT_SEED = 1_000_000
"""Seed of expert 0. No rank has it: weights must not resemble tokens."""


@torch.no_grad()
def measure_on_rank(
    context: RankContext,
    shape: MegaShape,
    tokens: Sequence[int],
    iterations: int,
    cold: bool,
    against: Sequence[str],
    traced: bool = False,
) -> list[Measured]:
    """What this rank finds for each number of tokens. Collective.

    Args:
        cold: overwrite L2 before each sample, and let a sample be one call.
        against: names of OTHERS, which are measured too.
        traced: trace a call of the last number of tokens.
    """
    clock = Clock(context, cold)
    found: list[Measured] = []
    with MegaMoE(
        context.group,
        num_experts=shape.num_experts,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        top_k=shape.top_k,
        max_tokens_per_rank=max(tokens),
        num_shared_experts=shape.num_shared_experts,
        device=context.device,
    ) as mega:
        w1, w1_scales, w2, w2_scales = make_weights(shape, context)
        weights = ((w1, w1_scales), (w2, w2_scales))
        others = {name: OTHERS[name](context.group, shape, max(tokens), *weights) for name in against}
        w1 = interleave_gate_and_up(w1)
        mega.use_weights(w1, w1_scales, w2, w2_scales)
        for i, num_tokens in enumerate(tokens):
            if context.rank == 0:
                context.report(f"{num_tokens} tokens on every rank")
            last = i == len(tokens) - 1
            found.append(_measure(clock, mega, others, shape, num_tokens, iterations, traced and last))
        # Only now: after a failure the others may never reach a collective.
        for other in others.values():
            other.close()
    return found


def make_weights(
    shape: MegaShape, context: RankContext
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random weights of this rank's E / W experts and the S shared ones; outputs are about as large as inputs.

    Returns:
        w1: float8_e4m3fn [E / W + S, 2I, H], gates first.
        w1_scales: float32 [E / W + S, 2I / 128, H / 128].
        w2: float8_e4m3fn [E / W + S, H, I].
        w2_scales: float32 [E / W + S, H / 128, I / 128].
    """
    device, local = context.device, shape.num_experts // context.num_ranks
    experts = [*range(context.rank * local, (context.rank + 1) * local)]
    # Numbers that no rank has: shared experts are the same everywhere.
    experts += range(shape.num_experts, shape.num_experts + shape.num_shared_experts)
    sizes = ((2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate))
    found: list[torch.Tensor] = []
    for rows, columns in sizes:
        found.append(torch.empty(len(experts), rows, columns, dtype=torch.float8_e4m3fn, device=device))
        found.append(torch.empty(len(experts), rows // 128, columns // 128, dtype=torch.float32, device=device))
    w1, w1_scales, w2, w2_scales = found
    for i, expert in enumerate(experts):
        generator = torch.Generator(device).manual_seed(WEIGHT_SEED + expert)
        for values, scales in ((w1[i], w1_scales[i]), (w2[i], w2_scales[i])):
            values.copy_(torch.randn(values.shape, generator=generator, dtype=torch.float32, device=device))
            # Scales differ, so that outputs differ if somebody takes the scale of another block.
            scales.uniform_(0.5, 1.5, generator=generator).mul_(values.shape[1] ** -0.5)
    return w1, w1_scales, w2, w2_scales


@dataclass(frozen=True)
class Contestant:
    """A layer that is measured on fixed inputs.

    Attributes:
        call: an eager call, which writes ``out``.
        out: bfloat16 [T, H].
        graph: a graph of Clock.calls calls, or None.
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


def _measure(
    clock: Clock,
    mega: MegaMoE,
    others: Mapping[str, Other],
    shape: MegaShape,
    num_tokens: int,
    iterations: int,
    traced: bool,
) -> Measured:
    context = clock.context
    generator = torch.Generator(context.device).manual_seed(context.rank)
    drawn: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": context.device}
    x = torch.randn(num_tokens, shape.hidden, **drawn).bfloat16()
    ids = shape.topk_ids(context.rank, num_tokens).to(context.device)
    weights = torch.rand(num_tokens, shape.top_k, **drawn)
    weights.masked_fill_(ids < 0, 0)  # not every layer promises to leave the weight of an unused place unread
    out = torch.empty_like(x)

    def call() -> None:
        mega(x, ids, weights, out=out)

    timing.warm_up(call)
    ours = Contestant(call, out, clock.capture(call), Samples())
    staged = StagedGraph(clock, mega, call)
    theirs = {name: _contestant(clock, other, x, ids, weights) for name, other in others.items()}
    take_turns(clock, [ours, *theirs.values()], staged, iterations)
    beside = {}
    for name, each in theirs.items():
        beside[name] = Beside(each.samples, calc_diff(ours.output(clock), each.output(clock)))
    found = Measured(ours.samples, beside)
    if traced:
        found = replace(found, traced=_traced_call(clock, mega, call))
    mega.check()
    return found


def _contestant(clock: Clock, other: Other, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Contestant:
    out = torch.empty_like(x)
    call = other.prepared_call(x, ids, weights, out)
    timing.warm_up(call)
    graph, why_not = try_capture(clock, call, out)
    return Contestant(call, out, graph, Samples(why_no_graph=why_not))


def _traced_call(clock: Clock, mega: MegaMoE, call: Callable[[], Any]) -> MegaTimes:
    times = mega.trace()
    timing.warm_up(call)
    graph = timing.capture(call, calls=1)
    clock.replay_us(graph)
    times.zero_()
    clock.replay_us(graph)
    return times.cpu()


def take_turns(clock: Clock, contestants: Sequence[Contestant], staged: StagedGraph, iterations: int) -> None:
    """Fill everybody's samples in timing.ROUNDS rounds, so that a drifting clock hits all alike. Collective.

    Every second round goes the other way round: whoever comes behind calls that draw much power has lower clocks.

    Args:
        contestants: the first is the one whose stages ``staged`` measures.
        iterations: samples of each.
    """
    for number, count in enumerate(timing.shares(iterations)):
        order = contestants[::-1] if number % 2 else contestants
        # The first call after somebody else's, or by another clock, finds cold caches and cold code on the host.
        for each in order:
            if each.graph is not None:
                clock.replay_us(each.graph)
                each.samples.graph.extend(clock.replay_us(each.graph) for _ in range(count))
        for each in order:
            clock.call_us(each.call)
            each.samples.events.extend(clock.call_us(each.call) for _ in range(count))
        staged.sample()
        for _ in range(count):
            for stage, us in staged.sample().items():
                contestants[0].samples.stages.setdefault(stage, []).append(us)
