"""How many bytes an operation moves, from its routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokenloom.bench.comm.cases import Operation
from tokenloom.bench.common.rates import LINK_GBYTES_PER_S
from tokenloom.plan import FP8_BLOCK, Plan
from tokenloom.tune.network import traffic as network

SCALE_BYTES = 4
TOKEN_BYTES = 4
ID_BYTES = 4
WEIGHT_BYTES = 4
PAYLOAD_BYTES = {"bf16": 2, "fp8": 1, "to_fp8": 1}
"""Bytes of a dispatched value."""
COMBINED_BYTES = 2
"""Bytes of a value on its way home: BF16."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of rows that one operation moves. Counts, whose size no routing changes, are not included.

    Attributes:
        physical_bytes: bytes that leave the busiest rank over a link, to other ranks.
        value_bytes: those of them that are values of tokens, without scales, numbers, ids and weights.
        logical_bytes: bytes that the rank with most receives, its own rows included.
    """

    physical_bytes: int
    value_bytes: int
    logical_bytes: int

    @property
    def floor_us(self) -> float:
        """Least time that the values need on the links of an H200."""
        return self.value_bytes / LINK_GBYTES_PER_S / 1e3


def rows_between(plan: Plan, topk_ids: Sequence[torch.Tensor]) -> np.ndarray:
    """Count rows: int64 [W, W], tokens of rank i that have an expert on rank j. A token goes to a rank once.

    Args:
        topk_ids: [T, K] of each rank; -1 is an unused place.
    """
    return network.rows_between(topk_ids, plan.experts_per_rank, plan.num_ranks)


def moved(plan: Plan, rows: np.ndarray, operation: Operation) -> Traffic:
    """Bytes that one call of an operation moves.

    A dispatched row carries its values, scales if it is FP8, the number of its token, and K ids and weights. A combine
    sends one row of partial sums, in BF16, back for every dispatched row, in all layouts.

    Args:
        rows: from :func:`rows_between`.
    """
    values = np.zeros((plan.num_ranks, plan.num_ranks), dtype=np.int64)  # bytes from rank to rank
    sent = np.zeros_like(values)
    if "dispatch" in operation.name:
        value_bytes = plan.hidden * PAYLOAD_BYTES[operation.payload]
        row_bytes = value_bytes + TOKEN_BYTES + plan.top_k * (ID_BYTES + WEIGHT_BYTES)
        if operation.payload != "bf16":
            row_bytes += plan.hidden // FP8_BLOCK * SCALE_BYTES
        values += rows * value_bytes
        sent += rows * row_bytes
    if "combine" in operation.name:
        value_bytes = plan.hidden * COMBINED_BYTES
        values += rows.T * value_bytes
        sent += rows.T * value_bytes
    return Traffic(_leaving_the_busiest(sent), _leaving_the_busiest(values), int(sent.sum(0).max()))


def _leaving_the_busiest(sent: np.ndarray) -> int:
    return int((sent.sum(1) - sent.diagonal()).max())
