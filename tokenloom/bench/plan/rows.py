"""Rows of ``tokenloom plan``: one for each operation, protocol and size of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenloom.errors import InvalidArgument
from tokenloom.tune.network.constants import Constants
from tokenloom.tune.network.cost import HOP_US, cost, puts_of, regime_of, row_bytes, staging_bytes
from tokenloom.tune.network.published import HIDDEN, RANKS_PER_NODE, TOP_K, Figure, beyond, figures_for
from tokenloom.tune.network.traffic import ROWS_PER, Cluster, Counted, expected

OPERATIONS = ("dispatch", "combine")
COMBINED_DTYPE = "bf16"
MOST_RANKS = 2048
LEAST_RANKS = 8


@dataclass(frozen=True)
class Problem:
    """What is planned, for any number of nodes.

    Attributes:
        hidden: H.
        num_experts: E.
        top_k: K.
        dtype: "fp8" or "bf16", of dispatched rows. Combined rows are BF16.
        ranks_per_node: G.
        node_limit: most nodes that a router lets a token choose, or None.
    """

    hidden: int
    num_experts: int
    top_k: int
    dtype: str
    ranks_per_node: int
    node_limit: int | None = None

    def cluster(self, num_nodes: int) -> Cluster:
        """The problem on so many nodes.

        Raises:
            InvalidArgument: the sizes do not fit each other.
        """
        return Cluster(num_nodes, self.ranks_per_node, self.num_experts, self.top_k, self.node_limit)

    def sweep(self) -> list[Cluster]:
        """1, 2, 4 … nodes, as far as they have LEAST_RANKS to MOST_RANKS and experts enough for a token.

        Raises:
            InvalidArgument: the sizes do not fit each other on the smallest of them, or a node has more ranks.
        """
        if self.ranks_per_node > MOST_RANKS:
            raise InvalidArgument(f"ranks_per_node is {self.ranks_per_node}, expected at most {MOST_RANKS}")
        sizes = [1 << power for power in range(MOST_RANKS.bit_length())]
        found: list[Cluster] = []
        for size in sizes:
            if LEAST_RANKS <= size * self.ranks_per_node <= MOST_RANKS:
                try:
                    found.append(self.cluster(size))
                except InvalidArgument:
                    if not found:
                        raise
                    break  # nodes hold fewer experts the more of them there are
        return found

    @property
    def was_published(self) -> bool:
        """Whether published figures are of these sizes."""
        return (self.hidden, self.top_k, self.ranks_per_node) == (HIDDEN, TOP_K, RANKS_PER_NODE)


@dataclass(frozen=True)
class PlanRow:
    """One call of a protocol.

    Attributes:
        name: operation/row_per/ranks/tokens/hidden/top-k/dtype, and "/counted" if a routing was counted.
        operation: "dispatch" or "combine".
        row_per: what a token sends a row to on other nodes: "node", "rank" or "route".
        regime: "low_latency" or "high_throughput".
        num_nodes, num_ranks: N and W.
        num_experts: E, padded until all ranks have as many.
        num_tokens: T; the most of any rank, if a routing was counted.
        dtype: of the rows.
        rows_per_token: rows that a token sends to other nodes, on average.
        nic_bytes, nvlink_bytes: of the busiest rank, in the direction that has more.
        puts: puts of a rank.
        base_us, nic_us, nvlink_us, puts_us, time_us, binds: see :class:`tokenloom.tune.network.cost.Cost`.
        hop_us: bounds of what a hop over NVLink may add, a guess, no part of time_us. None where there is none.
        staging_bytes: places of a rank for rows from other nodes; those of dispatch and combine together.
        extrapolated: what lies outside the figures that the constants were fitted to.
        imbalance: if a routing was counted, the busiest over the average: "nic", "rail", "nvlink".
        published_us: figures of other systems for this call, by system, the fastest first.
    """

    name: str
    operation: str
    row_per: str
    regime: str
    num_nodes: int
    num_ranks: int
    num_experts: int
    num_tokens: int
    dtype: str
    rows_per_token: float
    nic_bytes: float
    nvlink_bytes: float
    puts: float
    base_us: float
    nic_us: float
    nvlink_us: float
    puts_us: float
    time_us: float
    binds: str
    hop_us: tuple[float, float] | None
    staging_bytes: int
    extrapolated: tuple[str, ...]
    imbalance: dict[str, float] | None
    published_us: dict[str, float]


def make_rows(
    problem: Problem,
    cluster: Cluster,
    num_tokens: int,
    constants: Constants,
    counts: Mapping[str, Counted] | None = None,
) -> list[PlanRow]:
    """Rows of both operations and all protocols, dispatch first.

    Args:
        num_tokens: T of every rank; the most of any, if there are counts.
        counts: rows counted from a routing. Without it rows are those expected of an even one.
    """
    regime = regime_of(num_tokens)
    rows = []
    for operation in OPERATIONS:
        dtype = problem.dtype if operation == "dispatch" else COMBINED_DTYPE
        figures = published(problem, cluster, operation, num_tokens) if counts is None else []
        for row_per in ROWS_PER:
            load = expected(cluster, row_per, num_tokens) if counts is None else counts[row_per].load
            puts, of_row = puts_of(cluster, row_per, regime, load), row_bytes(dtype, problem.hidden)
            needed = cost(constants, regime, load, of_row, puts)
            sizes = f"ep{cluster.num_ranks}/t{num_tokens}/h{problem.hidden}/k{problem.top_k}/{dtype}"
            hops = regime == "low_latency" and row_per == "node" and cluster.num_nodes > 1
            rows.append(
                PlanRow(
                    name=f"{operation}/{row_per}/{sizes}{'' if counts is None else '/counted'}",
                    operation=operation,
                    row_per=row_per,
                    regime=regime,
                    num_nodes=cluster.num_nodes,
                    num_ranks=cluster.num_ranks,
                    num_experts=cluster.padded_experts,
                    num_tokens=num_tokens,
                    dtype=dtype,
                    rows_per_token=load.rows_per_token,
                    nic_bytes=load.nic_rows * of_row,
                    nvlink_bytes=load.nvlink_rows * of_row,
                    puts=puts,
                    base_us=needed.base_us,
                    nic_us=needed.nic_us,
                    nvlink_us=needed.nvlink_us,
                    puts_us=needed.puts_us,
                    time_us=needed.time_us,
                    binds=needed.binds,
                    hop_us=HOP_US if hops else None,
                    staging_bytes=staging_bytes(cluster, row_per, num_tokens, problem.dtype, problem.hidden),
                    extrapolated=beyond(cluster, regime, row_per, num_tokens, problem.hidden),
                    imbalance=None if counts is None else _imbalance(counts[row_per]),
                    published_us={figure.series.system: figure.time_us for figure in figures},
                )
            )
    return rows


def published(problem: Problem, cluster: Cluster, operation: str, num_tokens: int) -> list[Figure]:
    """Figures of other systems for a call, the fastest first."""
    if not problem.was_published:
        return []
    dtype = problem.dtype if operation == "dispatch" else COMBINED_DTYPE
    return figures_for(cluster, regime_of(num_tokens), operation, dtype, num_tokens)


def _imbalance(of: Counted) -> dict[str, float]:
    return {"nic": of.nic_imbalance, "rail": of.rail_imbalance, "nvlink": of.nvlink_imbalance}
