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
from tokenloom.bench.common.setup import TRANSPORTS, machine, run_setup
from tokenloom.bench.common.tables import Fitted, counted, say
from tokenloom.runtime.processes import RankPool

LEGEND = "p50 and p99 are over samples, each of its slowest rank. 1 GB is 1e9 bytes."
FLOOR_LEGEND = (
    "Floor: the tokens' values that leave the busiest rank, at {link:,.0f} GB/s, which the links of an H200 carry."
)
CLOCKS = {
    "cpu": "wall, the host's",
    "cuda": "events around one call, or graph, a replayed CUDA graph of {calls} calls",
}
LEGENDS = {
    "calls": "Calls: physical: bytes that leave the busiest rank over a link, those that it hands on included; "
    "logical: bytes received, those that stay on their rank included; per p50. Names end in the clock: {clock}.",
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
        PackageMissing: a plot without matplotlib.
        RankFailed: a rank failed.
    """
    if plot_file is not None:
        load_matplotlib()
    setup = run_setup(device, num_ranks, command)
    samples = iterations or measure.DEFAULT_ITERATIONS[device]
    ranks = counted(num_ranks, "rank")
    console.print(
        f"{ranks} on {machine(device)}, over {TRANSPORTS[device]}; {samples} samples of each row, behind "
        f"{measure.warm_up_iterations(samples)} to warm up",
        markup=False,
    )
    say(console, *notes)
    with RankPool(num_ranks, device) as pool, console.status(f"starting {ranks}") as status:
        measured = list(measure.measure(pool, series, samples, status.update))
    for table in rows.tables(measured):
        console.print(Fitted(table))
    kinds = {rows.kind_of(row) for row in measured}
    clock = CLOCKS[device].format(calls=timing.GRAPH_CALLS)
    numbers = {"link": LINK_GBYTES_PER_S, "clock": clock, "pairs": EAGER_PAIRS[device]}
    floors = [FLOOR_LEGEND] if any(row.floor_us is not None for row in measured) else []
    for text in (LEGEND, *floors, *(text for kind, text in LEGENDS.items() if kind in kinds)):
        console.print(text.format(**numbers), markup=False)
    if json_file is not None:
        write_json(json_file, setup, notes, measured)
        console.print(f"rows written to {json_file}", markup=False)
    if plot_file is not None:
        chart.write_png(plot_file, setup, measured)
        console.print(f"chart written to {plot_file}", markup=False)
