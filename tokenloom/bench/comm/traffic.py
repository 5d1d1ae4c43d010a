"""How many bytes an operation moves, from its routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokenloom.backends.network.exchange import WORD
from tokenloom.bench.comm.cases import Operation
from tokenloom.bench.common.rates import LINK_GBYTES_PER_S
from tokenloom.plan import FP8_BLOCK, Plan, align_up
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
        physical_bytes: bytes that leave the busiest rank over a link, to other ranks, also those that it hands on.
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


@dataclass(frozen=True)
class Relayed:
    """Rows that leave each rank on backend "network", those that it hands on for others included: int64 [W].

    Attributes:
        ranks_per_node: G, flags of a dispatched row.
        dispatched: a row for each (token, node) to other nodes, and one for each (token, rank) inside a node.
        combined: a row for each (token, rank), first inside its node to the rank that sends it home.
    """

    ranks_per_node: int
    dispatched: np.ndarray
    combined: np.ndarray


def relayed(plan: Plan, topk_ids: Sequence[torch.Tensor], ranks_per_node: int) -> Relayed:
    """Count the rows of a dispatch and of its combine on backend "network".

    Args:
        topk_ids: [T, K] of each rank; -1 is an unused place.
    """
    num_nodes = plan.num_ranks // ranks_per_node
    cluster = network.Cluster(num_nodes, ranks_per_node, plan.num_experts, plan.top_k)
    found = network.counted(cluster, topk_ids)["node"]
    sizes = (num_nodes, ranks_per_node)
    home = rows_between(plan, topk_ids).reshape(sizes * 2).sum(3)  # home node, rail, node
    home[np.arange(num_nodes), :, np.arange(num_nodes)] = 0
    combined = home.sum(0).T + found.nvlink_received
    return Relayed(ranks_per_node, (found.nic_sent + found.nvlink_sent).ravel(), combined.ravel())


def moved(plan: Plan, rows: np.ndarray, operation: Operation, over: Relayed | None = None) -> Traffic:
    """Bytes that one call of an operation moves.

    A dispatched row carries its values, scales if it is FP8, the number of its token, and K ids and weights. A combine
    sends one row of partial sums, in BF16, back for every dispatched row, in all layouts.

    Args:
        rows: from :func:`rows_between`.
        over: from :func:`relayed`, for backend "network"; None: rows go straight to their rank.
    """
    to_others = rows - np.diag(rows.diagonal())
    dispatched, combined = to_others.sum(1), to_others.sum(0)
    if over is not None:
        dispatched, combined = over.dispatched, over.combined
    sent, values, received = (np.zeros(plan.num_ranks, dtype=np.int64) for _ in range(3))  # bytes of each rank
    if "dispatch" in operation.name:
        value_bytes = plan.hidden * PAYLOAD_BYTES[operation.payload]
        row_bytes = value_bytes + TOKEN_BYTES + plan.top_k * (ID_BYTES + WEIGHT_BYTES)
        if operation.payload != "bf16":
            row_bytes += plan.hidden // FP8_BLOCK * SCALE_BYTES
        values += dispatched * value_bytes
        sent += dispatched * (row_bytes if over is None else align_up(row_bytes + over.ranks_per_node, WORD))
        received += rows.sum(0) * row_bytes
    if "combine" in operation.name:
        value_bytes = plan.hidden * COMBINED_BYTES
        values += combined * value_bytes
        sent += combined * value_bytes
        received += rows.sum(1) * value_bytes
    return Traffic(int(sent.max()), int(values.max()), int(received.max()))
