"""Tables and the chart of ``tokenloom plan``, for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from tokenloom.bench.plot import DOTS_PER_INCH, WIDTH_INCHES, load_matplotlib
from tokenloom.bench.tables import make_table
from tokenloom.plan import Plan
from tokenloom.tune.network.cost import MIB
from tokenloom.tune.network.published import SOURCES, Figure
from tokenloom.tune.network.traffic import ROWS_PER, Cluster

OPERATIONS = ("dispatch", "combine")
REGIME_WORDS = {"low_latency": "low latency", "high_throughput": "high throughput"}
HEIGHT_INCHES = 4.5
MARKERS = "sD^vP*X<>"
CARRIERS = {"gin": "gin", "padded": "collective"}
"""Backends that make all their memory when a communicator is made, and what carries their rows between nodes."""


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


def extrapolation(rows: Iterable[PlanRow]) -> str:
    """In what the rows lie beyond the published figures, with commas between; empty if none does."""
    return ", ".join(dict.fromkeys(word for row in rows for word in beyond_figures(row)))


def beyond_figures(row: PlanRow) -> list[str]:
    """Why a time has a star or a dashed line: all that is extrapolated, but for what its tokens send rows to."""
    return [word for word in row.extrapolated if word != "rows"]


def detail_table(rows: Sequence[PlanRow], routing: str) -> Table:
    """Every term of the calls of one cluster and number of tokens.

    Args:
        routing: what the rows were counted from, or expected of.
    """
    nodes = "1 node" if rows[0].num_nodes == 1 else f"{rows[0].num_nodes} nodes"
    where = f"{nodes}, {rows[0].num_ranks} ranks"
    title = f"{rows[0].num_tokens} tokens a rank on {where}, {REGIME_WORDS[rows[0].regime]}, {routing}"
    columns: dict[str, Callable[[PlanRow], str]] = {
        "operation": lambda row: f"{row.operation} {row.dtype}",
        "a row\nper": lambda row: row.row_per,
        "rows a\ntoken": lambda row: f"{row.rows_per_token:.2f}",
        "NIC\nMB": lambda row: f"{row.nic_bytes / 1e6:,.2f}",
        "NIC\nµs": lambda row: digits(row.nic_us),
        "NVLink\nµs": lambda row: digits(row.nvlink_us),
        "puts": lambda row: f"{row.puts:,.0f}",
        "puts\nµs": lambda row: digits(row.puts_us),
        "time\nµs": lambda row: digits(row.time_us),
        "binds": lambda row: row.binds,
        "staging\nMiB": lambda row: digits(row.staging_bytes / MIB),
    }
    if rows[0].imbalance is not None:
        names = ("nic", "rail", "nvlink")
        columns["busiest / mean\nNIC  rail  NVLink"] = lambda row: "  ".join(
            f"{(row.imbalance or {})[name]:.2f}" for name in names
        )
    columns["extrapolated"] = lambda row: ", ".join(row.extrapolated) or "-"
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    return make_table([*columns], cells, title=title, left=(0, len(columns) - 1))


def published_table(figures: Iterable[Figure]) -> Table:
    """What other systems publish for the same calls, beside what the model gives for their protocols."""
    headers = ("system", "operation", "a row\nper", "published\nµs", "model of\nit, µs", "model /\npublished")
    cells = [
        (
            each.series.system,
            f"{each.series.operation} {each.series.dtype}",
            each.series.row_per,
            digits(each.time_us),
            digits(each.model.time_us),
            f"{each.model.time_us / each.time_us:.2f}",
            "yes" if each.fitted else "no",
        )
        for each in figures
    ]
    return make_table([*headers, "fitted\nto it"], cells, title="published")


def sources(rows: Iterable[PlanRow]) -> str:
    """Where the published figures beside the rows come from; empty if there are none."""
    systems = dict.fromkeys(system for row in rows for system in row.published_us)
    return "; ".join(f"{system}: {SOURCES[system]}" for system in systems)


def sweep_table(by_cluster: Sequence[Sequence[PlanRow]]) -> Table:
    """Times by number of ranks, for one number of tokens.

    Args:
        by_cluster: the rows of each cluster, from :func:`tokenloom.bench.plan.make_rows`.
    """
    first = by_cluster[0]
    title = f"{first[0].num_tokens} tokens a rank, {REGIME_WORDS[first[0].regime]}, an even routing; times in µs"
    headers = [f"rows\n{row_per}" for row_per in ROWS_PER]
    for operation in OPERATIONS:
        dtype = next(row.dtype for row in first if row.operation == operation)
        headers += [*(f"{operation}\n{dtype}, {row_per}" for row_per in ROWS_PER), f"{operation}\nothers'\nbest"]
    table = make_table(["ranks", *headers, "binds", "staging\nMiB"], title=title)
    for rows in by_cluster:
        dispatches = [row for row in rows if row.operation == "dispatch"]
        cells = [f"{rows[0].num_ranks:,}", *(f"{row.rows_per_token:.2f}" for row in dispatches)]
        for operation in OPERATIONS:
            ours = [row for row in rows if row.operation == operation]
            cells += [f"{digits(row.time_us)}{'*' if beyond_figures(row) else ''}" for row in ours]
            cells.append(_best(ours[0]))
        nodes = [row.binds for row in rows if row.row_per == "node"]
        table.add_row(*cells, "/".join(dict.fromkeys(nodes)), digits(dispatches[0].staging_bytes / MIB))
    return table


def _best(row: PlanRow) -> str:
    best = next(iter(row.published_us.values()), None)
    return "-" if best is None else digits(best)


def digits(value: float) -> str:
    """A number for people."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def memory_table(cluster: Cluster, hidden: int, num_tokens: int, budget_bytes: float) -> Table:
    """What each backend holds for bfloat16 tokens, from the sizes that it makes its memory by.

    Args:
        num_tokens: max_tokens_per_rank.
        budget_bytes: for the most tokens that fit, which may be more than ``num_tokens``.
    """
    from tokenloom.backends.nodes.sizes import NodeSizes  # with torch, which takes seconds

    budget = int(budget_bytes)
    plan = Plan(cluster.num_ranks, cluster.padded_experts, hidden, cluster.top_k, num_tokens)
    title = f"memory of a GPU, max_tokens_per_rank={num_tokens}, BF16"
    headers = ("backend", "other nodes\nMiB", "own node\nMiB", "in all\nMiB", "most tokens\nthat fit")
    table = make_table(headers, title=title)
    for backend, carrier in CARRIERS.items():
        sizes = NodeSizes(plan, cluster.num_nodes, carrier)
        parts = (sizes.carried_bytes, sizes.node_bytes, sizes.total_bytes)
        most = sizes.most_tokens(budget, limit=budget)  # a token takes a byte or more
        table.add_row(backend, *(digits(part / MIB) for part in parts), f"{most:,}")
    return table


