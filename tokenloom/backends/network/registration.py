"""Where backend "network" works, and how it is made."""

from __future__ import annotations

from tokenloom.backends.network import nvlink_inside
from tokenloom.backends.network.backend import NetworkBackend
from tokenloom.backends.network.inside import CollectivesInside, InsideNode
from tokenloom.backends.registration import Availability, Registration, Request
from tokenloom.errors import CommunicatorBroken, PeerTimeout
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.topology import Topology


def probe(request: Request) -> Availability:
    """Whether rows can be forwarded for this request."""
    kernels = "" if request.device.type == "cpu" else ", inside nodes by nvlink where it works on all of them"
    over = f"torch.distributed over {request.transport}, tensors on {request.device.type}"
    return Availability("network", True, over + kernels)


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
    return NetworkBackend(request.plan, ranks, make_inside(request, ranks))


def make_inside(request: Request, ranks: RankGroup) -> InsideNode:
    """What carries rows inside nodes: kernels where they work on all of them, else collectives. Collective on GPUs."""
    plan = request.plan
    assert plan is not None
    if ranks.device.type == "cpu":  # where a rank may come back alone, and find the others with what they have
        return CollectivesInside(ranks, plan.max_tokens_per_rank)
    why = nvlink_inside.why_not(request, ranks)
    if why:
        return CollectivesInside(ranks, plan.max_tokens_per_rank, why)
    kernels: InsideNode | None = None
    try:
        kernels = nvlink_inside.NvlinkInside(plan, ranks, request.num_sms, request.checked, request.dtype)
    except (PeerTimeout, CommunicatorBroken):
        raise
    except Exception as error:
        why = str(error) or type(error).__name__
    failed = [
        (rank, each) for rank, each in enumerate(ranks.all_gather_object(why, "making memory inside nodes")) if each
    ]
    if kernels is not None and not failed:
        return kernels
    if kernels is not None:
        kernels.close()
    rank, why = failed[0]
    return CollectivesInside(ranks, plan.max_tokens_per_rank, f"nvlink failed on rank {rank}: {why}")


REGISTRATION = Registration("network", NetworkBackend.capabilities, probe, make, why_not_on=why_not_on)
