"""Rows of ``tokenloom bench mega``: how samples become numbers, a table, curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from tokenloom.bench.common import timing
from tokenloom.bench.common.rows import of_the_slowest
from tokenloom.bench.mega.others import INPUT, OTHERS
from tokenloom.bench.mega.work import MegaShape, Work, work
from tokenloom.inference.trace import MegaTimes

OURS = "tokenloom"
NAMED_SIZES = (
    ("ep", "num_ranks"),
    ("t", "num_tokens"),
    ("h", "hidden"),
    ("i", "intermediate"),
    ("e", "num_experts"),
    ("k", "top_k"),
    ("s", "num_shared_experts"),
)
"""Letters before the sizes in a row's name, in that order. The last size is there only if it is not 0."""


@dataclass(frozen=True)
class Samples:
    """Times of one layer on one rank: microseconds, one value for each sample, which all ranks take together.

    Attributes:
        graph: a call in a replay; empty where calls could not be captured, which ``why_no_graph`` explains.
        events: an eager call.
        stages: each stage of a call, in the order they run; empty for other layers than ours.
    """

    graph: list[float] = field(default_factory=list)
    events: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)
    why_no_graph: str = ""


@dataclass(frozen=True)
class Beside:
    """What one rank found of a layer beside ours.

    Attributes:
        samples: its samples.
        difference: distance of its output to ours, by :func:`tokenloom.compat.deep_gemm.testing.calc_diff`.
    """

    samples: Samples
    difference: float


@dataclass(frozen=True)
class Measured:
    """What one rank found for one number of tokens.

    Attributes:
        ours: our samples.
        beside: the other layers', by name.
        traced: times of a call by itself, if it was asked for.
    """

    ours: Samples
    beside: dict[str, Beside] = field(default_factory=dict)
    traced: MegaTimes | None = None


@dataclass(frozen=True)
class MegaRow:
    """Numbers of one layer for one number of tokens.

    Attributes:
        name: mega[/other layer]/ranks/tokens/hidden/intermediate/experts/top-k[/shared experts]/clock[/cold].
        who: "tokenloom", or the other layer's name.
        p50_us, p99_us, slowest_rank: time of a call, by the clock in the name.
        events_us: p50 around one eager call.
        tflops: rate per rank, per p50.
        hbm_gbytes_per_s: weights of the experts that have a token, on the rank with most such experts, per p50.
        nvlink_gbytes_per_s: what leaves the busiest rank when ours runs, per p50.
        floor_us: least time; the legend of the table says what it is.
        times_floor: p50 over floor_us; None where that is 0.
        stages_us: p50 of each stage; empty for other layers.
        cold: whether L2 was overwritten before each sample.
        times_ours: in another layer's row, its time over ours, both by graph, or both by events where it has no graph.
        difference: there, distance of the outputs, on the rank where it is largest.
        setup: everything needed to repeat the row, besides what all rows of a run share.
    """

    name: str
    who: str
    p50_us: float
    p99_us: float
    slowest_rank: int
    events_us: float
    tflops: float
    hbm_gbytes_per_s: float
    nvlink_gbytes_per_s: float
    floor_us: float
    times_floor: float | None
    stages_us: dict[str, float]
    cold: bool
    times_ours: float | None
    difference: float | None
    setup: dict[str, Any]


def make_rows(
    shape: MegaShape, num_ranks: int, num_tokens: int, iterations: int, cold: bool, by_rank: Sequence[Measured]
) -> list[MegaRow]:
    """Make our row, and one of each other layer, from what all ranks found."""
    common = asdict(shape) | {
        "num_tokens": num_tokens,
        "num_ranks": num_ranks,
        "iterations": iterations,
        "rounds": timing.ROUNDS,
    }
    needed = work(shape, num_ranks, num_tokens)
    ours = _make_row(OURS, needed, cold, common | {"x": INPUT}, [each.ours for each in by_rank])
    rows = [ours]
    for who in by_rank[0].beside:
        theirs = [each.beside[who] for each in by_rank]
        row = _make_row(who, needed, cold, common | {"x": OTHERS[who].input}, [each.samples for each in theirs])
        same_clock = ours.p50_us if row.setup["clock"] == "graph" else ours.events_us
        # numpy's maximum keeps NaN, which is the largest difference of all.
        most = float(np.max([each.difference for each in theirs]))
        rows.append(replace(row, times_ours=row.p50_us / same_clock, difference=most))
    return rows


