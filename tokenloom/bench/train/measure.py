"""Takes the samples of ``tokenloom bench train`` on one rank: ours, a rival and the baselines, in turns."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tokenloom.bench.common import timing
from tokenloom.bench.common.setup import TRANSPORTS
from tokenloom.bench.common.shape import DTYPES
from tokenloom.bench.rivals.torch_layer import Experts, own_experts, torch_experts, torch_layer
from tokenloom.bench.train.check import choose, compare_all, compare_with_reference
from tokenloom.bench.train.rows import LOCAL, ONE, OURS, PASSES, Measured
from tokenloom.bench.train.work import Problem, TrainOptions, TrainShape, Weights, make_problem
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.training.layer import ExpertParallelMoE
from tokenloom.tune import choices

WEIGHT_SEED = 1_000_000
"""Seed of the weights. No rank has it: weights must not resemble tokens."""
WARM_UP_STEPS = 2
"""Steps of everybody at the beginning of each turn, because caches and memory are left as somebody else used them."""


def measure_on_rank(context: RankContext, shape: TrainShape, options: TrainOptions) -> Measured:
    """What this rank finds. Collective."""
    plan, dtype = shape.plan(context.num_ranks), DTYPES[options.dtype]
    layer = ExpertParallelMoE(
        context.group,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        max_tokens_per_rank=plan.max_tokens_per_rank,
        strategy=options.strategy,
        overlap=options.overlap,
        redispatch_in_backward=options.redispatch_in_backward,
        pool_rows=options.pool_rows,
        device=context.device,
        dtype=dtype,
    )
    ranks = RankGroup(context.group, device=context.device)

    def say(what: str) -> None:
        if context.rank == 0:
            context.report(what)

    with closing(layer.comm):
        say("drawing weights and tokens")
        layer.reset_parameters(seed=WEIGHT_SEED)
        weights = Weights(layer.router_weight, (layer.experts.w1, layer.experts.w2))
        problem = make_problem(plan.max_tokens_per_rank, weights, shape.top_k, options.skew, context.rank)
        ours = Contestant(lambda: layer(problem.x)[0], problem.gradients)
        rival = _of_torch(problem, shape.top_k, torch_experts, ranks)
        say("comparing with the rival and the reference")
        found = ours.results()
        beside_rival = compare_all(rival.results(), found)
        checked = compare_with_reference(context, problem, shape.top_k, found) if options.check else None
        del found
        saved = layer.saved_activations(problem.x)
        skipped: dict[str, str] = {}
        contestants = {
            OURS: ours,
            TRANSPORTS[context.device.type]: rival,
            LOCAL: _local(problem, shape.top_k, skipped),
            ONE: _one(context, ranks, shape, options, skipped),  # last: it may take whatever memory is still free
        }
        take_turns(context, contestants, options.iterations, say)
        layer.comm.check()
        ids = choose(problem, shape.top_k)[1].flatten()
        routes = ranks.all_reduce_sums([torch.bincount(ids, minlength=shape.num_experts)], "routes")[0]
        return Measured(
            backend=layer.comm.backend,
            strategy=layer.experts.strategy,
            chosen_by=_who_chose(layer, options, dtype),
            routes=int(routes.view(context.num_ranks, -1)[context.rank].sum()),
            checked=checked,
            rival=beside_rival,
            saved=saved,
            samples={who: each.samples for who, each in contestants.items() if who not in skipped},
            skipped=skipped,
        )


def _who_chose(layer: ExpertParallelMoE, options: TrainOptions, dtype: torch.dtype) -> str:
    """Who chose the strategy: "hand", "tune" or "default". Only rank 0's answer counts, because its disk decides."""
    if options.strategy is not None:
        return "hand"
    setting = choices.setting_of(layer.comm, layer.experts.intermediate, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the layer has warned already
        return "default" if choices.find(setting) is None else "tune"


@dataclass(frozen=True)
class Contestant:
    """A layer that is measured on fixed inputs.

    Attributes:
        forward: gives the output.
        backward: gives the gradients of all inputs, from the output.
        samples: microseconds of each of PASSES, filled as they are taken.
    """

    forward: Callable[[], Any]
    backward: Callable[[Any], Any]
    samples: dict[str, list[float]] = field(default_factory=lambda: {each: [] for each in PASSES})

    def results(self) -> tuple[torch.Tensor, ...]:
        """Output and gradients."""
        out = self.forward()
        return out.detach(), *self.backward(out)

    def step(self, context: RankContext) -> tuple[float, ...]:
        """Microseconds of each of PASSES: a forward without gradients, one with them, and its backward."""
        with torch.no_grad():
            inference_us = timing.one_call(context, self.forward, queued=True)
        out: list[Any] = []
        forward_us = timing.one_call(context, lambda: out.append(self.forward()), queued=True)
        return inference_us, forward_us, timing.one_call(context, lambda: self.backward(out.pop()), queued=True)


IDLE = (lambda: None, lambda out: None)
"""Forward and backward of a rank that has nothing to do, but meets the others while they are measured."""


def take_turns(
    context: RankContext, contestants: dict[str, Contestant], iterations: int, say: Callable[[str], None]
) -> None:
    """Fill everybody's samples in timing.ROUNDS rounds, so that a drifting clock hits all alike. Collective."""
    for number, count in enumerate(timing.shares(iterations)):
        for who, each in contestants.items():
            say(f"round {number + 1} of {timing.ROUNDS}: {who}")
            for _ in range(WARM_UP_STEPS):
                each.step(context)
            for _ in range(count):
                for what, us in zip(PASSES, each.step(context), strict=True):
                    each.samples[what].append(us)


def _of_torch(problem: Problem, top_k: int, experts: Experts, ranks: RankGroup | None = None) -> Contestant:
    return Contestant(lambda: torch_layer(problem.x, problem.weights, top_k, experts, ranks), problem.gradients)


def _local(problem: Problem, top_k: int, skipped: dict[str, str]) -> Contestant:
    """The baseline with as many tokens and experts as a rank has, where all routes stay on the rank."""
    local = len(problem.weights.w1)
    if top_k > local:
        skipped[LOCAL] = f"a rank has {local} experts, fewer than the {top_k} that a token chooses"
        return Contestant(*IDLE)
    router_weight = problem.weights.router[:local].detach().clone().requires_grad_()
    weights = replace(problem.weights, router=router_weight)
    return _of_torch(make_problem(len(problem.x), weights, top_k), top_k, own_experts)


def _one(
    context: RankContext, ranks: RankGroup, shape: TrainShape, options: TrainOptions, skipped: dict[str, str]
) -> Contestant:
    """The baseline with all tokens and all experts on rank 0, while the others are idle."""
    dtype = DTYPES[options.dtype]
    needed, free = bytes_on_one(shape, dtype), free_bytes(context.device)
    free = ranks.all_gather_object(free, "memory of one rank")[0]
    if needed > free:
        skipped[ONE] = f"it takes about {needed / 1e9:,.1f} GB, {free / 1e9:,.1f} GB are free"
    if skipped.get(ONE) or context.rank:
        return Contestant(*IDLE)

    def draw(*sizes: int) -> torch.Tensor:
        weight, bound = torch.empty(sizes, device=context.device, dtype=dtype), sizes[-1] ** -0.5
        return weight.uniform_(-bound, bound).requires_grad_()

    num_experts, hidden, intermediate = shape.num_experts, shape.hidden, shape.intermediate
    w1, w2 = draw(num_experts, 2 * intermediate, hidden), draw(num_experts, hidden, intermediate)
    weights = Weights(draw(num_experts, hidden), (w1, w2))
    return _of_torch(make_problem(shape.num_tokens, weights, shape.top_k, options.skew), shape.top_k, own_experts)


def bytes_on_one(shape: TrainShape, dtype: torch.dtype) -> int:
    """Rough peak, in bytes, of all tokens and experts on one rank: in backward, before the rows' gradients go."""
    rows = shape.num_tokens * shape.top_k * (4 * shape.hidden + 12 * shape.intermediate)
    weights = 2 * shape.num_experts * 3 * shape.hidden * shape.intermediate
    tokens = 8 * shape.num_tokens * shape.hidden
    return (rows + weights + tokens) * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Free memory of the GPU, or of the machine as far as its system says."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    pages = "SC_AVPHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") if pages in os.sysconf_names else 1 << 62
