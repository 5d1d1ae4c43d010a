"""Charts: bars of groups, and curves over tokens. Needs matplotlib, which nothing else here does."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenloom.bench import PackageMissing

WIDTH_INCHES = 12.0
CURVES_HEIGHT_INCHES = 7.5
DOTS_PER_INCH = 120
BAR_INCHES = 0.16
TIME_AXIS = "µs, median of the slowest rank"


def load_matplotlib() -> Any:
    """The module matplotlib.figure.

    Raises:
        PackageMissing: matplotlib is not installed.
    """
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise PackageMissing(
            f"--plot needs matplotlib, which is not installed ({error}); pip install matplotlib"
        ) from None


def title(setup: Mapping[str, Any], what: str) -> str:
    """Two lines for the top of a chart: what was measured where, and with which versions."""
    versions = [f"{name} {setup[name]}" for name in ("torch", "nccl", "driver", "commit") if setup[name]]
    ranks = f"{setup['num_ranks']} ranks on {setup['device_name']}"
    return f"tokenloom {setup['tokenloom']}: {what}, {ranks}\n{', '.join(versions)}"


def write_curves_png(
    file: Path,
    setup: Mapping[str, Any],
    what: str,
    shape: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    bounds: Mapping[str, Sequence[tuple[float, float]]],
) -> None:
    """Draw microseconds against the tokens of a rank, both logarithmic.

    Everybody measured is a line with its numbers, every bound a dashed line.

    Args:
        what, shape: what was measured, for the titles.
        curves, bounds: points (tokens, microseconds) by name, in ascending order, all above 0.
    """
    figure = load_matplotlib().Figure(figsize=(WIDTH_INCHES, CURVES_HEIGHT_INCHES), layout="constrained")
    axes = figure.subplots()
    highest: dict[float, float] = {}
    for points in curves.values():
        for tokens, us in points:
            highest[tokens] = max(us, highest.get(tokens, 0.0))
    for index, (name, points) in enumerate(curves.items()):
        axes.plot(*zip(*points, strict=True), marker="o", color=f"C{index}", label=name)
        for tokens, us in points:
            above = us == highest[tokens]  # numbers of lines that lie close stay apart
            text = f"{us:,.0f}" if us >= 10 else f"{us:,.1f}"
            where = {"textcoords": "offset points", "xytext": (0, 5 if above else -5), "ha": "center"}
            axes.annotate(text, (tokens, us), va="bottom" if above else "top", fontsize=7, color=f"C{index}", **where)
    for name, points in bounds.items():
        if points:
            axes.plot(*zip(*points, strict=True), linestyle="--", color="0.5", label=name)
    make_logarithmic(axes, highest)
    axes.set_title(shape)
    axes.set_xlabel("tokens a rank")
    axes.set_ylabel(TIME_AXIS)
    axes.legend(fontsize="small")
    figure.suptitle(title(setup, what))
    figure.savefig(file, format="png", dpi=DOTS_PER_INCH)


def write_curves_by_max_vio_png(
    file: Path,
    setup: Mapping[str, Any],
    what: str,
    charts: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
) -> None:
    """Draw microseconds against how uneven the routing was, from 0 up: a chart for each title, two in a row.

    Args:
        what: what was measured, for the title.
        charts: by title and by who: points (MaxVio, microseconds).
    """
    across = min(2, len(charts))
    down = -(-len(charts) // across)
    height = CURVES_HEIGHT_INCHES / 2 * down + 1
    figure = load_matplotlib().Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    all_axes = figure.subplots(down, across, squeeze=False).flat
    colors: dict[str, str] = {}
    for who in (who for curves in charts.values() for who in curves):
        colors.setdefault(who, f"C{len(colors)}")
    for axes, (above, curves) in zip(all_axes, charts.items(), strict=False):
        for who, points in curves.items():
            axes.plot(*zip(*sorted(points), strict=True), marker="o", color=colors[who], label=who)
        axes.set_title(above, fontsize="small")
        axes.set_xlabel("MaxVio of the routing")
        axes.set_ylabel(TIME_AXIS)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    for axes in list(all_axes)[len(charts) :]:
        axes.set_visible(False)
    figure.suptitle(title(setup, what))
    figure.savefig(file, format="png", dpi=DOTS_PER_INCH)


@dataclass(frozen=True)
class Point:
    """A time in a chart.

    Attributes:
        sizes: what all points of a chart of bars share, beside their routing.
        what: what was timed: a group of bars, or a chart of curves.
        who: who was timed: a colour.
    """

    sizes: str
    what: str
    who: str
    max_vio: float
    us: float


def write_points_png(file: Path, setup: Mapping[str, Any], what: str, points: Sequence[Point]) -> None:
    """Draw everybody's times: against MaxVio where there are several, else as bars.

    There is a chart of curves for each of what was timed and its sizes, and one of bars for each of the sizes.

    Args:
        what: what was measured, for the title.
    """
    if len({each.max_vio for each in points}) > 1:
        curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for each in points:
            chart = curves.setdefault(f"{each.what}\n{each.sizes}", {})
            chart.setdefault(each.who, []).append((each.max_vio, each.us))
        write_curves_by_max_vio_png(file, setup, what, curves)
        return
    bars: dict[str, list[tuple[str, str, float]]] = {}
    for each in points:
        skew = f", MaxVio {each.max_vio:g}" if each.max_vio else ""
        bars.setdefault(f"{each.sizes}{skew}", []).append((each.what, each.who, each.us))
    write_bars_png(file, setup, what, bars)


def make_logarithmic(axes: Any, ticks: Iterable[float]) -> None:
    """Make both axes logarithmic, with these ticks on the lower one."""
    places = sorted(ticks)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(places, [f"{each:,}" for each in places])
    axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)


def write_bars_png(
    file: Path, setup: Mapping[str, Any], what: str, charts: Mapping[str, Sequence[tuple[str, str, float]]]
) -> None:
    """Draw bars in groups: a chart for each title, and a colour for everybody.

    Args:
        what: what was measured, for the title.
        charts: bars by title: group, who, microseconds.
    """
    heights = [BAR_INCHES * (len(bars) + 2 * len({group for group, _, _ in bars})) + 1 for bars in charts.values()]
    figure = load_matplotlib().Figure(figsize=(WIDTH_INCHES, sum(heights) + 1), layout="constrained")
    all_axes = figure.subplots(len(charts), squeeze=False, height_ratios=heights)
    colors: dict[str, str] = {}
    for bars in charts.values():
        for _, who, _ in bars:
            colors.setdefault(who, f"C{len(colors)}")
    for axes, (above, bars) in zip(all_axes.flat, charts.items(), strict=True):
        _draw_bars(axes, bars, colors)
        axes.set_title(above)
    figure.suptitle(title(setup, what))
    figure.savefig(file, format="png", dpi=DOTS_PER_INCH)


def _draw_bars(axes: Any, bars: Sequence[tuple[str, str, float]], colors: Mapping[str, str]) -> None:
    places: dict[str, list[tuple[float, float]]] = {}
    ticks, top = [], 0.0
    for group in dict.fromkeys(group for group, _, _ in bars):
        first = top
        for _, who, us in (each for each in bars if each[0] == group):
            places.setdefault(who, []).append((top, us))
            top += 1.0
        ticks.append(((first + top - 1) / 2, group))
        top += 1.0
    for who, color in colors.items():
        own = places.get(who, [])
        medians = [us for _, us in own]
        drawn = axes.barh([place for place, _ in own], medians, 0.9, label=who, color=color)
        axes.bar_label(drawn, [f"{us:,.0f}" if us >= 1000 else f"{us:,.1f}" for us in medians], padding=3, fontsize=6)
    axes.set_yticks([place for place, _ in ticks], [group for _, group in ticks])
    axes.margins(0.06, 0.01)
    axes.invert_yaxis()
    axes.set_xlabel(TIME_AXIS)
    axes.legend(fontsize="small")
