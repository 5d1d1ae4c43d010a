"""Runs ``tokenloom bench train``: checks and measures a training step, and shows what it found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tokenloom.bench.common.rows import write_json
from tokenloom.bench.common.setup import machine, run_setup
from tokenloom.bench.common.tables import Fitted
from tokenloom.bench.common.timing import limit_s
from tokenloom.bench.train.measure import measure_on_rank
from tokenloom.bench.train.report import Report
from tokenloom.bench.train.rows import BASELINES, OURS
from tokenloom.bench.train.work import TrainOptions, TrainShape, require_steerable
from tokenloom.runtime.processes import RankPool

DEFAULT_ITERATIONS = {"cpu": 6, "cuda": 30}
TIMES_LEGEND = (
    "p50 and p99 of the slowest rank of each sample; times include the router. Inference: forward without gradients. "
    "TFLOP/s: of the experts' GEMMs, for each rank that computes."
)
BASELINES_LEGEND = (
    "{rival} rival: torch alone (sort by expert, all_to_all_single of one row per route, grouped_mm, SwiGLU, and "
    "back). Local: one rank's tokens and experts, without a network. One rank: all tokens and all experts, while the "
    "other ranks are idle. Both use torch with this layer's GEMMs and SwiGLU. All take turns with this layer."
)
EXPOSED_LEGEND = "Exposed: this layer less the baseline, and in % of this layer. Scaling: one / W by this layer."
CPU_NOTE = "ranks on CPUs share cores and memory: what is exposed here is not the network's time alone"
EQUALITY_NOTE = (
    "On CPUs this comparison is about equal numbers, not about speed. There, backend {backend} is plain torch over "
    "gloo, and each of its calls begins with a handshake of all ranks. The kernels that make tokenloom fast run on "
    "Hopper GPUs."
)


def run_train(
    console: Console,
    num_ranks: int,
    device: str,
    shape: TrainShape,
    options: TrainOptions,
    *,
    command: Sequence[str],
    json_file: Path | None = None,
) -> bool:
    """Check and measure, print it all, write the file that was asked for.

    Args:
        console: where the tables go.
        num_ranks: W.
        device: "cpu" or "cuda".
        shape, options: the layer, and how it runs.
        command: the arguments of ``tokenloom``, for the record.
        json_file: file for the rows with their setup.

    Returns:
        False if a check failed.

    Raises:
        InvalidArgument: the shape does not fit the ranks, or the skew.
        RankFailed: a rank failed.
    """
    shape.plan(num_ranks)
    if options.skew:
        require_steerable(shape.num_experts, shape.hidden)
    setup = run_setup(device, num_ranks, command)
    with RankPool(num_ranks, device) as pool, console.status(f"starting {num_ranks} ranks") as status:
        most_s = limit_s(options.iterations)
        by_rank = pool.run(measure_on_rank, shape, options, limit_s=most_s, on_event=status.update)
    report = Report(shape, options, by_rank)
    notes = list(report.notes)
    if device == "cpu":
        notes += [CPU_NOTE] if num_ranks > 1 else []
    about_speed = [EQUALITY_NOTE.format(backend=by_rank[0].backend)] if device == "cpu" else []
    _show(console, report, machine(device), notes, about_speed)
    notes += about_speed
    if json_file is not None:
        write_json(json_file, setup, notes, [*report.times, *report.checks, *report.saved])
        console.print(f"rows written to {json_file}", markup=False)
    return report.passed


def _show(console: Console, report: Report, where: str, notes: Sequence[str], about_speed: Sequence[str]) -> None:
    def say(*lines: str) -> None:
        for line in lines:
            console.print(line, markup=False, soft_wrap=False)

    def title(text: str) -> None:
        say("", f"-- {text}")

    say(*report.setup_lines(where))
    title("check: differences from a reference")
    if report.checks:
        console.print(Fitted(report.check_table()))
        say(report.check_legend(), "PASS" if report.passed else "FAIL")
    else:
        say("not asked for (--no-check)")
    title("kept for backward, on a rank")
    console.print(Fitted(report.saved_table()))
    title("times")
    console.print(Fitted(report.times_table([OURS]), keys=2))
    say(TIMES_LEGEND)
    title("baselines")
    console.print(Fitted(report.times_table([report.rival, *BASELINES]), keys=2))
    say(BASELINES_LEGEND.format(rival=report.rival), *notes)
    title("exposed network time")
    console.print(Fitted(report.exposed_table()))
    say(EXPOSED_LEGEND, *about_speed)
