"""Where backend "padded" works, and how it is made. What it needs is imported where it is asked for."""

from __future__ import annotations

from tokenloom.backends.gin.registration import why_not_on
from tokenloom.backends.padded.capabilities import CAPABILITIES
from tokenloom.backends.peers.backend import require_sms, why_no_kernels
from tokenloom.backends.registration import Availability, Registration, Request
from tokenloom.backends.seam import Backend
from tokenloom.runtime.rank_group import RankGroup


def probe(request: Request) -> Availability:
    """Whether the kernels run on this rank, and collectives in the order of streams. It is for whoever asks for it.

    Raises:
        InvalidArgument: ``num_sms`` is more than this process may use.
    """
    if request.name != "padded":
        return Availability("padded", False, "only backend='padded' takes it")
    why_not = why_no_kernels(request)
    if why_not is None and request.transport != "nccl":
        why_not = f"it needs a process group over nccl, this one is over {request.transport}"
    if why_not is not None:
        return Availability("padded", False, why_not)
    require_sms(request)
    return Availability("padded", True, "kernels within nodes, all-to-alls of fixed size over nccl between them")


def make(request: Request, ranks: RankGroup) -> Backend:
    """The backend, for the nodes that the group has agreed on."""
    from tokenloom.backends.padded.backend import PaddedBackend

    assert request.plan is not None
    return PaddedBackend(request.plan, ranks, request.num_sms, request.dtype, request.checked)


REGISTRATION = Registration("padded", CAPABILITIES, probe, make, why_not_on=why_not_on)
