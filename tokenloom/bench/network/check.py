"""Checks a network, part by part, on ranks of its own or as one of those that torchrun started."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tokenloom.bench import legends
from tokenloom.bench.network import findings, speed
from tokenloom.bench.network.bits import check_bits, sizes
from tokenloom.bench.network.findings import Finding, merge
from tokenloom.bench.network.order import check_order
from tokenloom.bench.network.speed import Points, Wire, check_links, check_rails, fit_constants
from tokenloom.bench.setup import Run, machine
from tokenloom.bench.tables import say
from tokenloom.comm.communicator import Communicator
from tokenloom.env import rendezvous
from tokenloom.errors import BackendUnavailable, InvalidArgument, PeerTimeout, TokenloomError
from tokenloom.runtime import topology as topologies
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.topology import Place, Topology
from tokenloom.tune.network.constants import write_constants

START_LIMIT_S = 120.0
"""For ranks of our own to start; they wait for each other without --timeout-s then."""
LIMIT_S = 3600.0
"""For everything on ranks of our own. Single waits end at --timeout-s."""


@dataclass(frozen=True)
class CheckOptions:
    """Choices of the user, the same on all ranks.

    Attributes:
        ranks_per_node: as in ``Communicator``.
        timeout_s: longest wait for another rank, in seconds; over NCCL the group's own holds as well.
        fits_constants: whether constants of the cost model were asked for, which one node does not have.
    """

    ranks_per_node: int | None = None
    timeout_s: float = 30.0
    rounds: int = 30
    seed: int = 1
    large_bytes: int | None = None
    fits_constants: bool = False


@dataclass(frozen=True)
class CheckReport:
    """Results, the same on all ranks.

    Attributes:
        about: lines on nodes, transport and backend.
        points: for the constants of the cost model; None where there is one node.
    """

    about: list[str]
    nodes: str
    transport: str
    findings: list[Finding]
    points: Points | None


def check_on_rank(context: RankContext, options: CheckOptions) -> CheckReport:
    """Run :func:`check` on a rank of a pool; rank 0 reports the parts."""
    say = context.report if context.rank == 0 else lambda what: None
    return check(context.group, context.device, options, say)


def check(
    group: dist.ProcessGroup,
    device: torch.device,
    options: CheckOptions,
    say: Callable[[str], None] = lambda what: None,
) -> CheckReport:
    """Check the network on this rank. Collective.

    Args:
        say: called with what begins.
    """
    wait_s = options.timeout_s
    with ExitStack() as stack:
        ranks = stack.enter_context(closing(RankGroup(group, device=device, timeout_s=wait_s, open_timeout_s=wait_s)))
        if ranks.num_ranks < 2:
            raise InvalidArgument("there is one rank, expected at least two; start more")
        say("topology")
        topology, about = find_topology(ranks, options.ranks_per_node)
        if options.fits_constants and topology.num_nodes == 1:
            raise InvalidArgument(
                "--constants needs two nodes, but all ranks are on one; pass a smaller --ranks-per-node"
            )
        comms, lines = _make_comms(group, device, options, topology)
        for comm in comms:
            stack.enter_context(comm)
        about += lines
        found = [Finding("topology", "nodes", "nodes", topology.why_no_rails is None, topology.describe())]
        say("bits of every path, against the reference")
        found += merge("bits", ranks.all_gather_object(check_bits(comms, topology, options.seed), "bits"))
        for comm in comms:
            say(f"order of calls, over {comm.backend}")
            found += check_order(ranks, comm, options.rounds, options.seed)
        wire = Wire(ranks)
        say("links")
        found += check_links(wire, topology, options.large_bytes)
        say("all rails at once")
        of_rails, points = check_rails(wire, topology)
        return CheckReport(about, topology.describe(), ranks.transport, found + of_rails, points)


def _make_comms(
    group: dist.ProcessGroup, device: torch.device, options: CheckOptions, topology: Topology
) -> tuple[list[Communicator], list[str]]:
    """A communicator for each path that rows can take here, and lines about them. Collective."""
    comms: list[Communicator] = []
    plan, wait_s = sizes(len(topology.node_of)), options.timeout_s
    unchecked: list[str] = []
    for backend, transport in (("auto", "auto"), ("collective", "auto"), ("auto", "gin"), ("padded", "auto")):
        by_kernels = {"gin": "transport gin"}.get(transport) or {"padded": "backend padded"}.get(backend)
        if any(comm.backend == backend for comm in comms) or (by_kernels and topology.num_nodes == 1):
            continue
        try:
            comm = Communicator(
                group,
                num_experts=plan.num_experts,
                hidden=plan.hidden,
                top_k=plan.top_k,
                max_tokens_per_rank=plan.max_tokens_per_rank,
                backend=backend,
                transport=transport,
                device=device,
                dtype=torch.float32,  # the widest rows that are checked
                checked=True,
                ranks_per_node=options.ranks_per_node,
                timeout_s=wait_s,
                open_timeout_s=wait_s,
            )
        except BackendUnavailable as error:
            if not by_kernels:
                raise
            why = str(error).splitlines()[0].partition("; use ")[0]
            unchecked.append(f"  {by_kernels} is not checked: {why}")
            continue
        comms.append(comm)
    lines = [line for line in comms[0].describe().splitlines()[1:] if "experts" not in line and "rows" not in line]
    return comms, lines + unchecked


def find_topology(ranks: RankGroup, ranks_per_node: int | None) -> tuple[Topology, list[str]]:
    """The nodes as a Communicator finds them, and lines that say who is where. Collective."""
    topologies.checked_ranks_per_node(ranks_per_node, ranks.num_ranks)
    places = ranks.all_gather_object(Place.own(ranks.device), "finding nodes")
    topology = topologies.find_nodes(places)
    if ranks_per_node is not None:
        topology = topologies.pretended(ranks.num_ranks, ranks_per_node)
    lines = []
    for node, members in enumerate(topology.nodes):
        hosts = sorted({places[rank].host.partition("/")[0] for rank in members})
        lines.append(f"  node {node}: ranks {', '.join(map(str, members))} on {', '.join(hosts)}")
    return topology, lines


def run_on_own_ranks(run: Run, options: CheckOptions, constants_file: Path | None = None) -> bool:
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


def run_launched(run: Run, device: str | None, options: CheckOptions, constants_file: Path | None = None) -> bool:
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


def show(run: Run, found: CheckReport, constants_file: Path | None = None) -> bool:
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
        limits = {"slow": speed.SLOW_SHARE, "late": speed.LATE_TIMES, "late_us": speed.LATE_US[run.device]}
        run.say(legends.NETWORK_LINKS.format(turns=speed.LINK_TURNS, **limits))
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
