"""The demo's training on one rank."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import tokenloom as tl
from tokenloom.comm.engine import COMBINE_RANGE, DISPATCH_RANGE
from tokenloom.demo.model import ModelSize, NextByte
from tokenloom.demo.text import Batches
from tokenloom.runtime.processes import RankContext
from tokenloom.training.parameters import EXPERT_WEIGHTS
from tokenloom.training.shards import local_part

LEARNING_RATE = 3e-3
ADAM_EPS = 1e-6
"""Gradients below this are noise beside the model's. Adam's default of 1e-8 would turn them into full steps."""
PROFILED_STEPS = 5
"""Further steps in which the shares of dispatch and combine are measured."""


@dataclass(frozen=True)
class Step:
    """Progress of the training, which rank 0 reports.

    Attributes:
        number: number of the step, from 1.
        loss: its loss, in nats per byte.
    """

    number: int
    loss: float


@dataclass(frozen=True)
class Trained:
    """What one rank knows after the training.

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
    dispatch_share: float | None
    combine_share: float | None


def train(
    context: RankContext,
    text: bytes,
    size: ModelSize,
    sequences: int,
    steps: int,
    seed: int,
    profiled_steps: int = 0,
    ranks_per_node: int | None = None,
) -> Trained:
    """Train on this rank's share of every batch. Collective.

    Args:
        text: the training text, the same on all ranks.
        sequences: in the batch of a step, over all ranks; a multiple of the ranks.
        steps: at least 1.
        seed: seed of the weights and the batches.
        profiled_steps: further steps in which the shares of dispatch and combine are measured; 0: none.
        ranks_per_node: as in ``Communicator``.
    """
    trainer = Trainer(context, text, size, sequences, seed, ranks_per_node)
    losses, gradients, began = [], {}, time.perf_counter()
    for number in range(1, steps + 1):
        losses.append(trainer.step())
        if context.rank == 0:
            context.report(Step(number, losses[-1]))
        if number == 1:
            gradients = trainer.gradients()
            if steps > 1:
                began = time.perf_counter()  # the first step also allocates and connects
    seconds = time.perf_counter() - began
    shares = trainer.shares(profiled_steps) if profiled_steps else (None, None)
    return Trained(losses, gradients, sequences * size.context * max(1, steps - 1) / seconds, *shares)


class Trainer:
    """Data-parallel training. Each rank has its share of the batch, all parameters but the experts, and L experts."""

    def __init__(
        self,
        context: RankContext,
        text: bytes,
        size: ModelSize,
        sequences: int,
        seed: int,
        ranks_per_node: int | None = None,
    ) -> None:
        self.context = context
        comm = tl.Communicator(
            context.group,
            num_experts=size.num_experts,
            hidden=size.hidden,
            top_k=size.top_k,
            max_tokens_per_rank=sequences // context.num_ranks * size.context,
            device=context.device,
            dtype=torch.float32,
            ranks_per_node=ranks_per_node,
        )
        self.model = NextByte(size, comm).to(context.device)
        self.model.reset_parameters(seed)
        self.ddp = tl.data_parallel(self.model, process_group=context.group)
        self.batches = Batches(text, sequences, size.context, seed)
        experts, others = tl.split_parameters(self.model)
        groups = [{"params": others}, {"params": experts}]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=ADAM_EPS)

    def step(self) -> float:
        """Make one step and return the loss of the whole batch, in nats per byte.

        Ranks have equally many tokens. So the mean over ranks, of losses and of gradients, is that of one rank with
        the whole batch.
        """
        context = self.context
        inputs, targets = self.batches.next(context.rank, context.num_ranks, context.device)
        logits, balance_loss = self.ddp(inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        (loss + balance_loss).backward()
        self.optimizer.step()
        mean = loss.detach() / context.num_ranks
        dist.all_reduce(mean, group=context.group)
        return mean.item()  # last, because it waits for all of the step's work on the device

    def gradients(self) -> dict[str, np.ndarray]:
        """The gradients of the last step, as :class:`Trained` describes them."""
        return {
            name: local_part(parameter.grad).cpu().numpy().copy()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None and (_is_sharded(name) or self.context.rank == 0)
        }

    def shares(self, steps: int) -> tuple[float, float]:
        """Shares of dispatch and combine in the time of ``steps`` further steps, from the profiler's ranges."""
        activities = [ProfilerActivity.CPU]
        if self.context.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(activities=activities)
        with _no_stderr():
            profiler.start()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
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
