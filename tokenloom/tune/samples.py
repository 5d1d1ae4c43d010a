"""Random routing and the time of a call, for everything that measures."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tokenloom.errors import InvalidArgument

BISECTIONS = 60
"""Halvings of an interval, after which a float64 changes no more."""
WIDEST_SIGMA = 40.0
"""A spread of popularity that is beyond any that is asked for, and whose smallest chances are above 0 in float64."""


def popularity(num_experts: int, top_k: int, max_vio: float) -> torch.Tensor:
    """Chances of experts that make their expected loads uneven by a given MaxVio. Popularity is lognormal.

    Experts have the quantiles of a normal distribution, shuffled; their chances are exp(sigma x quantile). Sigma is
    found by bisection. A token draws K different experts, one after the other by their chances; how many tokens an
    expert gets is then close to that of clocks that ring at rates of the chances until K have rung.

    Args:
        num_experts: E.
        top_k: K.
        max_vio: the largest expected load over the mean, less 1. 0 makes all alike.

    Returns:
        float64 [E] on the CPU, the largest 1.

    Raises:
        InvalidArgument: it is negative, not finite, or as large as no routing can be: a favourite has E / K times the
            mean if every token goes to it.
    """
    return torch.tensor(_popularity(num_experts, top_k, float(max_vio)), dtype=torch.float64, device="cpu")


@lru_cache(maxsize=64)
def _popularity(num_experts: int, top_k: int, max_vio: float) -> tuple[float, ...]:
    if not 0 <= max_vio < float("inf"):
        raise InvalidArgument(f"max_vio is {max_vio:g}, expected a number of at least 0")
    if max_vio == 0:
        return (1.0,) * num_experts
    most = num_experts / top_k - 1
    places = (torch.arange(num_experts, dtype=torch.float64, device="cpu") + 0.5) / num_experts
    generator = torch.Generator("cpu").manual_seed(0)
    quantiles = torch.special.ndtri(places)[torch.randperm(num_experts, generator=generator, device="cpu")].numpy()

    def logs(sigma: float) -> np.ndarray:
        return sigma * (quantiles - quantiles.max())

    if max_vio >= most or _expected_max_vio(logs(WIDEST_SIGMA), top_k) < max_vio:
        raise InvalidArgument(
            f"max_vio is {max_vio:g}, expected less than {most:g}: with top-{top_k} of {num_experts} experts, no "
            f"expert can have {num_experts / top_k:g} times the mean"
        )
    low, high = 0.0, WIDEST_SIGMA
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _expected_max_vio(logs(middle), top_k) < max_vio else (low, middle)
    return tuple(np.exp(logs(high)).tolist())


def _expected_max_vio(logs: np.ndarray, top_k: int) -> float:
    """MaxVio of clocks that ring at rates exp(logs), at the time when K of them are expected to have rung."""
    low, high = -10.0, 700.0  # logarithms of that time
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        rung = -np.expm1(-np.exp(np.minimum(logs + middle, 700.0)))
        low, high = (middle, high) if rung.sum() < top_k else (low, middle)
    return float(rung.max() / rung.mean() - 1)


def draw_topk_ids(
    rank: int, num_tokens: int, num_experts: int, top_k: int, max_vio: float = 0.0, masked_ratio: float = 0.0
) -> torch.Tensor:
    """Draw the experts of each token, all different, with a seed of its own for each rank.

    Args:
        rank: this rank, the seed.
        num_tokens: T.
        num_experts: E.
        top_k: K.
        max_vio: how uneven the expected loads of experts are, see :func:`popularity`. 0 makes all alike. Favourites
            are the same on all ranks.
        masked_ratio: share of routes that are -1.

    Returns:
        int32 [T, K] on the CPU.
    """
    generator = torch.Generator("cpu").manual_seed(rank)
    chances = popularity(num_experts, top_k, max_vio).expand(num_tokens, -1)
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
