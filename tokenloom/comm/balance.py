"""Balanced batches: what a communicator with ``balance="batch"`` has agreed on, and what came of its batches."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tokenloom.backends.seam import DispatchOptions
from tokenloom.comm.placement import Placement
from tokenloom.errors import InvalidArgument

BALANCES = (None, "batch")
GEMM_TFLOPS = {1: 1100.0, 2: 700.0}
"""Of grouped GEMMs on an H200, by bytes of a weight: docs/performance/gemm.md, and torch's in bfloat16."""


def default_rows_per_pull(weight_bytes: int, link_gbytes_per_s: float) -> int:
    """How many routes a GPU computes in the time in which it pulls an expert, whose widths cancel out.

    An expert has 3 H I weights, and a route takes 6 H I operations, in which a weight is read once.

    Args:
        weight_bytes: of a weight.
        link_gbytes_per_s: what the links of a GPU carry.
    """
    tflops = GEMM_TFLOPS.get(weight_bytes, GEMM_TFLOPS[2] / max(1, weight_bytes // 2))
    return round(weight_bytes / 2 * tflops * 1e3 / link_gbytes_per_s)


class BalanceStats(NamedTuple):
    """Sums over the batches of a communicator, the same on all ranks.

    Attributes:
        batches: that were dispatched.
        split: those of them that were split. The others were even, or it would not have paid.
        rows_by_placement: routes of the fullest rank, as the placement has them.
        rows: routes of the fullest rank, as they were computed.
        pulls: most experts that a rank pulled, or that others pulled from it.
    """

    batches: int
    split: int
    rows_by_placement: int
    rows: int
    pulls: int


class Balance:
    """When the batches of a communicator are split, and how often they were.

    Args:
        rows_per_pull: routes that a rank computes in the time in which it pulls an expert.
        device: of the sums.
    """

    def __init__(self, rows_per_pull: int, device: torch.device) -> None:
        self.rows_per_pull = rows_per_pull
        with torch.inference_mode(False):  # batches are counted in any mode
            self._sums = torch.tensor(BalanceStats(0, 0, 0, 0, 0), dtype=torch.int64, device=device)
            self._one = torch.ones(1, dtype=torch.int64, device=device)

    def add(self, summary: torch.Tensor) -> None:
        """Count a batch, on the device alone.

        Args:
            summary: of its split, see :class:`tokenloom.ops.slots_of_routes.BatchSplit`.
        """
        split = summary[:1] != summary[1:2]
        self._sums += torch.cat([self._one, split, summary[:3]])

    def stats(self) -> BalanceStats:
        """Read the sums, which waits for the device."""
        return BalanceStats(*self._sums.tolist())

    def __str__(self) -> str:
        where = "in layout expert with a capacity always"
        if self.rows_per_pull == 0:
            return f"each batch is split over ranks, where that evens them; {where}"
        return (
            f"each batch is split over ranks where the fullest one gets rid of {self.rows_per_pull} rows or more for "
            f"each expert that a rank pulls, or that others pull from it; {where}"
        )


def always_splits(options: DispatchOptions) -> bool:
    """Whether a dispatch counts on the split: its rows have room for an even batch, and maybe for no other."""
    return options.layout == "expert" and options.capacity is not None


def check_balance(balance: object, rows_per_pull: object, placement: Placement | None) -> None:
    """Raise InvalidArgument unless batches can be balanced as they are to be.

    Args:
        placement: of the communicator.
    """
    if balance not in BALANCES:
        raise InvalidArgument(f"balance is {balance!r}, expected None or 'batch'")
    is_number = isinstance(rows_per_pull, int) and not isinstance(rows_per_pull, bool)
    if rows_per_pull is not None and not (is_number and rows_per_pull >= 0):  # type: ignore[operator]
        raise InvalidArgument(f"rows_per_pull is {rows_per_pull!r}, expected None or a number of rows, 0 or more")
    if balance is None and rows_per_pull is not None:
        raise InvalidArgument(f"rows_per_pull is {rows_per_pull}, but batches are not balanced; pass balance='batch'")
    if balance is None:
        return
    if placement is None or not (placement.num_empty or max(placement.replicas) > 1):
        raise InvalidArgument(
            "balance='batch' without a spare slot: no rank can compute an expert of another one; pass spare_slots=1 "
            "or more (as many as experts of a rank serve any batch), or a placement with empty slots"
        )
