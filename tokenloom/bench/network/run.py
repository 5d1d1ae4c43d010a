"""Runs ``tokenloom check-network``: on ranks of its own, or as one of those that torchrun started."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tokenloom.bench import legends
from tokenloom.bench.network import findings, links
from tokenloom.bench.network.check import Options, Report, check, check_on_rank
from tokenloom.bench.network.rails import fit_constants
from tokenloom.bench.setup import Run, machine
from tokenloom.bench.tables import say
from tokenloom.env import rendezvous
from tokenloom.errors import InvalidArgument, PeerTimeout, TokenloomError
from tokenloom.runtime.processes import RankContext
from tokenloom.tune.network.constants import write_constants

START_LIMIT_S = 120.0
"""For ranks of our own to start; they wait for each other without --timeout-s then."""
LIMIT_S = 3600.0
"""For everything on ranks of our own. Single waits end at --timeout-s."""


def run_on_own_ranks(run: Run, options: Options, constants_file: Path | None = None) -> bool:
    """Check between processes of this machine, show what was found, and return whether everything passed."""
    reached = ["starting the ranks"]
    with run.ranks() as (pool, update):

        def starting(part: str) -> None:
            reached.append(part)
            update(part)

        with _told(run, reached):
            pool.run(answer, limit_s=START_LIMIT_S)
            found = pool.run(check_on_rank, options, limit_s=LIMIT_S, on_event=starting)[0]
    return show(run, found, constants_file)


def answer(context: RankContext) -> None:
    """Say that this rank has started."""


def run_launched(run: Run, device: str | None, options: Options, constants_file: Path | None = None) -> bool:
    """Check as one of the ranks that torchrun started; rank 0 shows what was found and writes the files.

    Args:
        run: whose ranks and device are not known yet.
    """
    where = local_device(device)
    reached = ["joining the process group"]
    with _told(run, reached), joined(where, options.timeout_s) as group:
        rank, num_ranks = group.rank(), group.size()
        found = check(group, where, options, reached.append)
    if rank == 0:
        show(replace(run, num_ranks=num_ranks, device=where.type), found, constants_file)
    return findings.passed(found.findings)


@contextmanager
def _told(run: Run, reached: list[str]) -> Iterator[None]:
    """Say which part an error ends."""
    try:
        yield
    except TokenloomError:
        run.console.print(f"[bold red]FAIL[/] in: {reached[-1]}")
        raise


def show(run: Run, found: Report, constants_file: Path | None = None) -> bool:
    """Print tables and write files; whether everything passed."""
    setup = run.setup()
    about = [
        f"{run.num_ranks} ranks on {machine(run.device)}, {found.transport}; {found.nodes}",
        *found.about,
    ]
    notes = list(findings.notes(found.findings, found.points is not None))
    passed = findings.passed(found.findings)
    say(run.console, *about)
    run.show(findings.summary(found.findings))
    if (table := findings.links(found.findings)) is not None:
        run.show(table)
        limits = {"slow": links.SLOW_SHARE, "late": links.LATE_TIMES, "late_us": links.LATE_US[run.device]}
        run.say(legends.NETWORK_LINKS.format(turns=links.LINK_TURNS, **limits))
    say(run.console, *notes)
    run.keep({**setup, "nodes": found.nodes, "passed": passed}, [*about, *notes], found.findings, "findings")
    run.console.print("[bold green]PASS[/]" if passed else "[bold red]FAIL[/]: see the tables above")
    if constants_file is not None:
        assert found.points is not None, "check refuses one node where constants are wanted"
        if not passed:
            run.say(f"{constants_file} was not written, because checks failed")
        else:
            over = f"NCCL {setup['nccl']}" if setup["nccl"] else found.transport
            where = f"{found.nodes}, {setup['device_name']}, {over}, {time.strftime('%Y-%m-%d')}"
            write_constants(constants_file, fit_constants(found.points, f"tokenloom check-network: {where}"))
            run.say(f"written for tokenloom plan --constants {constants_file}")
    return passed


def by_torchrun() -> bool:
    """Whether torchrun started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def local_device(device: str | None) -> torch.device:
    """The device of this process: its GPU by its place on the host, or the CPU where there are no GPUs."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or (device is None and not gpus):
        return torch.device("cpu")
    place = dist.get_node_local_rank(0)
    if place >= gpus:
        raise InvalidArgument(
            f"there are {place + 1} processes or more on this host, expected at most {gpus}, one for each GPU; pass "
            "--device cpu"
        )
    return torch.device("cuda", place)


@contextmanager
def joined(device: torch.device, timeout_s: float) -> Iterator[dist.ProcessGroup]:
    """Join the others, over NCCL on GPUs, else over gloo; leave them at the end, unless that failed."""
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            "nccl" if gpu else "gloo", timeout=timedelta(seconds=timeout_s), device_id=device if gpu else None
        )
    except RuntimeError as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        _, _, rank = rendezvous()
        raise PeerTimeout(rank, [], "joining the process group", 0, cause) from error
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()  # not after an error: without a rank it may wait for ever
