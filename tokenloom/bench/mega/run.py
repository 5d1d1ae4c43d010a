"""Runs ``tokenloom bench mega``: measures the FP8 layer and its stages, and shows what it found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tokenloom.bench.common import timing
from tokenloom.bench.common.plot import load_matplotlib, write_curves_png
from tokenloom.bench.common.rates import LINK_GBYTES_PER_S
from tokenloom.bench.common.rows import write_json
from tokenloom.bench.common.setup import run_setup
from tokenloom.bench.common.tables import Fitted, counted
from tokenloom.bench.mega import rows as mega_rows
from tokenloom.bench.mega.measure import measure_on_rank
from tokenloom.bench.mega.others import OTHERS, load
from tokenloom.bench.mega.trace import write_trace
from tokenloom.bench.mega.work import FP8_TFLOPS, HBM_GBYTES_PER_S, MegaShape
from tokenloom.runtime.processes import RankPool

LEGEND = (
    "p50 and p99 of one call, of the slowest rank of each sample, in a replayed CUDA graph of {calls}; events: p50 "
    "around one call. TFLOP/s: of all ranks' routes and shared experts, per rank. HBM: the weights of the experts "
    "that have a token, on the rank that has most such experts; NVLink: what leaves the busiest rank, a row for each "
    "route there and back; both per p50. Floor: the largest of those weights at {hbm:,.0f} GB/s, the arithmetic of "
    "the busiest rank at {tflops:,.0f} TFLOP/s, and what leaves the busiest rank at {link:,.0f} GB/s. Stages: of the "
    "slowest rank of each, in a graph of one call."
)
COLD_LEGEND = "Cold: L2 was overwritten before each sample, so weights come from HBM."
OTHERS_LEGEND = (
    "GB/s count for all what ours moves. Times ours: a layer's time over ours, above 1 where ours is faster."
)


def run_mega(
    console: Console,
    num_ranks: int,
    shape: MegaShape,
    tokens: Sequence[int],
    *,
    command: Sequence[str],
    iterations: int,
    cold: bool = False,
    against: Sequence[str] = (),
    plot_file: Path | None = None,
    trace_file: Path | None = None,
    json_file: Path | None = None,
) -> None:
    """Measure every number of tokens on GPUs, print a table, write the files that were asked for.

    Args:
        console: where the table goes.
        num_ranks: W.
        shape: the layer.
        tokens: tokens of every rank, one row each.
        command: the arguments of ``tokenloom``, for the record.
        iterations: samples of each row, at least timing.ROUNDS.
        cold: overwrite L2 before each sample, which then is one call.
        against: names of OTHERS, measured in turns with ours.
        plot_file: PNG for curves.
        trace_file: file for a call of the last number of tokens, for Perfetto.
        json_file: file for the rows with their setup.

    Raises:
        InvalidArgument: a layer does not take the shape.
        PackageMissing: a plot without matplotlib; a layer that is not there.
        RankFailed: a rank failed.
    """
    if plot_file is not None:
        load_matplotlib()
    versions = load(against, shape)
    setup = run_setup("cuda", num_ranks, command)
    setup |= {name: version for name, version in versions.items() if version is not None}
    limit_s = timing.limit_s(iterations) * len(tokens) * (1 + len(against))
    with RankPool(num_ranks, "cuda") as pool, console.status(f"starting {num_ranks} ranks") as status:
        arguments = (shape, list(tokens), iterations, cold, list(against), trace_file is not None)
        results = pool.run(measure_on_rank, *arguments, limit_s=limit_s, on_event=status.update)
    rows = [
        row
        for i, num_tokens in enumerate(tokens)
        for row in mega_rows.make_rows(shape, num_ranks, num_tokens, iterations, cold, [each[i] for each in results])
    ]
    notes = mega_rows.notes(rows)
    console.print(f"{counted(num_ranks, 'rank')} on {setup['device_name']}", markup=False)
    console.print(Fitted(mega_rows.table(rows), keys=2 if against else 1))
    for line in (legend(cold, against), *notes):
        console.print(line, markup=False)
    if json_file is not None:
        write_json(json_file, setup, notes, rows)
        console.print(f"rows written to {json_file}", markup=False)
    if plot_file is not None:
        write_curves_png(
            plot_file,
            setup,
            "MegaMoE",
            f"hidden {shape.hidden}, intermediate {shape.intermediate}, top-{shape.top_k} of {shape.num_experts} "
            f"experts{', cold L2' if cold else ''}",
            mega_rows.curves(rows),
            {"floor": mega_rows.floors(rows)},
        )
        console.print(f"chart written to {plot_file}", markup=False)
    if trace_file is not None:
        name = [row.name for row in rows if row.who == mega_rows.OURS][-1]
        traced = [times for each in results if (times := each[-1].traced) is not None]
        write_trace(trace_file, setup, name, tokens[-1], traced)
        console.print(f"a call of {tokens[-1]} tokens written to {trace_file}; open it in Perfetto", markup=False)


def legend(cold: bool, against: Sequence[str]) -> str:
    """Explain the table's columns."""
    calls = "one call" if cold else f"{timing.GRAPH_CALLS} calls"
    parts = [LEGEND.format(calls=calls, hbm=HBM_GBYTES_PER_S, tflops=FP8_TFLOPS, link=LINK_GBYTES_PER_S)]
    parts += [COLD_LEGEND] if cold else []
    parts += [f"{OTHERS[name].about}." for name in against]
    parts += [OTHERS_LEGEND] if against else []
    return " ".join(parts)
