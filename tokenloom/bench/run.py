"""``tokenloom bench comm``: measures, and shows what it found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tokenloom.bench import comm, plot, rows, timing
from tokenloom.bench.series import Series
from tokenloom.bench.setup import run_setup
from tokenloom.runtime.processes import RankPool

LEGEND = (
    "p50 and p99 of one call, over samples, of the slowest rank of each; physical: bytes that leave the busiest rank "
    "over a link; logical: bytes received, those that stay on their rank included; per p50, 1 GB is 1e9 bytes. Names "
    "end in the clock: events around one call, graph (a replayed CUDA graph of {calls} calls), or wall, the host's."
)


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
    """Measure the series, print a table, and write the files that were asked for.

    Args:
        console: for the table.
        num_ranks: W. device: "cpu" or "cuda".
        series, notes: as :func:`tokenloom.bench.series.plan_series` gives them.
        command: the arguments of ``tokenloom``, for the record.
        iterations: samples of each series; None: as many as usual for the device.
        plot_file: PNG. json_file: the rows with their setup.

    Raises:
        InvalidArgument: a plot without matplotlib; nothing was measured.
        RankFailed: a rank failed.
    """
    if plot_file is not None:
        plot.load_matplotlib()
    setup = run_setup(device, num_ranks, command)
    for note in notes:
        console.print(note, markup=False)
    with RankPool(num_ranks, device) as pool, console.status(f"starting {num_ranks} ranks") as status:
        measured = list(comm.measure(pool, series, iterations or comm.DEFAULT_ITERATIONS[device], status.update))
    console.print(rows.table(measured))
    console.print(LEGEND.format(calls=timing.GRAPH_CALLS), markup=False)
    if json_file is not None:
        rows.write_json(json_file, setup, notes, measured)
        console.print(f"rows written to {json_file}", markup=False)
    if plot_file is not None:
        plot.write_png(plot_file, setup, measured)
        console.print(f"chart written to {plot_file}", markup=False)
