"""Where backend "gin" works, and how it is made. What it needs is imported where it is asked for."""

from __future__ import annotations

from tokenloom.backends.gin.capabilities import CAPABILITIES
from tokenloom.backends.peers.backend import require_sms, why_no_kernels
from tokenloom.backends.registration import Availability, Registration, Request
from tokenloom.backends.seam import Backend
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.topology import Topology


def probe(request: Request) -> Availability:
    """Whether the kernels run on this rank. They are for whoever asks for them: nobody else loads NCCL's headers.

    Raises:
        InvalidArgument: ``num_sms`` is more than this process may use.
    """
    if "gin" not in (request.name, request.between_nodes):
        return Availability("gin", False, "only transport='gin' takes it")
    why_not = why_no_kernels(request)
    if why_not is not None:
        return Availability("gin", False, why_not)
    require_sms(request)
    from tokenloom.backends.gin.availability import examine

    return examine(request.device)


def why_not_on(topology: Topology) -> str | None:
    """Nodes must be equal, in order, and more than one."""
    if topology.doubt:
        return topology.doubt
    if topology.num_nodes == 1:
        return "all ranks are on one node; on Hopper GPUs, pass ranks_per_node to take them for several"
    return topology.why_no_rails


def make(request: Request, ranks: RankGroup) -> Backend:
    """The backend, for the nodes that the group has agreed on."""
    from tokenloom.backends.gin.backend import GinBackend

    assert request.plan is not None
    return GinBackend(request.plan, ranks, request.num_sms, request.dtype, request.checked)


REGISTRATION = Registration("gin", CAPABILITIES, probe, make, why_not_on=why_not_on)
