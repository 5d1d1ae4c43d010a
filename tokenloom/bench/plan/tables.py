"""Tables of ``tokenloom plan``, for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table

from tokenloom.bench.plan.rows import OPERATIONS, PlanRow
from tokenloom.tune.network.cost import HOP_US, MIB
from tokenloom.tune.network.published import HIDDEN, RANKS_PER_NODE, SOURCES, TOP_K, Figure
from tokenloom.tune.network.traffic import ROWS_PER

REGIME_WORDS = {"low_latency": "low latency", "high_throughput": "high throughput"}
LEGEND = (
    "node, rank, route: a row for each node, rank or route of a token on other nodes. Times are of the busiest rank: "
    "start + the longest of NIC, NVLink and puts + a share of the shorter of NIC and NVLink. binds: the largest of "
    "the four; in tables that compare sizes, for node. others' best: the fastest published figure. staging: memory of "
    "a GPU for rows from other nodes, of two calls in turn; --budget shows all that backends hold."
)
EXTRAPOLATED = (
    "* beyond the published figures in: {words}. They are of "
    f"hidden {HIDDEN}, top-{TOP_K} and {RANKS_PER_NODE} ranks a node; in low latency of 128 tokens on 16 to 256 "
    "ranks, in high throughput of 4096 to 8192 tokens on 16 to 64 ranks."
)
PREDICTED = (
    "Nobody publishes low latency with a row per (token, node): those times are predictions, and its hop over NVLink "
    f"takes {HOP_US[0]:g} to {HOP_US[1]:g} µs more, by a guess."
)


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
    counted = rows[0].imbalance is not None
    headers = ["a row\nper", "rows a\ntoken", "NIC\nMB", "NIC\nµs", "NVLink\nµs", "puts", "puts\nµs", "time\nµs"]
    headers += ["binds", "staging\nMiB", *(["busiest / mean\nNIC  rail  NVLink"] if counted else []), "extrapolated"]
    table = new_table(title, "operation", *headers)
    for row in rows:
        cells = [
            f"{row.operation} {row.dtype}",
            row.row_per,
            f"{row.rows_per_token:.2f}",
            f"{row.nic_bytes / 1e6:,.2f}",
        ]
        cells += [
            digits(row.nic_us),
            digits(row.nvlink_us),
            f"{row.puts:,.0f}",
            digits(row.puts_us),
            digits(row.time_us),
        ]
        cells += [row.binds, digits(row.staging_bytes / MIB)]
        if row.imbalance is not None:
            cells.append("  ".join(f"{row.imbalance[name]:.2f}" for name in ("nic", "rail", "nvlink")))
        table.add_row(*cells, ", ".join(row.extrapolated) or "-")
    return table


def published_table(figures: Iterable[Figure]) -> Table:
    """What other systems publish for the same calls, beside what the model gives for their protocols."""
    headers = ("operation", "a row\nper", "published\nµs", "model of\nit, µs", "model /\npublished", "fitted\nto it")
    table = new_table("published", "system", *headers)
    for figure in figures:
        of, model = figure.series, figure.model
        table.add_row(
            of.system,
            f"{of.operation} {of.dtype}",
            of.row_per,
            digits(figure.time_us),
            digits(model.time_us),
            f"{model.time_us / figure.time_us:.2f}",
            "yes" if figure.fitted else "no",
        )
    return table


def sources(rows: Iterable[PlanRow]) -> str:
    """Where the published figures beside the rows come from; empty if there are none."""
    systems = dict.fromkeys(system for row in rows for system in row.published_us)
    return "; ".join(f"{system}: {SOURCES[system]}" for system in systems)


def sweep_table(by_cluster: Sequence[Sequence[PlanRow]]) -> Table:
    """Times by number of ranks, for one number of tokens.

    Args:
        by_cluster: the rows of each cluster, from :func:`tokenloom.bench.plan.rows.make_rows`.
    """
    first = by_cluster[0]
    title = f"{first[0].num_tokens} tokens a rank, {REGIME_WORDS[first[0].regime]}, an even routing; times in µs"
    headers = [f"rows\n{row_per}" for row_per in ROWS_PER]
    for operation in OPERATIONS:
        dtype = next(row.dtype for row in first if row.operation == operation)
        headers += [*(f"{operation}\n{dtype}, {row_per}" for row_per in ROWS_PER), f"{operation}\nothers'\nbest"]
    table = new_table(title, "ranks", *headers, "binds", "staging\nMiB")
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


def new_table(title: str, first: str, *headers: str) -> Table:
    """An empty table, whose numbers stand on the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first)
    for header in headers:
        table.add_column(header, justify="left" if header == "extrapolated" else "right")
    return table
