"""Runs ``tokenloom tune``: measures strategies on its own ranks, shows what it found and where the choice is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from tokenloom import env
from tokenloom.backends import registry
from tokenloom.bench.common.rows import write_json
from tokenloom.bench.common.setup import TRANSPORTS, run_setup
from tokenloom.bench.common.shape import DTYPES, Shape
from tokenloom.bench.common.tables import Fitted, say
from tokenloom.bench.common.timing import limit_s
from tokenloom.runtime.processes import RankContext, RankPool
from tokenloom.tune.profiler import Profile, profile

LEGEND = (
    "With GEMM: dispatch and the GEMM of gates and ups; the GEMM of outputs and combine. Alone: the transfer "
    "without it. Gradient: the transfer backward. Score: with GEMM + gradient. GB/s: bytes that leave the busiest "
    "rank, by the time of the transfer alone; 1 GB is 1e9 bytes."
)


def run_tune(
    console: Console,
    num_ranks: int,
    device: str,
    shape: Shape,
    *,
    intermediate: int,
    dtype: str,
    skew: float,
    backend: str,
    command: Sequence[str],
    iterations: int,
    json_file: Path | None = None,
) -> bool:
    """Measure, print a table, keep the choice, and write the file that was asked for.

    Args:
        console: where the table goes.
        num_ranks: W.
        device: "cpu" or "cuda".
        shape, intermediate, skew, backend, iterations: see :func:`tokenloom.tune.profiler.profile`.
        dtype: one of DTYPES.
        command: the arguments of ``tokenloom``, for the record.
        json_file: file for the rows with their setup.

    Returns:
        Whether the choice was kept.

    Raises:
        InvalidArgument: the shape does not fit the ranks.
        BackendUnavailable: the backend does not work here.
        RankFailed: a rank failed.
    """
    sizes = shape.plan(num_ranks)
    here = registry.availability(TRANSPORTS[device], torch.device(device), sizes, DTYPES[dtype], name=backend)
    registry.choose(backend, [here])  # or a rank would say it, with its traceback
    options: dict[str, Any] = {"intermediate": intermediate, "dtype": DTYPES[dtype], "skew": skew, "backend": backend}
    with RankPool(num_ranks, device) as pool, console.status(f"measuring on {num_ranks} ranks"):
        options |= {"iterations": iterations, "limit_s": limit_s(iterations)}
        results = pool.run(profile_on_rank, **asdict(shape), **options)
    found = results[0]
    console.print(str(found).partition("\n\n")[0], markup=False)
    console.print(Fitted(table(found), keys=2))
    console.print(LEGEND, markup=False)
    kept = f"kept in {found.file}, where layers find it"
    lost = f"could not be kept: {env.cache_folder()} cannot be written"
    chosen = f"dispatch {found.strategy.dispatch}, combine {found.strategy.combine}"
    say(console, f"{chosen}: {kept if found.file else lost}")
    if json_file is not None:
        setup = run_setup(device, num_ranks, command) | asdict(found.setting)
        setup |= {name: getattr(found, name) for name in ("num_tokens", "skew", "iterations")}
        missing = [f"{row.strategy} of {row.operation}" for row in found.rows if row.score_ms is None]
        write_json(
            json_file, setup, [f"not on backend {found.setting.backend}: {each}" for each in missing], found.rows
        )
        console.print(f"rows written to {json_file}", markup=False)
    return found.file is not None


def table(found: Profile) -> Table:
    """The rows, for people."""
    made = Table("operation", "strategy", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("with GEMM\nms", "alone\nms", "gradient\nms", "score\nms", "GB/s"):
        made.add_column(header, justify="right")
    made.add_column("")
    for row in found.rows:
        times = (row.with_gemm_ms, row.alone_ms, row.gradient_ms, row.score_ms)
        cells = ["-" if ms is None else f"{ms:,.3f}" for ms in times]
        rate = "-" if row.physical_gbytes_per_s is None else f"{row.physical_gbytes_per_s:.3g}"
        said = "not on this backend" if row.score_ms is None else "winner" if row.wins else ""
        made.add_row(row.operation, row.strategy, *cells, rate, said)
    if found.setting.num_nodes > 1:
        made.add_row("combine", "per_node", *["-"] * 5, "not measured")
    return made


def profile_on_rank(context: RankContext, **options: Any) -> Profile:
    """Profile on one rank. Collective."""
    return profile(context.group, device=context.device, **options)
