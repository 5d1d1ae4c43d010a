"""What measurements have in common: routing that is drawn, and the time of a call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def draw_topk_ids(
    rank: int, num_tokens: int, num_experts: int, top_k: int, skew: float = 0.0, masked_ratio: float = 0.0
) -> torch.Tensor:
    """int32 [T, K] on the CPU, another draw for each rank: different experts for each token.

    Args:
        skew: experts are drawn with probability proportional to 1 / place^skew, their places being the same on all
            ranks; 0: all alike.
        masked_ratio: share of routes that are -1.
    """
    generator = torch.Generator().manual_seed(rank)
    places = torch.randperm(num_experts, generator=torch.Generator().manual_seed(0)) + 1.0
    chances = (1 / places**skew).expand(num_tokens, -1)
    ids = torch.multinomial(chances, top_k, generator=generator) if num_tokens else chances[:, :top_k]
    masked = torch.rand(ids.shape, generator=generator) < masked_ratio
    return ids.masked_fill(masked, -1).to(torch.int32)


LEAD_CYCLES = 3_000_000
"""Of the work in front of a queued call: about 2 ms."""


def call_us(
    group: dist.ProcessGroup | None, device: torch.device, call: Callable[[], Any], queued: bool = False
) -> float:
    """Microseconds of one call as its user waits for it: by events on a GPU, else by the host's clock.

    All ranks leave a barrier together before it. A GPU is idle then, so what the host does before it launches counts.

    Args:
        group: None for a process alone.
        queued: on GPUs, the call is behind other work, as a layer is behind the one before it: what the host does
            before it first waits for the GPU is hidden, and the GPUs, not their hosts, start together.
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
                dist.all_reduce(torch.zeros(1, device=device), group=group)
        start.record()
        result = call()
        end.record()
        end.synchronize()
        del result  # not before the end: what it takes to free it is no part of the call
        return start.elapsed_time(end) * 1e3
    began = time.perf_counter()
    result = call()
    us = (time.perf_counter() - began) * 1e6
    del result
    return us
