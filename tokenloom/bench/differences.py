"""Distances of tensors from what they should be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

LARGEST_SHARE = 1 / 16
"""Most difference of a single value, as a share of the largest value. A lost token is off by about all of it, which
the relative difference does not show among thousands of tokens."""


@dataclass(frozen=True)
class Difference:
    """Distance of a tensor, or a part of it, from its reference.

    Attributes:
        max_ref, sum_ref: maximum and sum of the reference's absolute values.
        count: number of values.
        max_diff, sum_diff: largest absolute difference, and the sum of all; infinite where there is nothing to compare
            with.
        squares_diff, squares_ref: sums of squares.
    """

    max_ref: float = 0.0
    sum_ref: float = 0.0
    count: int = 0
    max_diff: float = 0.0
    sum_diff: float = 0.0
    squares_diff: float = 0.0
    squares_ref: float = 0.0

    @property
    def mean_ref(self) -> float:
        """Mean absolute value of the reference."""
        return self.sum_ref / self.count if self.count else 0.0

    @property
    def mean_diff(self) -> float:
        """Mean absolute difference."""
        return self.sum_diff / self.count if self.count else 0.0

    @property
    def relative(self) -> float:
        """Norm of the difference over the norm of the reference."""
        if self.squares_ref == 0:
            return 0.0 if self.squares_diff == 0 else float("inf")
        return float((self.squares_diff / self.squares_ref) ** 0.5)

    def within(self, limit: float) -> bool:
        """Whether both the relative and the largest difference are small enough; never with NaN."""
        return self.relative <= limit and self.max_diff <= LARGEST_SHARE * self.max_ref


def compare(got: torch.Tensor | None, ref: torch.Tensor | None) -> Difference:
    """Compare two tensors, in float32 or more. Another shape, or nothing, is infinitely far off."""
    if got is None and ref is None:
        return Difference()
    if got is None or ref is None or got.shape != ref.shape:
        return Difference(max_diff=float("inf"), sum_diff=float("inf"), squares_diff=float("inf"))
    if not ref.numel():
        return Difference()
    dtype = torch.promote_types(ref.dtype, torch.float32)
    got, ref = got.detach().to(dtype), ref.detach().to(dtype)
    diff = got - ref

    def sum_of(tensor: torch.Tensor) -> float:
        return float(tensor.sum(dtype=torch.float64))

    return Difference(
        max_ref=float(ref.abs().max()),
        sum_ref=sum_of(ref.abs()),
        count=ref.numel(),
        max_diff=float(diff.abs().max()),
        sum_diff=sum_of(diff.abs()),
        squares_diff=sum_of(diff.square()),
        squares_ref=sum_of(ref.square()),
    )


def total(parts: Iterable[Difference]) -> Difference:
    """The difference of a whole tensor, from those of its parts."""
    found = list(parts) or [Difference()]

    def values(name: str) -> list[float]:
        return [getattr(part, name) for part in found]

    # numpy's maximum keeps NaN, which is the largest difference of all.
    largest = {name: float(np.max(values(name))) for name in ("max_ref", "max_diff")}
    sums = {name: sum(values(name)) for name in ("sum_ref", "sum_diff", "squares_diff", "squares_ref")}
    return Difference(**largest, **sums, count=sum(part.count for part in found))
