"""``tokenloom bench comm``: dispatch and combine, as a user calls them, over every backend: rows, tables, chart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table

from tokenloom.bench import clock, comm_work, harness, legends
from tokenloom.bench.comm_calls import EAGER_PAIRS, measure_on_rank, warm_up_iterations
from tokenloom.bench.comm_work import Series, Traffic, label, sums_per_rank
from tokenloom.bench.harness import Measured
from tokenloom.bench.plot import load_matplotlib, write_bars_png
from tokenloom.bench.rivals import deep_ep
from tokenloom.bench.setup import TRANSPORTS, Run, machine
from tokenloom.bench.tables import counted, make_table, say
from tokenloom.bench.workload import LINK_GBYTES_PER_S, ROUTING_SEED, Shape
from tokenloom.runtime.processes import RankPool

DEFAULT_ITERATIONS = {"cpu": 10, "cuda": 100}
MISSING = "-"


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        name: from :meth:`tokenloom.bench.comm_work.Series.name`.
        p50_us, p99_us: time of one call over samples, each of its slowest rank. Measured values, not interpolated.
            Eager rows: of one pair. Halves: of both halves and the GEMM between them.
        slowest_rank: the rank that was slowest most often.
        floor_us: least time for the bytes on the links of an H200; None on CPUs, and where they are not counted.
        parts_us: medians of the slowest rank. Eager rows: "host_dispatch" and "host_combine", the host's time in one
            call. Halves: "work", the GEMM alone; "one_piece", the call in one piece and the GEMM behind it; "exposed",
            p50_us without the GEMM alone.
        physical_gbytes_per_s, logical_gbytes_per_s: the bytes of :class:`Traffic` per p50; 1 GB is 1e9 bytes. None for
            halves, whose p50 has a GEMM in it. The physical ones are None where they are not counted.
        num_sms: streaming multiprocessors that the operation occupies; None where that is not ours to say.
        setup: everything needed to repeat the row, besides what all rows of a run share.
    """

    name: str
    p50_us: float
    p99_us: float
    slowest_rank: int
    floor_us: float | None
    parts_us: dict[str, float]
    physical_gbytes_per_s: float | None
    logical_gbytes_per_s: float | None
    num_sms: int | None
    setup: dict[str, Any]


def make_row(
    name: str,
    by_rank: Sequence[Measured],
    moved: Traffic,
    num_sms: int | None,
    setup: dict[str, Any],
    *,
    on_links: bool,
    counted: bool = True,
) -> Row:
    """Make a row from what all ranks found.

    Args:
        on_links: the ranks are GPUs, so there is a floor.
        counted: the bytes that leave a rank are known.
    """
    found = harness.percentiles(by_rank)
    p50, p99, slowest_rank = found.pop("call")
    parts = {part: median for part, (median, _, _) in found.items()}
    if "work" in parts:
        parts["exposed"] = p50 - parts["work"]
    sizes = asdict(moved) | ({} if counted else {"physical_bytes": None, "value_bytes": None})
    return Row(
        name=name,
        p50_us=p50,
        p99_us=p99,
        slowest_rank=slowest_rank,
        floor_us=moved.floor_us if on_links and counted else None,
        parts_us=parts,
        physical_gbytes_per_s=None if "work" in parts or not counted else moved.physical_bytes / p50 / 1e3,
        logical_gbytes_per_s=None if "work" in parts else moved.logical_bytes / p50 / 1e3,
        num_sms=num_sms,
        setup=setup | sizes,
    )


def kind_of(row: Row) -> str:
    """What the row is of: "calls", "eager" pairs with the host's time, or "halves" around a GEMM."""
    if "work" in row.parts_us:
        return "halves"
    return "eager" if "host_dispatch" in row.parts_us else "calls"


def tables(rows: Sequence[Row]) -> list[Table]:
    """All rows, for people, in a table for each kind and shape that there is."""
    found: dict[tuple[str, Shape], list[Row]] = {}
    for row in rows:
        found.setdefault((kind_of(row), _shape(row)), []).append(row)
    return [_table(kind, shape, alike) for name in KINDS for (kind, shape), alike in found.items() if kind == name]


