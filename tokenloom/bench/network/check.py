"""What every rank does for ``tokenloom check-network``, part by part."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tokenloom.bench.network.bits import check_bits, sizes
from tokenloom.bench.network.findings import Finding, merge
from tokenloom.bench.network.links import check_links
from tokenloom.bench.network.order import check_order
from tokenloom.bench.network.rails import Points, check_rails
from tokenloom.bench.network.wire import Wire
from tokenloom.comm.communicator import Communicator
from tokenloom.errors import BackendUnavailable, InvalidArgument
from tokenloom.runtime import topology as topologies
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.topology import Place, Topology


@dataclass(frozen=True)
class Options:
    """What the user chose, the same on all ranks.

    Attributes:
        ranks_per_node: as in ``Communicator``.
        timeout_s: longest wait for another rank, in seconds; over NCCL the group's own holds as well.
        rounds: of the stress of order.
        seed: of everything random.
        large_bytes: of a large message; None: the device's.
        fits_constants: whether constants of the cost model were asked for, which one node does not have.
    """

    ranks_per_node: int | None = None
    timeout_s: float = 30.0
    rounds: int = 30
    seed: int = 1
    large_bytes: int | None = None
    fits_constants: bool = False


@dataclass(frozen=True)
class Report:
    """What was found, the same on all ranks.

    Attributes:
        about: lines on nodes, transport and backend.
        nodes: the nodes in a few words.
        transport: "gloo" or "nccl".
        findings: the verdicts.
        points: for the constants of the cost model; None where there is one node.
    """

    about: list[str]
    nodes: str
    transport: str
    findings: list[Finding]
    points: Points | None


def check_on_rank(context: RankContext, options: Options) -> Report:
    """Run :func:`check` on a rank of a pool; rank 0 reports the parts."""
    say = context.report if context.rank == 0 else lambda what: None
    return check(context.group, context.device, options, say)


def check(
    group: dist.ProcessGroup, device: torch.device, options: Options, say: Callable[[str], None] = lambda what: None
) -> Report:
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
        findings = [Finding("topology", "nodes", "nodes", topology.why_no_rails is None, topology.describe())]
        say("bits of every path, against the reference")
        findings += merge("bits", ranks.all_gather_object(check_bits(comms, topology, options.seed), "bits"))
        for comm in comms:
            say(f"order of calls, over {comm.backend}")
            findings += check_order(ranks, comm, options.rounds, options.seed)
        wire = Wire(ranks)
        say("links")
        findings += check_links(wire, topology, options.large_bytes)
        say("all rails at once")
        found, points = check_rails(wire, topology)
        return Report(about, topology.describe(), ranks.transport, findings + found, points)


def _make_comms(
    group: dist.ProcessGroup, device: torch.device, options: Options, topology: Topology
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
