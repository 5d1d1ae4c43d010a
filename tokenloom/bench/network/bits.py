"""Every path against the reference: all layouts and modes, over each backend that is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tokenloom import reference
from tokenloom.backends import registry
from tokenloom.backends.seam import STRATEGY_OF_MODE
from tokenloom.bench.network.compare import compare_routed, compare_sums
from tokenloom.bench.network.findings import Seen
from tokenloom.bench.network.problems import PAYLOADS, ROUTINGS, Problem, make_problem
from tokenloom.comm.communicator import Communicator
from tokenloom.comm.routed import Routed
from tokenloom.plan import LAYOUTS, ROUTE_LAYOUTS
from tokenloom.runtime.topology import Topology

Key = tuple[str, str]


def modes_of(layout: str) -> tuple[str, ...]:
    """The orders of sums that a combine has."""
    return ("per_rank", "per_route", "per_node") if layout in ROUTE_LAYOUTS else ("per_rank", "per_node")


@torch.no_grad()
def check_bits(comms: Sequence[Communicator], topology: Topology, seed: int) -> dict[Key, Seen]:
    """Compare dispatch and combine on this rank with the reference. Collective.

    Every problem goes over all communicators before the next one, because the reference takes longer than they do.

    Args:
        comms: of sizes :func:`tokenloom.bench.network.problems.sizes`.
        seed: of the problems.
    """
    seen: dict[Key, Seen] = {}
    names = [comm.backend for comm in comms]
    for routing in ROUTINGS:
        problems = [make_problem(topology, routing, payload, seed) for payload in PAYLOADS]
        for layout in LAYOUTS:
            for key, found in _check_layout(comms, topology, problems, layout):
                seen[key] = seen.get(key, Seen(0)) + found
    return dict(sorted(seen.items(), key=lambda item: names.index(item[0][0].partition(":")[0])))


def _check_layout(
    comms: Sequence[Communicator], topology: Topology, problems: Sequence[Problem], layout: str
) -> Iterator[tuple[Key, Seen]]:
    """Problems of one routing, which differ in what travels. So the same rows come home in all of them."""
    first = problems[0]
    wanted = [problem.dispatched(layout) for problem in problems]
    ys = first.expert_rows(wanted[0])
    weights = first.weights if layout in ROUTE_LAYOUTS else None
    homes = {
        mode: reference.combine(first.plan, ys, wanted[0], first.ids, weights, mode=mode, nodes=topology.nodes)
        for mode in modes_of(layout)
    }
    for problem, received in zip(problems, wanted, strict=True):
        where, what = f"{problem.routing} {problem.payload.upper()}", f"{layout} {problem.payload.upper()}"
        for comm in comms:
            if layout not in registry.capabilities(comm.backend).layouts:
                continue
            routed = _dispatch(comm, problem, layout)
            seen = compare_routed(routed, received[comm.rank])
            yield (f"{comm.backend}: dispatch", what), _named(seen, where)
            for mode, home in homes.items():
                if STRATEGY_OF_MODE[mode] not in registry.capabilities(comm.backend).combine_strategies:
                    continue
                options: dict[str, Any] = {"mode": mode}
                out = comm.combine(ys[comm.rank].to(comm.device), routed, **options)
                yield (f"{comm.backend}: combine {mode}", what), _named(compare_sums(out, home[comm.rank]), where)


def _dispatch(comm: Communicator, problem: Problem, layout: str) -> Routed:
    rank, device = comm.rank, comm.device
    x: Any = problem.xs[rank].to(device)
    if problem.scales is not None:
        x = (x, problem.scales[rank].to(device))
    options: dict[str, Any] = {"layout": layout}
    if layout == "slots":
        options["capacity"] = problem.slots
    return comm.dispatch(x, problem.ids[rank].to(device), problem.weights[rank].to(device), **options)


def _named(seen: Seen, where: str) -> Seen:
    return Seen(seen.compared, seen.fault and f"{where}: {seen.fault}")