KINDS: dict[str, tuple[tuple[str, ...], Callable[[Row], tuple[str, ...]]]] = {
    "calls": (
        ("operation", "p50 µs", "times\nfloor", "p99 µs", "physical\nGB/s", "logical\nGB/s"),
        lambda row: (
            _us(row.p50_us),
            f"{row.p50_us / row.floor_us:.2f}" if row.floor_us else MISSING,
            _us(row.p99_us),
            _rate(row.physical_gbytes_per_s),
            _rate(row.logical_gbytes_per_s),
        ),
    ),
    "eager": (
        ("eager pairs", "p50 µs", "p99 µs", "host µs\ndispatch", "host µs\ncombine"),
        lambda row: tuple(
            map(_us, (row.p50_us, row.p99_us, row.parts_us["host_dispatch"], row.parts_us["host_combine"]))
        ),
    ),
    "halves": (
        ("halves around a GEMM", "p50 µs", "GEMM\nalone", "exposed", "one piece,\nthen GEMM"),
        lambda row: tuple(
            map(_us, (row.p50_us, row.parts_us["work"], row.parts_us["exposed"], row.parts_us["one_piece"]))
        ),
    ),
}
"""For each kind of row: headers of its table, and the cells behind name, SMs and floor. Columns without any value are
left out."""


def _table(kind: str, shape: Shape, rows: Sequence[Row]) -> Table:
    (what, *headers), cells = KINDS[kind]
    lines = [(label(row.name), *_first_cells(row), *cells(row)) for row in rows]
    columns = [
        (header, values)
        for header, values in zip((what, "SMs", "floor\nµs", *headers), zip(*lines, strict=True), strict=True)
        if any(value != MISSING for value in values)
    ]
    return make_table(
        [header for header, _ in columns],
        zip(*(values for _, values in columns), strict=True),
        title=_title(shape),
        title_style=None,
        padding=0,
    )


def _first_cells(row: Row) -> tuple[str, str]:
    """SMs and floor."""
    sms = MISSING if row.num_sms is None else str(row.num_sms)
    return sms, MISSING if row.floor_us is None else _us(row.floor_us)


def _us(value: float) -> str:
    return f"{value:,.1f}"


def _rate(gbytes_per_s: float | None) -> str:
    return MISSING if gbytes_per_s is None else f"{gbytes_per_s:.3g}"


def measure(
    pool: RankPool, series: Sequence[Series], iterations: int, starting: Callable[[str], None] = lambda what: None
) -> Iterator[Row]:
    """Measure, row by row.

    Args:
        pool: the ranks.
        series: from :func:`tokenloom.bench.comm_work.plan_series`: those of one shape together, and within them
            those of one operation.
        iterations: samples of each, in turns, after a fifth as many to warm up.
        starting: called with what is about to be measured.

    Raises:
        RankFailed: a rank failed.
    """
    for shape, found in groupby(series, lambda each: each.shape):
        together = list(found)
        limit_s = harness.limit_s(iterations) * len({each.operation for each in together})
        results = pool.run(measure_on_rank, together, iterations, limit_s=limit_s, on_event=starting)
        plan, ids = shape.plan(pool.num_ranks), [shape.topk_ids(rank) for rank in range(pool.num_ranks)]
        rows = comm_work.rows_between(plan, ids)
        for index, each in enumerate(together):
            over = None
            if each.backend == "network" and each.ranks_per_node is not None:
                over = comm_work.relayed(plan, ids, each.ranks_per_node)
            yield make_row(
                each.name(pool.num_ranks),
                [result[index] for result in results],
                comm_work.moved(plan, rows, each.operation, over),
                each.num_sms,
                _setup_of(each, pool, iterations),
                on_links=pool.device == "cuda",
                counted=each.backend == deep_ep.NAME or sums_per_rank(each.backend),
            )


