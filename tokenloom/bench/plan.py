"""``tokenloom plan``: rows, one for each operation, protocol and size of a cluster; their tables, chart and file."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tokenloom.bench import legends
from tokenloom.bench.plot import DOTS_PER_INCH, WIDTH_INCHES, load_matplotlib, make_logarithmic
from tokenloom.bench.tables import Fitted, make_table
from tokenloom.bench.tables import counted as in_words
from tokenloom.errors import InvalidArgument
from tokenloom.plan import Plan
from tokenloom.tune.network.constants import REGIMES, Constants
from tokenloom.tune.network.cost import HOP_US, MIB, cost, puts_of, regime_of, require_budget, row_bytes, staging_bytes
from tokenloom.tune.network.published import HIDDEN, RANKS_PER_NODE, SOURCES, TOP_K, Figure, beyond, figures_for
from tokenloom.tune.network.traffic import ROWS_PER, Cluster, Counted, counted, expected

OPERATIONS = ("dispatch", "combine")
COMBINED_DTYPE = "bf16"
REGIME_WORDS = {"low_latency": "low latency", "high_throughput": "high throughput"}
MOST_RANKS = 2048
LEAST_RANKS = 8
FITTED_TO = {"hidden": HIDDEN, "top_k": TOP_K, "ranks_per_node": RANKS_PER_NODE}
HEIGHT_INCHES = 4.5
MARKERS = "sD^vP*X<>"
CARRIERS = {"gin": "gin", "padded": "collective"}
"""Backends that make all their memory when a communicator is made, and what carries their rows between nodes."""


@dataclass(frozen=True)
class PlanProblem:
    """A layer to plan, for any number of nodes.

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
        """The problem on so many nodes."""
        return Cluster(num_nodes, self.ranks_per_node, self.num_experts, self.top_k, self.node_limit)

    def sweep(self) -> list[Cluster]:
        """1, 2, 4 … nodes, as far as they have LEAST_RANKS to MOST_RANKS and experts enough for a token."""
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

    def dtype_of(self, operation: str) -> str:
        """Dtype of the rows of one of OPERATIONS."""
        return self.dtype if operation == "dispatch" else COMBINED_DTYPE


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
    problem: PlanProblem,
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
        dtype = problem.dtype_of(operation)
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
                    **asdict(needed),
                    binds=needed.binds,
                    hop_us=HOP_US if hops else None,
                    staging_bytes=staging_bytes(cluster, row_per, num_tokens, problem.dtype, problem.hidden),
                    extrapolated=beyond(cluster, regime, row_per, num_tokens, problem.hidden),
                    imbalance=None if counts is None else counts[row_per].imbalance,
                    published_us={figure.series.system: figure.time_us for figure in figures},
                )
            )
    return rows


def published(problem: PlanProblem, cluster: Cluster, operation: str, num_tokens: int) -> list[Figure]:
    """Figures of other systems for a call, the fastest first."""
    return figures_for(cluster, operation, problem.dtype_of(operation), num_tokens, problem.hidden)


def extrapolation(rows: Iterable[PlanRow]) -> str:
    """In what the rows lie beyond the published figures, with commas between; empty if none does."""
    return ", ".join(dict.fromkeys(word for row in rows for word in beyond_figures(row)))


def beyond_figures(row: PlanRow) -> list[str]:
    """Why a time has a star or a dashed line: all that is extrapolated, but for what its tokens send rows to."""
    return [word for word in row.extrapolated if word != "rows"]


