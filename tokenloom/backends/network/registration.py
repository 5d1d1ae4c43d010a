"""Where backend "network" works, and how it is made."""

from __future__ import annotations

from tokenloom.backends.network.backend import NetworkBackend
from tokenloom.backends.network.inside import CollectivesInside
from tokenloom.backends.registration import Availability, Registration, Request
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.topology import Topology


def probe(request: Request) -> Availability:
    """Whether rows can be forwarded for this request."""
    return Availability(
        "network", True, f"torch.distributed over {request.transport}, tensors on {request.device.type}"
    )


def why_not_on(topology: Topology) -> str | None:
    """Nodes must be equal, in order, more than one, and have ranks to share rows."""
    if topology.doubt:
        return topology.doubt
    if topology.num_nodes == 1:
        return "all ranks are on one node; pass ranks_per_node to take them for several"
    if topology.why_no_rails is not None:
        return topology.why_no_rails
    if topology.ranks_per_node == 1:
        return "each node has one rank, so a row for its node is a row for that rank"
    return None


def make(request: Request, ranks: RankGroup) -> NetworkBackend:
    """The backend, for the nodes that the group has agreed on."""
    assert request.plan is not None
    return NetworkBackend(request.plan, ranks, CollectivesInside(ranks, request.plan.max_tokens_per_rank))


REGISTRATION = Registration("network", NetworkBackend.capabilities, probe, make, why_not_on=why_not_on)
