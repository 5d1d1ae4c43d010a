"""``tokenloom plan``: rows, one for each operation, protocol and size of a cluster, and the files that hold them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from tokenloom.bench import legends, plan_tables
from tokenloom.bench.plan_tables import OPERATIONS, PlanRow
from tokenloom.bench.plot import load_matplotlib
from tokenloom.bench.tables import Fitted
from tokenloom.bench.tables import counted as in_words
from tokenloom.errors import InvalidArgument
from tokenloom.tune.network.constants import REGIMES, Constants
from tokenloom.tune.network.cost import HOP_US, MIB, cost, puts_of, regime_of, require_budget, row_bytes, staging_bytes
from tokenloom.tune.network.published import HIDDEN, RANKS_PER_NODE, TOP_K, Figure, beyond, figures_for
from tokenloom.tune.network.traffic import ROWS_PER, Cluster, Counted, counted, expected

COMBINED_DTYPE = "bf16"
MOST_RANKS = 2048
LEAST_RANKS = 8
FITTED_TO = {"hidden": HIDDEN, "top_k": TOP_K, "ranks_per_node": RANKS_PER_NODE}


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


def run_plan(
    console: Console,
    problem: Problem,
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
        console: where the tables go.
        tokens: T of every rank, a plan for each. Not used with a routing, which has its tokens.
        num_nodes: N of the cluster to show in detail; None for none, or with a routing.
        routing: topk_ids [T, K] of each rank, or None.
        budget_mib: memory of a GPU for rows from other nodes, for the cluster in detail, and for a table of what
            backends hold; None for any, and for no table.
        command: the arguments of ``tokenloom``, for the record.

    Raises:
        InvalidArgument: sizes do not fit each other, or a plan exceeds the budget.
        PackageMissing: a plot without matplotlib.
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
            console.print(Fitted(plan_tables.detail_table(rows, "the routing of the file"), keys=2))
        made += (rows := make_rows(problem, chosen, num_tokens, constants))
        console.print(Fitted(plan_tables.detail_table(rows, "an even routing"), keys=2))
        if figures := [each for name in OPERATIONS for each in published(problem, chosen, name, num_tokens)]:
            console.print(Fitted(plan_tables.published_table(figures), keys=3))
        if budget_mib is not None and chosen.num_nodes > 1:
            held = plan_tables.memory_table(chosen, problem.hidden, num_tokens, budget_mib * MIB)
            console.print(Fitted(held))
    for by_cluster in by_tokens.values():
        console.print(Fitted(plan_tables.sweep_table(by_cluster)))
        made += [row for rows in by_cluster for row in rows if row.num_nodes != num_nodes]
    notes = [legends.PLAN]
    if words := plan_tables.extrapolation(
        row for by_cluster in by_tokens.values() for rows in by_cluster for row in rows
    ):
        notes.append(legends.PLAN_EXTRAPOLATED.format(words=words, **FITTED_TO))
    if any(row.hop_us for row in made):
        notes.append(legends.PLAN_PREDICTED.format(least=HOP_US[0], most=HOP_US[1]))
    if sweep and 2 * sweep[-1].num_ranks <= MOST_RANKS:
        nodes = in_words(problem.node_limit or sweep[-1].num_nodes, "node")
        ranks = in_words(sweep[-1].num_ranks, "rank")
        notes.append(f"With more than {ranks}, {nodes} would hold fewer experts than a token chooses.")
    if found := plan_tables.sources(made):
        notes.append(f"Published figures come from {found}.")
    for note in notes:
        console.print(note, markup=False)
    if json_file is not None:
        from tokenloom.bench.setup import commit, write_json  # with torch, which takes seconds

        setup = {"commit": commit(), "command": shlex.join(["tokenloom", *command])}
        write_json(json_file, setup | asdict(problem) | {"constants": asdict(constants)}, notes, made)
        console.print(f"rows written to {json_file}", markup=False)
    if plot_file is not None:
        plan_tables.write_chart(plot_file, _title(problem), by_tokens)
        console.print(f"chart written to {plot_file}", markup=False)


def _nodes_of(problem: Problem, routing: Sequence[np.ndarray]) -> int:
    num_nodes, rest = divmod(len(routing), problem.ranks_per_node)
    if rest:
        raise InvalidArgument(
            f"the routing is of {len(routing)} ranks, expected a multiple of the {problem.ranks_per_node} ranks of a "
            "node; give --ranks-per-node"
        )
    return num_nodes


def _setup_lines(problem: Problem, constants: Constants, chosen: Cluster | None) -> str:
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
            f"{plan_tables.REGIME_WORDS[name]}: start {of.base_us:g} µs, NIC {of.nic_gbytes_per_s:g} GB/s, "
            f"NVLink {constants.nvlink_gbytes_per_s:g} GB/s, "
            f"{of.exposed_share:g} of the shorter exposed, a put {of.put_us:g} µs"
        )
    return "\n".join([*lines, f"constants: {constants.where}", ""])


def _title(problem: Problem) -> str:
    sizes = f"hidden {problem.hidden}, top-{problem.top_k} of {problem.num_experts}"
    return f"tokenloom plan: {sizes}, {problem.ranks_per_node} ranks a node"
