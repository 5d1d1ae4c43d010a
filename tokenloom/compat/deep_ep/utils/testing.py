"""``deep_ep.utils.testing``: how upstream's tests measure."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["bench", "bench_kineto"]


def bench(
    fn: Callable[[], Any], num_warmups: int = 50, num_tests: int = 50, post_fn: Callable[[], Any] | None = None
) -> tuple[float, float, float]:
    """Time a function.

    Args:
        fn: what is timed.
        num_warmups: calls before.
        num_tests: timed calls, at least 2.
        post_fn: called after each timed call, outside of its time.

    Returns:
        Mean, least and most time of a call, in seconds, without the first.
    """
    for _ in range(num_warmups):
        fn()
    times = []
    for _ in range(num_tests):
        _wait()
        began = time.perf_counter()
        fn()
        _wait()
        times.append(time.perf_counter() - began)
        if post_fn is not None:
            post_fn()
    times = times[1:] or times
    return sum(times) / len(times), min(times), max(times)


def bench_kineto(
    fn: Callable[[], Any], kernel_names: str | tuple[str, ...], num_tests: int = 30, **others: Any
) -> float | tuple[float, ...]:
    """Time what a profiler sees of a function.

    Args:
        fn: what is called.
        kernel_names: parts of names of kernels, or of the operations where there is no CUDA.
        num_tests: calls.
        **others: upstream's options of its profile, unused.

    Returns:
        Mean time of a call in what has the name, in seconds; for several names, by name.
    """
    names = (kernel_names,) if isinstance(kernel_names, str) else kernel_names
    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        for _ in range(num_tests):
            fn()
        _wait()
    found = []
    for name in names:
        events = [each for each in seen.key_averages() if name in each.key]
        total = sum(each.device_time_total if cuda else each.cpu_time_total for each in events)
        found.append(total / 1e6 / num_tests)
    return found[0] if isinstance(kernel_names, str) else tuple(found)


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