def _make_row(who: str, needed: Work, cold: bool, common: dict[str, Any], by_rank: Sequence[Samples]) -> MegaRow:
    clock = "graph" if by_rank[0].graph else "events"
    p50, p99, slowest_rank = of_the_slowest([getattr(samples, clock) for samples in by_rank])
    name = ["mega"] if who == OURS else ["mega", who]
    name += [f"{letter}{common[size]}" for letter, size in NAMED_SIZES if letter != "s" or common[size]]
    stages = {stage: [samples.stages[stage] for samples in by_rank] for stage in by_rank[0].stages}
    return MegaRow(
        name="/".join([*name, clock, *(["cold"] if cold else [])]),
        who=who,
        p50_us=p50,
        p99_us=p99,
        slowest_rank=slowest_rank,
        events_us=of_the_slowest([samples.events for samples in by_rank])[0],
        tflops=needed.flops / p50 / 1e6,
        hbm_gbytes_per_s=needed.weight_bytes / p50 / 1e3,
        nvlink_gbytes_per_s=needed.sent_bytes / p50 / 1e3,
        floor_us=needed.floor_us,
        times_floor=p50 / needed.floor_us if needed.floor_us else None,
        stages_us={stage: of_the_slowest(times)[0] for stage, times in stages.items()},
        cold=cold,
        times_ours=None,
        difference=None,
        setup=common
        | {
            "clock": clock,
            "calls_per_sample": timing.GRAPH_CALLS if clock == "graph" and not cold else 1,
            "why_no_graph": by_rank[0].why_no_graph,
        },
    )


def notes(rows: Sequence[MegaRow]) -> list[str]:
    """Lines that make another layer's numbers credible: how it was timed, and whether both computed the same."""
    said = [
        f"{row.who}: its calls could not be captured ({row.setup['why_no_graph']}); its p50 and p99 are of events, "
        "and compared with ours of events"
        for row in rows
        if row.setup["why_no_graph"]
    ]
    differences: dict[str, list[float]] = {}
    for row in rows:
        if row.difference is not None:
            differences.setdefault(row.who, []).append(row.difference)
    for who, found in differences.items():
        worst, limit = float(np.max(found)), OTHERS[who].most_difference
        agree = "so they agree" if worst < limit else "SO THEY DO NOT AGREE: believe no row"
        said.append(
            f"outputs: 1 - 2 sum(xy) / sum(x^2 + y^2) of ours and {who}'s is {worst:.2g} at most; the limit is "
            f"{limit}, {agree}"
        )
    return list(dict.fromkeys(said))


def table(rows: Sequence[MegaRow]) -> Table:
    """All rows, for people. Names of layers and a comparison appear only where there are others than ours."""
    others = any(row.who != OURS for row in rows)
    stages = list(rows[0].stages_us) if rows else []
    headers = ["tokens", *(["layer"] if others else []), "p50\nµs", "p99\nµs", "events\nµs", "TFLOP\n/s"]
    headers += ["HBM\nGB/s", "NVLink\nGB/s", "floor\nµs", "times\nfloor", *(["times\nours"] if others else [])]
    headers += [f"{stage}\nµs" for stage in stages]
    # With two more columns it takes all of a console 120 wide.
    result = Table(*headers, box=box.SIMPLE_HEAD, padding=(0, 0 if others else 1, 0, 0))
    for column in result.columns:
        column.justify = "right"
    for row in rows:
        numbers = (row.p50_us, row.p99_us, row.events_us, row.tflops, row.hbm_gbytes_per_s, row.nvlink_gbytes_per_s)
        cells = [str(row.setup["num_tokens"])]
        if others:
            cells.append(row.who if row.setup["clock"] == "graph" else f"{row.who}, events")
        cells += [f"{value:,.0f}" for value in (*numbers, row.floor_us)]
        cells.append("-" if row.times_floor is None else f"{row.times_floor:.2f}")
        if others:
            cells.append("" if row.times_ours is None else f"{row.times_ours:.2f}")
        cells += [f"{row.stages_us[stage]:,.0f}" if stage in row.stages_us else "" for stage in stages]
        result.add_row(*cells)
    return result


def curves(rows: Sequence[MegaRow]) -> dict[str, list[tuple[float, float]]]:
    """Points (tokens, p50 in microseconds) by layer and clock, for a plot."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        found.setdefault(f"{row.who}, {row.setup['clock']}", []).append((row.setup["num_tokens"], row.p50_us))
    return {who: sorted(points) for who, points in found.items()}


def floors(rows: Sequence[MegaRow]) -> list[tuple[float, float]]:
    """Points (tokens, floor in microseconds), without floors of 0, which have no place on a logarithmic axis."""
    return sorted({(row.setup["num_tokens"], row.floor_us) for row in rows if row.floor_us > 0})
