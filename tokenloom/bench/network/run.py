"""Runs ``tokenloom check-network``: on ranks of its own, or as one of those that torchrun started."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from tokenloom.backends.gin.availability import examine
from tokenloom.bench.network import judge, report
from tokenloom.bench.network.fit import fit_constants
from tokenloom.bench.network.launched import joined, local_device
from tokenloom.bench.network.on_rank import Options, Report, check, check_on_rank
from tokenloom.bench.network.parts import LINK_TURNS
from tokenloom.bench.setup import machine, run_setup, write_json
from tokenloom.bench.tables import Fitted, say
from tokenloom.errors import TokenloomError
from tokenloom.runtime.processes import RankContext, RankPool
from tokenloom.tune.network.constants import REGIMES, Constants, write_constants

START_LIMIT_S = 120.0
"""For ranks of our own to start; they wait for each other without --timeout-s then."""
LIMIT_S = 3600.0
"""For everything on ranks of our own. Single waits end at --timeout-s."""


@dataclass(frozen=True)
class Files:
    """Files to write; None: not asked for.

    Attributes:
        json: for the findings with their setup.
        constants: for the constants of the cost model.
    """

    json: Path | None = None
    constants: Path | None = None


def run_on_own_ranks(
    console: Console, num_ranks: int, device: str, options: Options, files: Files, command: Sequence[str]
) -> bool:
    """Check between processes of this machine, and show what was found.

    Args:
        num_ranks: W.
        device: "cpu" or "cuda".
        command: the arguments of ``tokenloom``, for the record.

    Returns:
        Whether everything passed.

    Raises:
        InvalidArgument: see :func:`tokenloom.bench.network.on_rank.check`.
        RankFailed: a rank failed, or another one did not answer it.
    """
    reached = ["starting the ranks"]

    def say(part: str) -> None:
        reached.append(part)
        status.update(part)

    with RankPool(num_ranks, device) as pool, console.status(f"starting {num_ranks} ranks") as status:
        try:
            pool.run(answer, limit_s=START_LIMIT_S)
            found = pool.run(check_on_rank, options, limit_s=LIMIT_S, on_event=say)[0]
        except TokenloomError:
            console.print(f"[bold red]FAIL[/] in: {reached[-1]}")
            raise
    return show(console, found, num_ranks, device, files, command)


def answer(context: RankContext) -> None:
    """Say that this rank has started."""


def run_launched(console: Console, device: str | None, options: Options, files: Files, command: Sequence[str]) -> bool:
    """Check as one of the ranks that torchrun started; rank 0 shows what was found and writes the files.

    Args:
        device: "cpu" or "cuda"; None: the GPU if there is one.

    Returns:
        Whether everything passed, on every rank.

    Raises:
        InvalidArgument: see :func:`tokenloom.bench.network.on_rank.check`.
        PeerTimeout, PeerError: a rank is missing or failed.
    """
    where = local_device(device)
    reached = ["joining the process group"]
    try:
        with joined(where, options.timeout_s) as group:
            rank, num_ranks = group.rank(), group.size()
            found = check(group, where, options, reached.append)
    except TokenloomError:
        console.print(f"[bold red]FAIL[/] in: {reached[-1]}")
        raise
    if rank == 0:
        show(console, found, num_ranks, where.type, files, command)
    return report.passed(found.findings)


def show(console: Console, found: Report, num_ranks: int, device: str, files: Files, command: Sequence[str]) -> bool:
    """Print tables and write files; whether everything passed."""
    setup = run_setup(device, num_ranks, command)
    gin_here = examine(torch.device(device))
    over = f"NCCL {setup['nccl']}" if setup["nccl"] else found.transport
    about = [
        f"{num_ranks} ranks on {machine(device)}, {found.transport}; {found.nodes}",
        *found.about,
        f"  on rank 0: {over}, headers {gin_here.facts['headers']}; "
        f"GIN {'possible' if gin_here.works else 'not possible:'} {gin_here.why}",
    ]
    notes = list(report.notes(found.findings, found.points is not None))
    passed = report.passed(found.findings)
    say(console, *about)
    console.print(Fitted(report.summary(found.findings)))
    if (table := report.links(found.findings)) is not None:
        console.print(Fitted(table))
        late = {"late": judge.LATE_TIMES, "late_us": judge.LATE_US[device]}
        legend = report.LEGEND.format(turns=LINK_TURNS, slow=judge.SLOW_SHARE, **late)
        console.print(legend, markup=False)
    constants = _constants(found, setup)
    notes += [] if constants is None else _in_words(constants)
    say(console, *notes)
    if files.json is not None:
        write_json(files.json, {**setup, "nodes": found.nodes, "passed": passed}, [*about, *notes], found.findings)
        console.print(f"findings written to {files.json}", markup=False)
    console.print("[bold green]PASS[/]" if passed else "[bold red]FAIL[/]: see the tables above")
    if files.constants is not None:
        assert constants is not None, "check refuses one node where constants are wanted"
        if not passed:
            console.print(f"{files.constants} was not written, because checks failed", markup=False)
        else:
            write_constants(files.constants, constants)
            console.print(f"written for tokenloom plan --constants {files.constants}", markup=False)
    return passed


def _constants(found: Report, setup: dict[str, str | int | None]) -> Constants | None:
    if found.points is None:
        return None
    over = f"NCCL {setup['nccl']}" if setup["nccl"] else found.transport
    where = f"tokenloom check-network: {found.nodes}, {setup['device_name']}, {over}, {time.strftime('%Y-%m-%d')}"
    return fit_constants(found.points, where)


def _in_words(constants: Constants) -> list[str]:
    lines = [f"Constants for tokenloom plan ({constants.where}):"]
    for name in REGIMES:
        of = constants.regime(name)
        lines.append(
            f"  {name}: start {of.base_us:,.1f} µs, NIC {of.nic_gbytes_per_s:.3g} GB/s, a message {of.put_us:.3g} µs"
        )
    return [*lines, f"  inside nodes (NVLink): {constants.nvlink_gbytes_per_s:.3g} GB/s"]
