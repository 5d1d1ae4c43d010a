"""Where the backends between nodes work, and how they are made."""

from __future__ import annotations

from functools import partial
from typing import Any

from tokenloom.backends.nodes.backend import NodesBackend
from tokenloom.backends.nodes.carrier import GIN_CAPABILITIES, PADDED_CAPABILITIES, Carrier
from tokenloom.backends.nodes.hierarchical.backend import NetworkBackend
from tokenloom.backends.nodes.hierarchical.nvlink_inside import make_inside
from tokenloom.backends.registration import Availability, Registration, Request
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.topology import Topology


def probe_network(request: Request) -> Availability:
    """Tell whether rows can be forwarded for this request."""
    kernels = "" if request.device.type == "cpu" else ", inside nodes by nvlink where it works on all of them"
    over = f"torch.distributed over {request.transport}, tensors on {request.device.type}"
    return Availability("network", True, over + kernels)


def why_no_network_on(topology: Topology) -> str | None:
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


def make_network(request: Request, ranks: RankGroup) -> NetworkBackend:
    """Make the backend, for the nodes that the group has agreed on."""
    assert request.plan is not None
    return NetworkBackend(request.plan, ranks, make_inside(request, ranks))


def why_no_carrier_on(topology: Topology) -> str | None:
    """Nodes must be equal, in order, and more than one."""
    if topology.doubt:
        return topology.doubt
    if topology.num_nodes == 1:
        return "all ranks are on one node; on Hopper GPUs, pass ranks_per_node to take them for several"
    return topology.why_no_rails


def carrier_of(name: str) -> Carrier[Any]:
    """Import the carrier of a backend."""
    from tokenloom.backends.nodes import gin, padded  # with NCCL's structures, which a group on one node never needs

    return gin.GIN if name == "gin" else padded.PADDED


def probe_with(name: str, request: Request) -> Availability:
    """Tell whether the backend of this name works on this rank."""
    return carrier_of(name).probe(request)


def make_with(name: str, request: Request, ranks: RankGroup) -> NodesBackend:
    """Make the backend of this name, for the nodes that the group has agreed on."""
    assert request.plan is not None
    carrier = carrier_of(name)
    return NodesBackend(carrier, request.plan, ranks, request.fixed_sms, request.dtype, request.checked)


REGISTRATIONS = (
    Registration("network", NetworkBackend.capabilities, probe_network, make_network, why_not_on=why_no_network_on),
    *(
        Registration(name, able, partial(probe_with, name), partial(make_with, name), why_not_on=why_no_carrier_on)
        for name, able in (("gin", GIN_CAPABILITIES), ("padded", PADDED_CAPABILITIES))
    ),
)
"""Best first."""
