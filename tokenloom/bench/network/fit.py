"""Constants of the cost model, fitted to all-to-alls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenloom.tune.network.constants import FITTED, Constants, Regime

NOISE = 0.01
"""Share of the longest time that says nothing: a line that grows by no more does not tell a rate."""


@dataclass(frozen=True)
class Points:
    """What was measured: microseconds of an all-to-all by the bytes that each rank sends, with all rails busy.

    Attributes:
        small, large: between nodes, in ascending order: for the regimes of few and of many tokens.
        inside: inside nodes; empty where nodes have one rank.
        one_us, burst_us: one message to each peer, and ``burst`` of them at once, of a byte each.
        peers: of a rank between nodes.
    """

    small: Sequence[tuple[int, float]]
    large: Sequence[tuple[int, float]]
    inside: Sequence[tuple[int, float]]
    one_us: float
    burst_us: float
    burst: int
    peers: int


def fit_line(points: Sequence[tuple[int, float]], rate: float | None = None) -> tuple[float, float]:
    """Fit ``time = base + bytes / rate`` to points.

    Errors count by their share of the time, so that short times count as much as long ones. A line that starts below 0
    is replaced by one through 0. So is one that hardly grows: its slope is noise.

    Args:
        points: bytes and microseconds; at least two, of different sizes.
        rate: most GB/s, which hold where times grow more slowly with bytes, or not at all; None: no limit is known.

    Returns:
        base, microseconds; rate, GB/s.
    """
    num_bytes, times_us = (np.array(each, dtype=float) for each in zip(*points, strict=True))
    slope, base_us = np.polyfit(num_bytes, times_us, 1, w=1 / times_us)
    if rate is not None and slope <= 1 / (rate * 1e3):
        return max(0.0, float(np.mean(times_us - num_bytes / rate / 1e3))), rate
    if slope * num_bytes.max() <= NOISE * times_us.max() or base_us < 0:
        base_us, slope = 0.0, float(np.average(times_us / num_bytes, weights=num_bytes))
    return float(base_us), float(1 / slope / 1e3)


def fit_constants(points: Points, where: str) -> Constants:
    """Make the constants of a cluster.

    ``exposed_share`` says how well a transport overlaps the NIC with NVLink, which messages of their own cannot tell;
    it stays as fitted to published figures. So does the rate of NVLink where nodes have one rank.

    Args:
        where: what was measured, and when.
    """
    kept = ["exposed_share"]
    put_us = max(0.0, (points.burst_us - points.one_us) / ((points.burst - 1) * points.peers))
    large = fit_line(points.large)
    lines = {"low_latency": fit_line(points.small, rate=large[1]), "high_throughput": large}
    regimes = {
        name: Regime(_short(base_us), _short(rate), FITTED.regime(name).exposed_share, _short(put_us))
        for name, (base_us, rate) in lines.items()
    }
    nvlink = FITTED.nvlink_gbytes_per_s
    if points.inside:
        nvlink = _short(fit_line(points.inside)[1])
    else:
        kept.append("nvlink_gbytes_per_s")
    return Constants(f"{where}; {', '.join(kept)} as in published figures", nvlink, **regimes)


def _short(value: float) -> float:
    """Four digits: more were not measured."""
    return float(f"{value:.4g}")
