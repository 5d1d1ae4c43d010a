"""Charts of rows: bars, and curves over tokens. Needs matplotlib, which nothing else here does."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenloom.bench.rows import Row
from tokenloom.errors import InvalidArgument

BAR_INCHES = 0.16
WIDTH_INCHES = 12.0
CURVES_HEIGHT_INCHES = 7.5
DOTS_PER_INCH = 120
SHAPE_FIELDS = ("num_tokens", "hidden", "top_k", "num_experts")


def load_matplotlib() -> Any:
    """The module matplotlib.figure.

    Raises:
        InvalidArgument: matplotlib is not installed.
    """
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise InvalidArgument(
            f"--plot needs matplotlib ({error}); pip install 'tokenloom[report]', or leave --plot out"
        ) from error


def write_png(file: Path, setup: dict[str, Any], rows: Sequence[Row]) -> None:
    """The median of every row as a bar: a chart for each shape, a group of bars for each operation, a colour for
    everybody measured.

    Args:
        file: that is written, PNG.
        setup: as :func:`tokenloom.bench.setup.run_setup` gives it, for the title.
        rows: those of one shape together; at least one.

    Raises:
        InvalidArgument: matplotlib is not installed.
    """
    charts = [(shape, list(found)) for shape, found in groupby(rows, _shape)]
    who = list(dict.fromkeys(map(_who, rows)))
    heights = [BAR_INCHES * (len(found) + 2 * len(_operations(found))) + 1 for _, found in charts]
    figure = load_matplotlib().Figure(figsize=(WIDTH_INCHES, sum(heights) + 1), layout="constrained")
    all_axes = figure.subplots(len(charts), squeeze=False, height_ratios=heights)
    for axes, (shape, found) in zip(all_axes.flat, charts, strict=True):
        _chart(axes, shape, found, who)
    figure.suptitle(_title(setup, "dispatch and combine"))
    figure.savefig(file, format="png", dpi=DOTS_PER_INCH)


def write_curves_png(
    file: Path,
    setup: dict[str, Any],
    what: str,
    shape: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    bounds: Mapping[str, Sequence[tuple[float, float]]],
) -> None:
    """Microseconds against the tokens of a rank, both logarithmic: a line with its numbers for everybody measured, a
    dashed line for every bound.

    Args:
        file: that is written, PNG.
        setup: as for :func:`write_png`. what, shape: was measured, for the titles.
        curves, bounds: points (tokens, microseconds) by name, in order, all above 0.

    Raises:
        InvalidArgument: matplotlib is not installed.
    """
    figure = load_matplotlib().Figure(figsize=(WIDTH_INCHES, CURVES_HEIGHT_INCHES), layout="constrained")
    axes = figure.subplots()
    highest: dict[float, float] = {}
    for points in curves.values():
        for tokens, us in points:
            highest[tokens] = max(us, highest.get(tokens, 0.0))
    for index, (name, points) in enumerate(curves.items()):
        axes.plot(*zip(*points, strict=True), marker="o", color=f"C{index}", label=name)
        for tokens, us in points:  # numbers of lines that lie close stay apart
            up = us == highest[tokens]
            text = f"{us:,.0f}" if us >= 10 else f"{us:,.1f}"
            where = {"textcoords": "offset points", "xytext": (0, 5 if up else -5), "ha": "center"}
            axes.annotate(text, (tokens, us), va="bottom" if up else "top", fontsize=7, color=f"C{index}", **where)
    for name, points in bounds.items():
        if points:
            axes.plot(*zip(*points, strict=True), linestyle="--", color="0.5", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(highest), [f"{tokens:,}" for tokens in sorted(highest)])
    axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    axes.set_title(shape)
    axes.set_xlabel("tokens a rank")
    axes.set_ylabel("µs, median of the slowest rank")
    axes.legend(fontsize="small")
    figure.suptitle(_title(setup, what))
    figure.savefig(file, format="png", dpi=DOTS_PER_INCH)


def _chart(axes: Any, shape: tuple[Any, ...], rows: Sequence[Row], who: list[str]) -> None:
    places: dict[str, list[tuple[float, Row]]] = {}
    ticks, top = [], 0.0
    for operation in _operations(rows):
        group = [row for row in rows if _operation(row) == operation]
        for index, row in enumerate(group):
            places.setdefault(_who(row), []).append((top + index, row))
        ticks.append((top + (len(group) - 1) / 2, operation))
        top += len(group) + 1.0
    for index, name in enumerate(who):
        bars = places.get(name, [])
        medians = [row.p50_us for _, row in bars]
        drawn = axes.barh([place for place, _ in bars], medians, 0.9, label=name, color=f"C{index}")
        axes.bar_label(drawn, [f"{us:,.0f}" if us >= 1000 else f"{us:,.1f}" for us in medians], padding=3, fontsize=6)
    axes.set_yticks([place for place, _ in ticks], [operation for _, operation in ticks])
    axes.margins(0.06, 0.01)
    axes.invert_yaxis()
    num_tokens, hidden, top_k, num_experts = shape
    axes.set_title(f"{num_tokens} tokens a rank, hidden {hidden}, top-{top_k} of {num_experts} experts")
    axes.set_xlabel("µs, median of the slowest rank")
    axes.legend(fontsize="small")


def _shape(row: Row) -> tuple[Any, ...]:
    return tuple(row.setup[field] for field in SHAPE_FIELDS)


def _who(row: Row) -> str:
    sms = "" if row.num_sms is None else f", {row.num_sms} SMs"
    return f"{row.setup['backend']}{sms}, {row.setup['timing']}"


def _operation(row: Row) -> str:
    return f"{row.setup['operation']} {row.setup['payload']} {row.setup['layout']}"


def _operations(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(map(_operation, rows)))


def _title(setup: dict[str, Any], what: str) -> str:
    versions = [f"{name} {setup[name]}" for name in ("torch", "nccl", "driver", "commit") if setup[name]]
    ranks = f"{setup['num_ranks']} ranks on {setup['device_name']}"
    return f"tokenloom {setup['tokenloom']}: {what}, {ranks}\n{', '.join(versions)}"
