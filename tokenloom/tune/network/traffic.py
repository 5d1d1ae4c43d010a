"""Rows that cross NICs and NVLinks: expected where a router chooses evenly, or counted from a routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np

from tokenloom.errors import InvalidArgument
from tokenloom.plan import MAX_TOP_K

ROWS_PER = ("node", "rank", "route")
"""Receivers of a token's rows on other nodes: each node that has one of its experts, each such rank, or each route.

Per node, the GPU with the sender's place within its node (the rail) receives the row, and hands it out over NVLink.
Otherwise rows go straight to their rank, and NVLink only carries those that stay within the node."""


@dataclass(frozen=True)
class Cluster:
    """Nodes, and how the routes of a layer spread over them.

    Attributes:
        num_nodes: N. A node is a set of ranks that share an NVLink domain.
        ranks_per_node: G, ranks of a node, each with a NIC of its own.
        num_experts: E, experts of the layer. They fill up the ranks evenly, see experts_per_rank.
        top_k: K, different experts of a token, all equally likely.
        node_limit: most nodes that a router lets a token choose; they are drawn first. None sets no limit.

    Raises:
        InvalidArgument: a size is not a positive integer, or a token has fewer experts to choose from than it chooses.
    """

    num_nodes: int
    ranks_per_node: int
    num_experts: int
    top_k: int
    node_limit: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            optional = name == "node_limit" and value is None
            if not optional and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidArgument(f"{name} is {value!r}, expected a positive integer")
        if self.top_k > min(self.num_experts, MAX_TOP_K):
            most = min(self.num_experts, MAX_TOP_K)
            raise InvalidArgument(f"top_k is {self.top_k}, expected at most {most} for {self.num_experts} experts")
        if self.top_k > self.chosen_nodes * self.experts_per_node:
            raise InvalidArgument(
                f"top_k is {self.top_k}, expected at most {self.chosen_nodes * self.experts_per_node}, the experts of "
                f"{self.chosen_nodes} node{'' if self.chosen_nodes == 1 else 's'}; pass a larger node_limit"
            )

    @property
    def num_ranks(self) -> int:
        """W = N * G."""
        return self.num_nodes * self.ranks_per_node

    @property
    def experts_per_rank(self) -> int:
        """L = E / W, rounded up: the layer is padded with experts until all ranks have as many. At least one each."""
        return -(-self.num_experts // self.num_ranks)

    @property
    def experts_per_node(self) -> int:
        """L * G."""
        return self.experts_per_rank * self.ranks_per_node

    @property
    def padded_experts(self) -> int:
        """L * W, experts behind the padding."""
        return self.experts_per_rank * self.num_ranks

    @property
    def chosen_nodes(self) -> int:
        """Nodes among which a token chooses its experts."""
        return min(self.node_limit or self.num_nodes, self.num_nodes)

    def most_rows(self, row_per: str) -> int:
        """Most rows that a token can send to other nodes."""
        nodes = min(self.num_nodes - 1, self.top_k)
        if row_per == "node":
            return nodes
        return min((self.num_nodes - 1) * self.ranks_per_node, self.top_k) if row_per == "rank" else self.top_k


@dataclass(frozen=True)
class Load:
    """Rows of one call at its busiest rank. A combine is a dispatch in reverse, so both have the same.

    Attributes:
        rows_per_token: rows that a token sends to other nodes, on average.
        nic_rows: rows that cross the NIC of a rank, in the direction that has more.
        nvlink_rows: rows that cross the NVLinks of a rank, in the direction that has more.
    """

    rows_per_token: float
    nic_rows: float
    nvlink_rows: float


def expected(cluster: Cluster, row_per: str, num_tokens: int) -> Load:
    """Expected rows of one call, exact for K different experts drawn evenly.

    A token hits a part of E experts with probability 1 - C(E - part, K) / C(E, K). Its own rank is any of them.
    """
    nodes, per_node, chosen = cluster.num_nodes, cluster.ranks_per_node, cluster.chosen_nodes
    experts = chosen * cluster.experts_per_node

    def hits(part: int) -> float:
        return 1 - comb(experts - part, cluster.top_k) / comb(experts, cluster.top_k)

    ranks = chosen * per_node * hits(cluster.experts_per_rank)
    rows = {"node": chosen * hits(cluster.experts_per_node), "rank": ranks, "route": float(cluster.top_k)}[row_per]
    # Per node, each GPU hands out the rows of a rail: N sources, each with ranks / N rows for this node.
    handed_out = ranks if row_per == "node" else rows / nodes
    remote = rows * (nodes - 1) / nodes
    return Load(remote, num_tokens * remote, num_tokens * handed_out * (per_node - 1) / per_node)


@dataclass(frozen=True)
class Counted:
    """Rows of one call, counted: int64 [N, G] each, by node and place within it.

    Attributes:
        num_tokens: tokens of all ranks.
        nic_sent, nic_received: rows that leave a rank for another node, and that come from there.
        nvlink_sent, nvlink_received: rows that leave a rank for another of its node, and that come from there.
    """

    num_tokens: int
    nic_sent: np.ndarray
    nic_received: np.ndarray
    nvlink_sent: np.ndarray
    nvlink_received: np.ndarray

    @property
    def load(self) -> Load:
        """Rows of the busiest rank."""
        return Load(
            float(self.nic_sent.sum() / max(self.num_tokens, 1)),
            float(max(self.nic_sent.max(), self.nic_received.max())),
            float(max(self.nvlink_sent.max(), self.nvlink_received.max())),
        )

    @property
    def imbalance(self) -> dict[str, float]:
        """Rows at the busiest over those at the average, at least 1.

        Of NICs ("nic"), of rails ("rail", NICs with the same place in their node together) and of NVLinks ("nvlink").
        """
        return {
            "nic": _imbalance(self.nic_sent, self.nic_received),
            "rail": _imbalance(self.nic_sent.sum(0), self.nic_received.sum(0)),
            "nvlink": _imbalance(self.nvlink_sent, self.nvlink_received),
        }


def counted(cluster: Cluster, topk_ids: Sequence[Any]) -> dict[str, Counted]:
    """Count the rows of one call for each of ROWS_PER.

    Args:
        topk_ids: integers [T, K] of each of the W ranks, -1 for unused places; T may differ.
    """
    per_rank, ranks, per_node = cluster.experts_per_rank, cluster.num_ranks, cluster.ranks_per_node
    to_node = rows_between(topk_ids, cluster.experts_per_node, cluster.num_nodes)
    to_rank = rows_between(topk_ids, per_rank, ranks)
    routes = rows_between([np.asarray(ids).reshape(-1, 1) for ids in topk_ids], per_rank, ranks)
    num_tokens = sum(len(ids) for ids in topk_ids)
    return {
        "node": _by_rail(num_tokens, to_node, to_rank, per_node),
        "rank": _straight(num_tokens, to_rank, per_node),
        "route": _straight(num_tokens, routes, per_node),
    }


def rows_between(topk_ids: Sequence[Any], experts_per_part: int, num_parts: int) -> np.ndarray:
    """Count rows: int64 [W, parts], tokens of each rank that have an expert in each part. A token counts once there.

    Args:
        topk_ids: integers [T, K] of each of the W ranks, -1 for unused places; T may differ.
        experts_per_part: experts of a part, which is a rank or a node. Expert e is in part e // experts_per_part.
    """
    rows = np.zeros((len(topk_ids), num_parts), dtype=np.int64)
    for source, given in enumerate(topk_ids):
        ids = np.asarray(given).astype(np.int64)
        parts = np.sort(np.where(ids >= 0, ids // experts_per_part, -1), axis=1)
        first = np.ones(parts.shape, dtype=bool)
        first[:, 1:] = parts[:, 1:] != parts[:, :-1]
        rows[source] = np.bincount(parts[first & (parts >= 0)], minlength=num_parts)
    return rows


def _by_rail(num_tokens: int, to_node: np.ndarray, to_rank: np.ndarray, per_node: int) -> Counted:
    """Rows per (token, node): over the sender's rail to the node, then by NVLink to the ranks."""
    nodes = to_node.shape[1]
    crossing = to_node.reshape(nodes, per_node, nodes).copy()  # source node, rail, node
    crossing[np.arange(nodes), :, np.arange(nodes)] = 0
    on_rail = to_rank.reshape(nodes, per_node, nodes, per_node).sum(0)  # rail, node, place
    on_rail[np.arange(per_node), :, np.arange(per_node)] = 0
    return Counted(num_tokens, crossing.sum(2), crossing.sum(0).T, on_rail.sum(2).T, on_rail.sum(0))


def _straight(num_tokens: int, rows: np.ndarray, per_node: int) -> Counted:
    """Rows [W, W] that go to their rank by themselves."""
    nodes = len(rows) // per_node
    by_place = rows.reshape(nodes, per_node, nodes, per_node)
    inside = np.zeros_like(by_place)
    inside[np.arange(nodes), :, np.arange(nodes)] = by_place[np.arange(nodes), :, np.arange(nodes)]
    crossing = by_place - inside
    inside[:, np.arange(per_node), :, np.arange(per_node)] = 0
    return Counted(num_tokens, crossing.sum((2, 3)), crossing.sum((0, 1)), inside.sum((2, 3)), inside.sum((0, 1)))


def _imbalance(sent: np.ndarray, received: np.ndarray) -> float:
    mean = sent.mean()
    return float(max(sent.max(), received.max()) / mean) if mean else 1.0