def write_chart(file: Path, title: str, by_tokens: Mapping[int, Sequence[Sequence[PlanRow]]]) -> None:
    """Draw a curve for each protocol, dashed where it is extrapolated, and a mark for each published figure.

    Args:
        file: PNG.
        title: what is planned.
        by_tokens: for each number of tokens, the rows of each cluster, as
            :func:`tokenloom.bench.plan.make_rows` returns them, in ascending order of ranks.

    Raises:
        PackageMissing: matplotlib is not installed.
    """
    height = HEIGHT_INCHES * len(by_tokens) + 0.5
    figure = load_matplotlib().Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    all_axes = figure.subplots(len(by_tokens), len(OPERATIONS), squeeze=False)
    for line, (num_tokens, by_cluster) in zip(all_axes, by_tokens.items(), strict=True):
        for axes, operation in zip(line, OPERATIONS, strict=True):
            rows = [row for of in by_cluster for row in of if row.operation == operation]
            _draw(axes, rows)
            regime = REGIME_WORDS[rows[0].regime]
            axes.set_title(f"{operation} {rows[0].dtype}, {num_tokens:,} tokens a rank, {regime}")
    words = extrapolation(row for by_cluster in by_tokens.values() for rows in by_cluster for row in rows)
    modelled = f"modelled, dashed beyond the published {words}" if words else "modelled"
    figure.suptitle(f"{title}\n{modelled}")
    figure.savefig(file, format="png", dpi=DOTS_PER_INCH)


def _draw(axes: Any, rows: Sequence[PlanRow]) -> None:
    for index, row_per in enumerate(ROWS_PER):
        curve = [row for row in rows if row.row_per == row_per]
        ranks, times = [row.num_ranks for row in curve], [row.time_us for row in curve]
        axes.plot(ranks, times, linestyle="--", color=f"C{index}")
        near = [row for row in curve if not beyond_figures(row)]
        label = f"a row per (token, {row_per})" if row_per != "route" else "a row per route"
        axes.plot(
            [row.num_ranks for row in near], [row.time_us for row in near], marker="o", color=f"C{index}", label=label
        )
    by_system: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.row_per == ROWS_PER[0]:
            for system, us in row.published_us.items():
                by_system.setdefault(system, []).append((row.num_ranks, us))
    for index, (system, points) in enumerate(by_system.items()):
        marker = MARKERS[index % len(MARKERS)]
        axes.plot(*zip(*points, strict=True), linestyle="", marker=marker, color="0.35", label=system)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({row.num_ranks for row in rows})
    axes.set_xticks(ticks, [f"{each:,}" for each in ticks])
    axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    axes.set_xlabel("ranks")
    axes.set_ylabel("µs")
    axes.legend(fontsize="x-small")
