"""Random routing and the time of a call, for everything that measures."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def draw_topk_ids(
    rank: int, num_tokens: int, num_experts: int, top_k: int, skew: float = 0.0, masked_ratio: float = 0.0
) -> torch.Tensor:
    """Draw the experts of each token, all different, with a seed of its own for each rank.

    Args:
        rank: this rank, the seed.
        num_tokens: T.
        num_experts: E.
        top_k: K.
        skew: exponent of Zipf's law. An expert's probability is proportional to 1 / place^skew, so 0 makes all alike.
            Experts have the same places on all ranks.
        masked_ratio: share of routes that are -1.

    Returns:
        int32 [T, K] on the CPU.
    """
    generator = torch.Generator("cpu").manual_seed(rank)
    order = torch.randperm(num_experts, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    chances = (1 / (order + 1).float() ** skew).expand(num_tokens, -1)
    ids = torch.multinomial(chances, top_k, generator=generator) if num_tokens else chances[:, :top_k]
    masked = torch.rand(ids.shape, generator=generator, dtype=torch.float32, device="cpu") < masked_ratio
    return ids.masked_fill(masked, -1).to(torch.int32)


LEAD_CYCLES = 3_000_000
"""GPU cycles of the work in front of a queued call, about 2 ms."""


def call_us(
    group: dist.ProcessGroup | None, device: torch.device, call: Callable[[], Any], queued: bool = False
) -> float:
    """Measure the microseconds that a user waits for one call: by events on a GPU, else by the host's clock.

    All ranks leave a barrier together before the call. A GPU is idle then, so host work before the launch counts.

    Args:
        group: the ranks, or None for a process alone.
        device: this rank's device.
        call: function to measure.
        queued: on GPUs, put the call behind other work, as a layer is behind the one before it. Host work is hidden
            up to the host's first wait for the GPU, and the GPUs rather than their hosts start together.
    """
    if group is not None:
        dist.barrier(group)
    elif device.type == "cuda":
        torch.cuda.synchronize(device)
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if queued:
            torch.cuda._sleep(LEAD_CYCLES)
            if group is not None:
                dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group=group)
        start.record()
        result = call()
        end.record()
        end.synchronize()
        del result  # only here, since the time to free it is no part of the call
        return start.elapsed_time(end) * 1e3
    began = time.perf_counter()
    result = call()
    us = (time.perf_counter() - began) * 1e6
    del result
    return us
