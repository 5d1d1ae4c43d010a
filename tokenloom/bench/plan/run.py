"""Runs ``tokenloom plan``: computes the rows, shows them, and writes the files that were asked for."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console

from tokenloom.bench.plan import chart, tables
from tokenloom.bench.plan.rows import MOST_RANKS, OPERATIONS, PlanRow, Problem, make_rows, published
from tokenloom.bench.plot import load_matplotlib
from tokenloom.bench.tables import Fitted
from tokenloom.bench.tables import counted as in_words
from tokenloom.errors import InvalidArgument
from tokenloom.tune.network.constants import REGIMES, Constants
from tokenloom.tune.network.cost import MIB, require_budget
from tokenloom.tune.network.traffic import Cluster, counted


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
            console.print(Fitted(tables.detail_table(rows, "the routing of the file"), keys=2))
        made += (rows := make_rows(problem, chosen, num_tokens, constants))
        console.print(Fitted(tables.detail_table(rows, "an even routing"), keys=2))
        if figures := [each for name in OPERATIONS for each in published(problem, chosen, name, num_tokens)]:
            console.print(Fitted(tables.published_table(figures), keys=3))
        if budget_mib is not None and chosen.num_nodes > 1:
            from tokenloom.bench.plan.memory import memory_table  # with torch, which takes seconds

            console.print(Fitted(memory_table(chosen, problem.hidden, num_tokens, budget_mib * MIB)))
    for by_cluster in by_tokens.values():
        console.print(Fitted(tables.sweep_table(by_cluster)))
        made += [row for rows in by_cluster for row in rows if row.num_nodes != num_nodes]
    notes = [tables.LEGEND]
    if words := tables.extrapolation(row for by_cluster in by_tokens.values() for rows in by_cluster for row in rows):
        notes.append(tables.EXTRAPOLATED.format(words=words))
    if any(row.hop_us for row in made):
        notes.append(tables.PREDICTED)
    if sweep and 2 * sweep[-1].num_ranks <= MOST_RANKS:
        nodes = in_words(problem.node_limit or sweep[-1].num_nodes, "node")
        ranks = in_words(sweep[-1].num_ranks, "rank")
        notes.append(f"With more than {ranks}, {nodes} would hold fewer experts than a token chooses.")
    if found := tables.sources(made):
        notes.append(f"Published figures come from {found}.")
    for note in notes:
        console.print(note, markup=False)
    if json_file is not None:
        from tokenloom.bench.setup import commit, write_json  # with torch, which takes seconds

        setup = {"commit": commit(), "command": shlex.join(["tokenloom", *command])}
        write_json(json_file, setup | asdict(problem) | {"constants": asdict(constants)}, notes, made)
        console.print(f"rows written to {json_file}", markup=False)
    if plot_file is not None:
        chart.write_png(plot_file, problem, by_tokens)
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
            f"{tables.REGIME_WORDS[name]}: start {of.base_us:g} µs, NIC {of.nic_gbytes_per_s:g} GB/s, "
            f"NVLink {constants.nvlink_gbytes_per_s:g} GB/s, "
            f"{of.exposed_share:g} of the shorter exposed, a put {of.put_us:g} µs"
        )
    return "\n".join([*lines, f"constants: {constants.where}", ""])