def detail_table(rows: Sequence[PlanRow], routing: str) -> Table:
    """Every term of the calls of one cluster and number of tokens."""
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
    """Published figures of other systems for the same calls, beside the model of their protocols."""
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
    """Times by number of ranks, for one number of tokens."""
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
    """Memory of each backend for bfloat16 tokens, from the sizes that it makes its memory by.

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
        by_tokens: for each number of tokens, the rows of each cluster, as
            :func:`make_rows` returns them, in ascending order of ranks.
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
    make_logarithmic(axes, {row.num_ranks for row in rows})
    axes.set_xlabel("ranks")
    axes.set_ylabel("µs")
    axes.legend(fontsize="x-small")


def run_plan(
    console: Console,
    problem: PlanProblem,
    tokens: Sequence[int],
    constants: Constants,
    *,
    num_nodes: int | None,
    routing: Sequence[np.ndarray] | None,
    budget_mib: float | None,
    command: Sequence[str],
    json_file: Path | None = None,
    plot_file: Path | None = None,
) -> None:
    """Show one cluster in detail, if it is given, and 8 to 2048 ranks; or one cluster with a measured routing.

    Args:
        tokens: T of every rank, a plan for each. Not used with a routing, which has its tokens.
        budget_mib: memory of a GPU for rows from other nodes, for the cluster in detail, and for a table of what
            backends hold; None for any, and for no table.
    """
    if plot_file is not None:
        load_matplotlib()  # before anything is shown
    counts = None
    if routing is not None:
        num_nodes, tokens = _nodes_of(problem, routing), [max(1, *(len(ids) for ids in routing))]
    chosen = None if num_nodes is None else problem.cluster(num_nodes)
    if chosen is not None and budget_mib is not None:
        for num_tokens in tokens:
            require_budget(chosen, num_tokens, problem.dtype, problem.hidden, budget_mib * MIB)
    sweep = [] if routing is not None else problem.sweep()
    if chosen is not None and routing is not None:
        counts = counted(chosen, routing)
    by_tokens = {each: [make_rows(problem, of, each, constants) for of in sweep] for each in tokens if sweep}

    console.print(_setup_lines(problem, constants, chosen), markup=False)
    made: list[PlanRow] = []
    for num_tokens in tokens if chosen is not None else ():
        assert chosen is not None
        if counts is not None:
            made += (rows := make_rows(problem, chosen, num_tokens, constants, counts))
            console.print(Fitted(detail_table(rows, "the routing of the file"), keys=2))
        made += (rows := make_rows(problem, chosen, num_tokens, constants))
        console.print(Fitted(detail_table(rows, "an even routing"), keys=2))
        if figures := [each for name in OPERATIONS for each in published(problem, chosen, name, num_tokens)]:
            console.print(Fitted(published_table(figures), keys=3))
        if budget_mib is not None and chosen.num_nodes > 1:
            held = memory_table(chosen, problem.hidden, num_tokens, budget_mib * MIB)
            console.print(Fitted(held))
    for by_cluster in by_tokens.values():
        console.print(Fitted(sweep_table(by_cluster)))
        made += [row for rows in by_cluster for row in rows if row.num_nodes != num_nodes]
    notes = [legends.PLAN]
    if words := extrapolation(row for by_cluster in by_tokens.values() for rows in by_cluster for row in rows):
        notes.append(legends.PLAN_EXTRAPOLATED.format(words=words, **FITTED_TO))
    if any(row.hop_us for row in made):
        notes.append(legends.PLAN_PREDICTED.format(least=HOP_US[0], most=HOP_US[1]))
    if sweep and 2 * sweep[-1].num_ranks <= MOST_RANKS:
        nodes = in_words(problem.node_limit or sweep[-1].num_nodes, "node")
        ranks = in_words(sweep[-1].num_ranks, "rank")
        notes.append(f"With more than {ranks}, {nodes} would hold fewer experts than a token chooses.")
    if found := sources(made):
        notes.append(f"Published figures come from {found}.")
    for note in notes:
        console.print(note, markup=False)
    if json_file is not None:
        from tokenloom.bench.setup import commit, write_json  # with torch, which takes seconds

        setup = {"commit": commit(), "command": shlex.join(["tokenloom", *command])}
        write_json(json_file, setup | asdict(problem) | {"constants": asdict(constants)}, notes, made)
        console.print(f"rows written to {json_file}", markup=False)
    if plot_file is not None:
        write_chart(plot_file, _title(problem), by_tokens)
        console.print(f"chart written to {plot_file}", markup=False)


def _nodes_of(problem: PlanProblem, routing: Sequence[np.ndarray]) -> int:
    num_nodes, rest = divmod(len(routing), problem.ranks_per_node)
    if rest:
        raise InvalidArgument(
            f"the routing is of {len(routing)} ranks, expected a multiple of the {problem.ranks_per_node} ranks of a "
            "node; give --ranks-per-node"
        )
    return num_nodes


def _setup_lines(problem: PlanProblem, constants: Constants, chosen: Cluster | None) -> str:
    nodes = f"{in_words(problem.ranks_per_node, 'rank')} a node, each with its NIC"
    if problem.node_limit is not None:
        nodes += f"; a token chooses at most {in_words(problem.node_limit, 'node')}"
    lines = [
        f"hidden {problem.hidden}, top-{problem.top_k} of {problem.num_experts} experts; dispatch in "
        f"{problem.dtype.upper()}, combine in BF16; {nodes}",
    ]
    if chosen is not None and chosen.padded_experts != problem.num_experts:
        lines.append(f"{chosen.num_ranks} ranks: padded to {chosen.padded_experts} experts")
    for name in REGIMES:
        of = constants.regime(name)
        lines.append(
            f"{REGIME_WORDS[name]}: start {of.base_us:g} µs, NIC {of.nic_gbytes_per_s:g} GB/s, "
            f"NVLink {constants.nvlink_gbytes_per_s:g} GB/s, "
            f"{of.exposed_share:g} of the shorter exposed, a put {of.put_us:g} µs"
        )
    return "\n".join([*lines, f"constants: {constants.where}", ""])


def _title(problem: PlanProblem) -> str:
    sizes = f"hidden {problem.hidden}, top-{problem.top_k} of {problem.num_experts}"
    return f"tokenloom plan: {sizes}, {problem.ranks_per_node} ranks a node"
