"""Runs ``tokenloom bench comm``: measures, and shows what it found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tokenloom.bench.comm import chart, measure, rows
from tokenloom.bench.comm.samplers import EAGER_PAIRS
from tokenloom.bench.comm.series import Series
from tokenloom.bench.common import timing
from tokenloom.bench.common.plot import load_matplotlib
from tokenloom.bench.common.rates import LINK_GBYTES_PER_S
from tokenloom.bench.common.rows import write_json
from tokenloom.bench.common.setup import run_setup
from tokenloom.runtime.processes import RankPool

LEGEND = (
    "p50 and p99 over samples, of the slowest rank of each. Floor: the tokens' values that leave the busiest rank, at "
    "{link:,.0f} GB/s, which the links of an H200 carry; 1 GB is 1e9 bytes."
)
LEGENDS = {
    "calls": "Calls: physical: bytes that leave the busiest rank over a link, those that it hands on included; "
    "logical: bytes received, those that stay on their rank included; per p50. Names end in the clock: events around "
    "one call, graph (a replayed CUDA graph of {calls} calls), or wall, the host's.",
    "eager": "Eager pairs: wall clock of a dispatch and its combine, in a loop of {pairs} pairs without a graph; "
    "host: until one call returns, on a device that is idle.",
    "halves": "Halves: p50 of sending, a GEMM, and receiving; exposed: p50 without the GEMM alone; beside it the "
    "call in one piece with the GEMM behind it. dispatch+combine sends both before the GEMM, as two micro-batches do.",
}
"""What the tables say, by kind of row."""


def run_comm(
    console: Console,
    num_ranks: int,
    device: str,
    series: Sequence[Series],
    notes: Sequence[str],
    *,
    command: Sequence[str],
    iterations: int | None = None,
    plot_file: Path | None = None,
    json_file: Path | None = None,
) -> None:
    """Measure the series, print tables, and write the files that were asked for.

    Args:
        console: where the table goes.
        num_ranks: W.
        device: "cpu" or "cuda".
        series, notes: from :func:`tokenloom.bench.comm.series.plan_series`.
        command: the arguments of ``tokenloom``, for the record.
        iterations: samples of each series; None: the default for the device.
        plot_file: PNG for a bar chart.
        json_file: file for the rows with their setup.

    Raises:
        InvalidArgument: a plot without matplotlib.
        RankFailed: a rank failed.
    """
    if plot_file is not None:
        load_matplotlib()
    setup = run_setup(device, num_ranks, command)
    for note in notes:
        console.print(note, markup=False)
    with RankPool(num_ranks, device) as pool, console.status(f"starting {num_ranks} ranks") as status:
        measured = list(measure.measure(pool, series, iterations or measure.DEFAULT_ITERATIONS[device], status.update))
    for table in rows.tables(measured):
        console.print(table)
    kinds = {rows.kind_of(row) for row in measured}
    numbers = {"link": LINK_GBYTES_PER_S, "calls": timing.GRAPH_CALLS, "pairs": EAGER_PAIRS[device]}
    for text in (LEGEND, *(text for kind, text in LEGENDS.items() if kind in kinds)):
        console.print(text.format(**numbers), markup=False)
    if json_file is not None:
        write_json(json_file, setup, notes, measured)
        console.print(f"rows written to {json_file}", markup=False)
    if plot_file is not None:
        chart.write_png(plot_file, setup, measured)
        console.print(f"chart written to {plot_file}", markup=False)
