"""Published figures of other systems, and what the model says of them.

Numbers are as their sources print them. All are for hidden 7168, top-8, and nodes of 8 GPUs. Where a source has
several numbers of SMs, the fastest counts; of Hybrid-EP, its kernels alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenloom.tune.network.constants import FITTED
from tokenloom.tune.network.cost import Cost, cost, puts_of, regime_of, row_bytes
from tokenloom.tune.network.traffic import Cluster, expected

HIDDEN, TOP_K, RANKS_PER_NODE = 7168, 8, 8
CX7 = "400 Gb/s InfiniBand"
EFA = "400 Gb/s EFA"


@dataclass(frozen=True)
class PublishedSeries:
    """Figures of one system and operation.

    Attributes:
        system: whose they are, and the GPU where that matters.
        source: repository, branch unless it is the main one, and path.
        unit: "µs"; or "GB/s" of rows that count those for the sender's own node too.
        row_per: one of ROWS_PER: what its protocol sends a row to.
        experts_per_rank: L; None stands for 256 experts in all.
        node_limit: nodes that its router lets a token choose.
    """

    system: str
    source: str
    regime: str
    operation: str
    dtype: str
    unit: str
    by_ranks: Mapping[int, float]
    row_per: str
    num_tokens: int
    nic: str = CX7
    nvlink_gbytes_per_s: float = FITTED.nvlink_gbytes_per_s
    experts_per_rank: int | None = None
    node_limit: int | None = None


@dataclass(frozen=True)
class Figure:
    """One published figure: that of a series for W ranks."""

    series: PublishedSeries
    num_ranks: int

    @property
    def cluster(self) -> Cluster:
        """Where it was measured."""
        of = self.series
        experts = 256 if of.experts_per_rank is None else of.experts_per_rank * self.num_ranks
        return Cluster(self.num_ranks // RANKS_PER_NODE, RANKS_PER_NODE, experts, TOP_K, of.node_limit)

    @property
    def fitted(self) -> bool:
        """Whether the constants were fitted to figures like this."""
        return self.series.nic == CX7

    @property
    def time_us(self) -> float:
        """Published microseconds; where GB/s were published, what they mean for the expected rows."""
        value = self.series.by_ranks[self.num_ranks]
        if self.series.unit == "µs":
            return value
        nodes = self.cluster.num_nodes
        rows = expected(self.cluster, self.series.row_per, self.series.num_tokens).nic_rows * nodes / (nodes - 1)
        return rows * row_bytes(self.series.dtype, HIDDEN) / value / 1e3

    @property
    def model(self) -> Cost:
        """The model's cost of its protocol on its GPUs, with the fitted constants."""
        of = self.series
        load = expected(self.cluster, of.row_per, of.num_tokens)
        constants = replace(FITTED, nvlink_gbytes_per_s=of.nvlink_gbytes_per_s)
        puts = puts_of(self.cluster, of.row_per, of.regime, load)
        return cost(constants, of.regime, load, row_bytes(of.dtype, HIDDEN), puts)


def _of(
    regime: str,
    system: str,
    source: str,
    dispatch: Mapping[int, float],
    combine: Mapping[int, float],
    dtype: str = "fp8",
    **others: Any,
) -> Iterator[PublishedSeries]:
    """Figures of both operations, as far as they are published.

    Args:
        dispatch, combine: figures by number of ranks.
        dtype: of dispatched rows; combined ones are BF16.
        others: what differs from most series of the regime.
    """
    usual = {"low_latency": ("µs", "route", 128), "high_throughput": ("GB/s", "node", 4096)}[regime]
    options: dict[str, Any] = dict(zip(("unit", "row_per", "num_tokens"), usual, strict=True)) | others
    for operation, of_rows, by_ranks in (("dispatch", dtype, dispatch), ("combine", "bf16", combine)):
        if by_ranks:
            yield PublishedSeries(system, source, regime, operation, of_rows, by_ranks=by_ranks, **options)