def _setup_of(series: Series, pool: RankPool, iterations: int) -> dict[str, Any]:
    calls = {"graph": clock.GRAPH_CALLS, "eager": EAGER_PAIRS[pool.device]}
    return {
        "operation": series.operation.name,
        "backend": series.backend,
        "payload": series.operation.payload,
        "layout": series.operation.layout,
        "timing": series.timing,
        **asdict(series.shape),
        "num_ranks": pool.num_ranks,
        "ranks_per_node": series.ranks_per_node,
        "sizes": None if series.backend == deep_ep.NAME else series.sizes,
        "scale_layout": series.scale_layout,
        "beside_us": series.beside_us,
        "calls_per_sample": calls.get(series.timing, 1),
        "routing": "uniform",
        "routing_seed": ROUTING_SEED,
        "iterations": iterations,
        "warm_up_iterations": warm_up_iterations(iterations),
        "rounds": harness.ROUNDS,
    }


def run_comm(run: Run, series: Sequence[Series], notes: Sequence[str], iterations: int | None = None) -> None:
    """Measure the series, print tables, and write the files that were asked for.

    Args:
        series, notes: from :func:`tokenloom.bench.comm_work.plan_series`.
        iterations: samples of each series; None: the default for the device.

    Raises:
        PackageMissing: a plot without matplotlib.
        RankFailed: a rank failed.
    """
    if run.plot_file is not None:
        load_matplotlib()
    setup, samples = run.setup(), iterations or DEFAULT_ITERATIONS[run.device]
    run.say(
        f"{counted(run.num_ranks, 'rank')} on {machine(run.device)}, over {TRANSPORTS[run.device]}; {samples} samples "
        f"of each row, behind {warm_up_iterations(samples)} to warm up"
    )
    say(run.console, *notes)
    with run.ranks() as (pool, starting):
        measured = list(measure(pool, series, samples, starting))
    for table in tables(measured):
        run.show(table)
    kinds = {kind_of(row) for row in measured}
    numbers = {
        "link": LINK_GBYTES_PER_S,
        "clock": legends.COMM_CLOCKS[run.device].format(calls=clock.GRAPH_CALLS),
        "pairs": EAGER_PAIRS[run.device],
    }
    floors = [legends.COMM_FLOOR] if any(row.floor_us is not None for row in measured) else []
    texts = (legends.COMM, *floors, *(text for kind, text in legends.COMM_KINDS.items() if kind in kinds))
    run.say(*(text.format(**numbers) for text in texts))
    run.keep(setup, notes, measured)
    if run.plot_file is not None:
        write_chart(run.plot_file, setup, measured)
        run.say(f"chart written to {run.plot_file}")


def write_chart(file: Path, setup: dict[str, Any], rows: Sequence[Row]) -> None:
    """Draw the median of every row as a bar: a chart for each shape, a group for each operation.

    Args:
        file: PNG.
        setup: from :func:`tokenloom.bench.setup.run_setup`.
        rows: at least one; the rows of one shape together.

    Raises:
        PackageMissing: matplotlib is not installed.
    """
    charts = {
        _title(shape): [(_operation(row), _who(row), row.p50_us) for row in alike]
        for shape, alike in groupby(rows, _shape)
    }
    write_bars_png(file, setup, "dispatch and combine", charts)


def _shape(row: Row) -> Shape:
    return Shape(**{each.name: row.setup[each.name] for each in fields(Shape)})


def _title(shape: Shape) -> str:
    sizes = f"{shape.num_tokens} tokens a rank, hidden {shape.hidden}"
    return f"{sizes}, top-{shape.top_k} of {shape.num_experts} experts"


def _who(row: Row) -> str:
    sms = "" if row.num_sms is None else f", {row.num_sms} SMs"
    halves = ", halves around a GEMM" if kind_of(row) == "halves" else ""
    return f"{row.setup['backend']}{sms}, {row.setup['timing']}{halves}"


def _operation(row: Row) -> str:
    return f"{row.setup['operation']} {row.setup['payload']} {row.setup['layout']}"
