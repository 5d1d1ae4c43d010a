"""The chart of ``tokenloom plan``: time against ranks, for each number of tokens and operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenloom.bench.plan.rows import OPERATIONS, PlanRow, Problem
from tokenloom.bench.plan.tables import REGIME_WORDS, beyond_figures, extrapolation
from tokenloom.bench.plot import DOTS_PER_INCH, WIDTH_INCHES, load_matplotlib
from tokenloom.tune.network.traffic import ROWS_PER

HEIGHT_INCHES = 4.5
MARKERS = "sD^vP*X<>"


def write_png(file: Path, problem: Problem, by_tokens: Mapping[int, Sequence[Sequence[PlanRow]]]) -> None:
    """Draw a curve for each protocol, dashed where it is extrapolated, and a mark for each published figure.

    Args:
        file: PNG.
        by_tokens: for each number of tokens, the rows of each cluster, as
            :func:`tokenloom.bench.plan.rows.make_rows` returns them, in ascending order of ranks.

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
    figure.suptitle(
        f"tokenloom plan: hidden {problem.hidden}, top-{problem.top_k} of {problem.num_experts}, "
        f"{problem.ranks_per_node} ranks a node\n{modelled}"
    )
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
