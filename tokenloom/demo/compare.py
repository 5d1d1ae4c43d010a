"""Differences between tensors, and whether they are within their tolerance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Difference:
    """Distance of values from what they should be.

    Attributes:
        what: name of what was compared.
        num_values: number of values.
        largest: largest absolute difference; infinite where shapes differ.
        total: sum of the absolute differences.
        tolerance: largest difference that passes; 0 is exact.
    """

    what: str
    num_values: int
    largest: float
    total: float
    tolerance: float

    @property
    def mean(self) -> float:
        """Mean absolute difference."""
        return self.total / max(1, self.num_values)

    @property
    def passed(self) -> bool:
        """Whether something was compared and is within the tolerance (NaN is not)."""
        return self.num_values > 0 and self.largest <= self.tolerance


def merge(by_rank: Sequence[Sequence[Difference]]) -> list[Difference]:
    """Merge the same comparisons of several ranks: the worst rank decides."""
    return [
        Difference(
            what=parts[0].what,
            num_values=sum(part.num_values for part in parts),
            largest=_largest(part.largest for part in parts),
            total=sum(part.total for part in parts),
            tolerance=max(part.tolerance for part in parts),
        )
        for parts in zip(*by_rank, strict=True)
    ]


def compare(
    what: str, pairs: Iterable[tuple[torch.Tensor | None, torch.Tensor | None]], tolerance: float = 0.0
) -> Difference:
    """Compare (got, wanted) pairs; a None equals only another None."""
    num_values, largest, total = 0, [0.0], 0.0
    for got, wanted in pairs:
        if got is None and wanted is None:
            continue
        if got is None or wanted is None or got.shape != wanted.shape:
            largest.append(math.inf)
            continue
        difference = (got.cpu().double() - wanted.cpu().double()).abs()
        num_values += difference.numel()
        if difference.numel():
            largest.append(difference.max().item())
            total += difference.sum().item()
    return Difference(what, num_values, _largest(largest), total, tolerance)


def _largest(values: Iterable[float]) -> float:
    """The maximum, or NaN if there is one."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)
