"""The demo's training on one rank: that of examples/train_moe_lm.py, and what is measured beside it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.profiler import ProfilerActivity, profile

from tokenloom.comm.engine import COMBINE_RANGE, DISPATCH_RANGE
from tokenloom.demo.train_moe_lm import CONTEXT, Trainer
from tokenloom.runtime.processes import RankContext
from tokenloom.training.parameters import EXPERT_WEIGHTS
from tokenloom.training.shards import local_part


@dataclass(frozen=True)
class DemoOptions:
    """Sizes and lengths of a training.

    Attributes:
        sequences: in the batch of a step, over all ranks; a multiple of the ranks.
        profiled_steps: further steps in which the shares of dispatch and combine are measured; 0: none.
    """

    num_experts: int
    sequences: int
    steps: int
    seed: int
    profiled_steps: int = 0
    ranks_per_node: int | None = None

    @property
    def tokens_per_step(self) -> int:
        """Over all ranks."""
        return self.sequences * CONTEXT


@dataclass(frozen=True)
class Step:
    """Progress of the training, which rank 0 reports."""

    number: int
    loss: float


@dataclass(frozen=True)
class Trained:
    """Results of one rank.

    Attributes:
        losses: losses of all steps, in nats per byte, over the tokens of all ranks.
        gradients: gradients of the first step, by the parameter's name: [L, ...] for the weights of this rank's
            experts; the others, averaged over ranks, on rank 0 alone.
        tokens_per_s: rate of all ranks together, without the first step.
        dispatch_share, combine_share: share of a step's time, forward and backward; None if not measured.
    """

    losses: list[float]
    gradients: dict[str, np.ndarray]
    tokens_per_s: float
    dispatch_share: float | None = None
    combine_share: float | None = None


def train(context: RankContext, options: DemoOptions) -> Trained:
    """Train on this rank's share of every batch. Collective."""
    trainer = make_trainer(context, options)
    losses, gradients, began = [], {}, time.perf_counter()
    for number in range(1, options.steps + 1):
        losses.append(trainer.step()[0])
        if context.rank == 0:
            context.report(Step(number, losses[-1]))
        if number == 1:
            gradients = last_gradients(trainer)
            if options.steps > 1:
                began = time.perf_counter()  # the first step also allocates and connects
    seconds = time.perf_counter() - began
    shares = measure_shares(trainer, options.profiled_steps) if options.profiled_steps else ()
    return Trained(losses, gradients, options.tokens_per_step * max(1, options.steps - 1) / seconds, *shares)


def make_trainer(context: RankContext, options: DemoOptions) -> Trainer:
    """The example's trainer on this rank. Collective."""
    return Trainer(
        options.tokens_per_step,
        options.steps,
        options.seed,
        context.device,
        num_experts=options.num_experts,
        ranks_per_node=options.ranks_per_node,
        group=context.group,
    )


def last_gradients(trainer: Trainer) -> dict[str, np.ndarray]:
    """The gradients of the last step, as :class:`Trained` describes them."""
    return {
        name: local_part(parameter.grad).cpu().numpy().copy()
        for name, parameter in trainer.model.named_parameters()
        if parameter.grad is not None and (_is_sharded(name) or trainer.rank == 0)
    }


def measure_shares(trainer: Trainer, steps: int) -> tuple[float, float]:
    """Shares of dispatch and combine in the time of ``steps`` further steps, from the profiler's ranges."""
    activities = [ProfilerActivity.CPU]
    if trainer.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities)
    with _no_stderr():
        profiler.start()
    began = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    steps_us = (time.perf_counter() - began) * 1e6
    with _no_stderr():
        profiler.stop()
    events = profiler.events() or []
    return covered_us(events, DISPATCH_RANGE) / steps_us, covered_us(events, COMBINE_RANGE) / steps_us


@contextmanager
def _no_stderr() -> Iterator[None]:
    """Silence the lines for its developers that the profiler prints from C++ when it starts and stops."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def covered_us(events: Iterable[Any], name: str) -> float:
    """Microseconds during which a range of that name is open, on the host or the device."""
    spans = sorted((each.time_range.start, each.time_range.end) for each in events if each.name == name)
    covered, reached = 0.0, -float("inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def full_gradients(by_rank: list[Trained]) -> dict[str, np.ndarray]:
    """The whole model's gradients of the first step, with expert weights as [E, ...]."""
    return {
        name: np.concatenate([trained.gradients[name] for trained in by_rank]) if _is_sharded(name) else gradient
        for name, gradient in by_rank[0].gradients.items()
    }


def _is_sharded(name: str) -> bool:
    return name.rpartition(".")[2] in EXPERT_WEIGHTS
