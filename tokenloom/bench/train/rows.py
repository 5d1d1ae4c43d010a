"""What a run of ``tokenloom bench train`` finds on a rank, and the rows that it becomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenloom.backends.seam import Strategy
from tokenloom.bench.train.check import Difference
from tokenloom.training.saved_activations import SavedTensor

OURS, LOCAL, ONE = "ours", "local", "one"
BASELINES = (LOCAL, ONE)
PASSES = ("inference", "forward", "backward")
"""What is timed of everybody: forward without gradients, forward with them, backward."""


@dataclass(frozen=True)
class Measured:
    """What one rank found.

    Attributes:
        backend, strategy: those of the layer.
        chosen_by: who chose the strategy, a key of CHOSEN_BY in report.py; only rank 0's counts.
        routes: routes that this rank's experts got.
        checked: differences from the reference, by TENSORS; None if that was not asked for.
        rival: differences of the rival from ours, by TENSORS.
        saved: what a forward keeps for backward.
        samples: microseconds, by who and PASSES.
        skipped: why somebody has no samples.
    """

    backend: str
    strategy: Strategy
    chosen_by: str
    routes: int
    checked: dict[str, Difference] | None
    rival: dict[str, Difference]
    saved: list[SavedTensor]
    samples: dict[str, dict[str, list[float]]]
    skipped: dict[str, str]


@dataclass(frozen=True)
class TrainRow:
    """How long one pass takes somebody.

    Attributes:
        name: train/backend, rival or baseline/ranks/tokens of all ranks/hidden/intermediate/experts/top-k/dtype/pass.
        who: OURS, the rival, or one of BASELINES.
        what: one of PASSES.
        p50_ms, p99_ms, slowest_rank: time over samples, each of its slowest rank.
        tflops: rate of the experts' GEMMs, per rank that works, per p50.
        exposed_ms: in our rows, by baseline: p50 less the baseline's; that of "one" is divided by the ranks.
        scaling: in our rows, time of "one" divided by the ranks, over ours; 1 is a network that costs nothing.
        rival_ratio: in our rows, the rival's time over ours.
        setup: everything needed to repeat the row, besides what all rows of a run share.
    """

    name: str
    who: str
    what: str
    p50_ms: float
    p99_ms: float
    slowest_rank: int
    tflops: float
    exposed_ms: dict[str, float]
    scaling: float | None
    rival_ratio: float | None
    setup: dict[str, Any]


@dataclass(frozen=True)
class CheckRow:
    """Distance of one of TENSORS from the reference; the name ends in check/tensor. See :class:`Difference`."""

    name: str
    tensor: str
    max_ref: float
    mean_ref: float
    max_diff: float
    relative: float
    limit: float
    passed: bool
    setup: dict[str, Any]


@dataclass(frozen=True)
class SavedRow:
    """A tensor kept for backward, on the rank that keeps most; the name ends in saved/tensor."""

    name: str
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    setup: dict[str, Any]