LL, HT = "low_latency", "high_throughput"
H800: dict[str, Any] = {"nvlink_gbytes_per_s": 160.0}
LEGACY = "deepseek-ai/DeepEP:docs/legacy.md"
FABRIC = "perplexityai/pplx-garden:docs/fabric-lib.md"
NCCL = "NVIDIA/nccl:contrib/nccl_ep/README.md"
MSCCLPP = "microsoft/mscclpp@qinghuazhou/expert_parallel: messages of commits"
UCCL = "uccl-project/uccl:ep/README.md"
V2 = "deepseek-ai/DeepEP:README.md"
HYBRID = "deepseek-ai/DeepEP@hybrid-ep:docs/README_Hybrid-EP.md"
# fmt: off
SERIES: tuple[PublishedSeries, ...] = (
    *_of(LL, "DeepEP V1, H800", LEGACY, {16: 118, 32: 155, 64: 173, 128: 192, 256: 194},
         {16: 195, 32: 273, 64: 314, 128: 369, 256: 360}, **H800),
    *_of(LL, "fabric-lib", FABRIC, {16: 110.2, 32: 153.9, 64: 187.5}, {16: 185.5, 32: 266.3, 64: 309.1}),
    *_of(LL, "fabric-lib, EFA", FABRIC, {16: 214.8, 32: 229.1, 64: 266.7}, {16: 241.5, 32: 335.0, 64: 391.2}, nic=EFA),
    *_of(LL, "NCCL EP, H100", NCCL, {16: 76.7, 32: 53.6, 64: 48.8}, {16: 73.0, 32: 50.0, 64: 43.8}, "bf16",
         unit="GB/s"),
    *_of(LL, "mscclpp, H100", MSCCLPP, {16: 65.9}, {16: 67.0}, "bf16", unit="GB/s"),
    *_of(LL, "UCCL-EP, EFA", UCCL, {16: 226, 32: 465}, {16: 293, 32: 694}, nic=EFA),
    *_of(HT, "DeepEP V1, H800", LEGACY, {16: 43, 32: 58, 64: 51}, {16: 43, 32: 57, 64: 50}, node_limit=4, **H800),
    *_of(HT, "DeepEP V1, H100", FABRIC, {}, {16: 1863.9, 32: 3565.4, 64: 5922.7}, unit="µs"),
    *_of(HT, "DeepEP V2, SM90", V2, {16: 90, 32: 61}, {16: 81, 32: 61}, num_tokens=8192),
    *_of(HT, "Hybrid-EP, H100", HYBRID, {16: 68.48, 32: 55.35, 64: 46.63}, {16: 68.00, 32: 57.46, 64: 51.03},
         experts_per_rank=8),
    *_of(HT, "Hybrid-EP, H100", HYBRID, {16: 76.80, 32: 57.69, 64: 50.55}, {}, "bf16", experts_per_rank=8),
    *_of(HT, "UCCL-EP, B200, EFA", UCCL, {16: 1141, 32: 2072}, {16: 1965, 32: 3724}, unit="µs", nic=EFA),
)
# fmt: on
FIGURES = tuple(Figure(series, num_ranks) for series in SERIES for num_ranks in series.by_ranks)
SOURCES = {series.system: series.source for series in SERIES}


def figures_for(cluster: Cluster, operation: str, dtype: str, num_tokens: int, hidden: int) -> list[Figure]:
    """Published figures of calls with these sizes, the fastest first; none where tokens chose among fewer nodes."""
    if (hidden, cluster.top_k, cluster.ranks_per_node) != (HIDDEN, TOP_K, RANKS_PER_NODE):
        return []
    wanted = (regime_of(num_tokens), operation, dtype, num_tokens)
    found = [
        each
        for each in FIGURES
        if (each.num_ranks, each.cluster.chosen_nodes) == (cluster.num_ranks, cluster.chosen_nodes)
        and (each.series.regime, each.series.operation, each.series.dtype, each.series.num_tokens) == wanted
    ]
    return sorted(found, key=lambda figure: figure.time_us)


def beyond(cluster: Cluster, regime: str, row_per: str, num_tokens: int, hidden: int) -> tuple[str, ...]:
    """Names of sizes outside the figures that the constants of a regime were fitted to: a time is extrapolated there.

    Returns:
        any of "ranks", "rows", "tokens", "hidden", "top-k", "ranks a node".
    """
    near = [each for each in FIGURES if each.series.regime == regime and each.fitted]
    ranks = [each.num_ranks for each in near]
    tokens = [each.series.num_tokens for each in near]
    outside = {
        "ranks": not min(ranks) <= cluster.num_ranks <= max(ranks),
        "rows": row_per not in {each.series.row_per for each in near},
        "tokens": not min(tokens) <= num_tokens <= max(tokens),
        "hidden": hidden != HIDDEN,
        "top-k": cluster.top_k != TOP_K,
        "ranks a node": cluster.ranks_per_node != RANKS_PER_NODE,
    }
    return tuple(name for name, so in outside.items() if so)
