"""How many bytes an operation moves, from its routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokenloom.bench.cases import Operation
from tokenloom.plan import FP8_BLOCK, Plan

SCALE_BYTES = 4
TOKEN_BYTES = 4
ID_BYTES = 4
WEIGHT_BYTES = 4
PAYLOAD_BYTES = {"bf16": 2, "fp8": 1, "to_fp8": 1}
HOME_BYTES = 2
"""A value on its way home: BF16."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of rows that one operation moves. The exchange of counts, which no routing changes, is not among them.

    Attributes:
        physical_bytes: out of the busiest rank over a link: what it sends to other ranks.
        logical_bytes: to the rank that receives most, its own rows included.
    """

    physical_bytes: int
    logical_bytes: int


def rows_between(plan: Plan, topk_ids: Sequence[torch.Tensor]) -> np.ndarray:
    """int64 [W, W]: tokens of rank i that have an expert on rank j; a token crosses to a rank once.

    Args:
        topk_ids: [T, K] of each rank; -1 is an unused place.
    """
    rows = np.zeros((plan.num_ranks, plan.num_ranks), dtype=np.int64)
    for source, ids in enumerate(topk_ids):
        ranks = torch.where(ids >= 0, ids // plan.experts_per_rank, -1)
        for rank in range(plan.num_ranks):
            rows[source, rank] = int((ranks == rank).any(1).sum())
    return rows


def moved(plan: Plan, rows: np.ndarray, operation: Operation) -> Traffic:
    """What one call of an operation moves.

    Of a dispatch every row carries its values, FP8 its scales too, which token it is, and K ids and weights. Of a
    combine one row of partial sums, in BF16, goes the other way for every row of the dispatch, in all layouts.

    Args:
        rows: as :func:`rows_between` gives them.
    """
    sent = np.zeros((plan.num_ranks, plan.num_ranks), dtype=np.int64)  # bytes from rank to rank
    if "dispatch" in operation.name:
        row_bytes = plan.hidden * PAYLOAD_BYTES[operation.payload]
        row_bytes += TOKEN_BYTES + plan.top_k * (ID_BYTES + WEIGHT_BYTES)
        if operation.payload != "bf16":
            row_bytes += plan.hidden // FP8_BLOCK * SCALE_BYTES
        sent += rows * row_bytes
    if "combine" in operation.name:
        sent += rows.T * (plan.hidden * HOME_BYTES)
    to_others = sent.sum(1) - sent.diagonal()
    return Traffic(int(to_others.max()), int(sent.sum(0).max()))
