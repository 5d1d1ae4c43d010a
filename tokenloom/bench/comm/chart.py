"""The bar chart of ``tokenloom bench comm``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenloom.bench.comm.rows import Row, kind_of
from tokenloom.bench.common.plot import DOTS_PER_INCH, TIME_AXIS, WIDTH_INCHES, load_matplotlib, title

BAR_INCHES = 0.16
SHAPE_FIELDS = ("num_tokens", "hidden", "top_k", "num_experts")


def write_png(file: Path, setup: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Draw the median of every row as a bar.

    Each shape has a chart, each operation a group of bars, and everybody measured a colour.

    Args:
        file: PNG.
        setup: from :func:`tokenloom.bench.common.setup.run_setup`.
        rows: at least one; the rows of one shape together.

    Raises:
        PackageMissing: matplotlib is not installed.
    """
    charts = [(shape, list(found)) for shape, found in groupby(rows, _shape)]
    who = list(dict.fromkeys(map(_who, rows)))
    heights = [BAR_INCHES * (len(found) + 2 * len(_operations(found))) + 1 for _, found in charts]
    figure = load_matplotlib().Figure(figsize=(WIDTH_INCHES, sum(heights) + 1), layout="constrained")
    all_axes = figure.subplots(len(charts), squeeze=False, height_ratios=heights)
    for axes, (shape, found) in zip(all_axes.flat, charts, strict=True):
        _draw(axes, shape, found, who)
    figure.suptitle(title(setup, "dispatch and combine"))
    figure.savefig(file, format="png", dpi=DOTS_PER_INCH)


def _draw(axes: Any, shape: tuple[Any, ...], rows: Sequence[Row], who: list[str]) -> None:
    bars_of: dict[str, list[tuple[float, Row]]] = {}
    ticks, top = [], 0.0
    for operation in _operations(rows):
        group = [row for row in rows if _operation(row) == operation]
        for index, row in enumerate(group):
            bars_of.setdefault(_who(row), []).append((top + index, row))
        ticks.append((top + (len(group) - 1) / 2, operation))
        top += len(group) + 1.0
    for index, name in enumerate(who):
        bars = bars_of.get(name, [])
        medians = [row.p50_us for _, row in bars]
        drawn = axes.barh([place for place, _ in bars], medians, 0.9, label=name, color=f"C{index}")
        axes.bar_label(drawn, [f"{us:,.0f}" if us >= 1000 else f"{us:,.1f}" for us in medians], padding=3, fontsize=6)
    axes.set_yticks([place for place, _ in ticks], [operation for _, operation in ticks])
    axes.margins(0.06, 0.01)
    axes.invert_yaxis()
    num_tokens, hidden, top_k, num_experts = shape
    axes.set_title(f"{num_tokens} tokens a rank, hidden {hidden}, top-{top_k} of {num_experts} experts")
    axes.set_xlabel(TIME_AXIS)
    axes.legend(fontsize="small")


def _shape(row: Row) -> tuple[Any, ...]:
    return tuple(row.setup[field] for field in SHAPE_FIELDS)


def _who(row: Row) -> str:
    sms = "" if row.num_sms is None else f", {row.num_sms} SMs"
    halves = ", halves around a GEMM" if kind_of(row) == "halves" else ""
    return f"{row.setup['backend']}{sms}, {row.setup['timing']}{halves}"


def _operation(row: Row) -> str:
    return f"{row.setup['operation']} {row.setup['payload']} {row.setup['layout']}"


def _operations(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(map(_operation, rows)))
