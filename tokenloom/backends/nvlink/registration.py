"""Where backend "nvlink" works, and how it is made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenloom.backends.nvlink.backend import CAPABILITIES, NvlinkBackend
from tokenloom.backends.registration import Availability, Registration, Request
from tokenloom.errors import BackendUnavailable, InvalidArgument, KernelCompileError
from tokenloom.jit.compiler import load_nvrtc
from tokenloom.jit.kernel import Kernel, load_driver
from tokenloom.kernels.barrier.launch import BarrierVariant
from tokenloom.kernels.common import HOPPER, MAX_BLOCKS, MAX_RANKS
from tokenloom.kernels.dispatch.launch import DispatchVariant
from tokenloom.plan import Plan
from tokenloom.runtime.devices import usable_sms
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.topology import Topology, host_identity

DEFAULT_SMS = 16
MAX_SMS = MAX_BLOCKS
"""One block takes one SM."""
BULK_VALUES = 8
"""Values of 2 bytes in the 16 that a bulk copy moves at least."""


def probe(request: Request) -> Availability:
    """Whether the kernels run on this rank; one of them is loaded to find out.

    Raises:
        InvalidArgument: ``num_sms`` is more than this process may use.
    """
    device = request.device
    why_not = why_no_kernels(request)
    facts = {"host": host_identity()}
    if why_not is not None:
        return Availability("nvlink", False, why_not, facts)
    facts["gpu"] = gpu_identity(device)
    require_sms(request)
    return Availability("nvlink", True, f"own kernels on {torch.cuda.get_device_name(device)}", facts)


def gpu_identity(device: torch.device) -> str:
    """What tells its GPU from all others."""
    return str(torch.cuda.get_device_properties(device).uuid)


def objections(by_rank: Sequence[Availability]) -> list[tuple[int, str]]:
    """All ranks must be on one host, each on a GPU of its own."""
    hosts = [found.facts["host"] for found in by_rank]
    away = [(rank, "it is on another host than rank 0") for rank, host in enumerate(hosts) if host != hosts[0]]
    gpus = [found.facts["gpu"] for found in by_rank]
    sharing = [rank for rank, gpu in enumerate(gpus) if gpu in gpus[:rank]]
    return away + [(rank, f"it shares its GPU with rank {gpus.index(gpus[rank])}") for rank in sharing]


def make(request: Request, ranks: RankGroup) -> NvlinkBackend:
    """The backend, whose first buffer shows that all ranks can map each other's memory."""
    assert request.plan is not None
    return NvlinkBackend(request.plan, ranks, request.num_sms, request.checked)


def why_not_on(topology: Topology) -> str | None:
    """All ranks must be on one node, also where nodes are pretended."""
    return None if topology.num_nodes == 1 else f"it runs on one node, the ranks are on {topology.num_nodes}"


REGISTRATION = Registration("nvlink", CAPABILITIES, probe, make, objections, why_not_on)


def why_no_kernels(request: Request) -> str | None:
    """What keeps the kernels from running on this rank, or None."""
    plan, device = request.plan, request.device
    if request.dtype == torch.float64:
        return "its kernels have no float64"
    if plan is not None and plan.hidden % BULK_VALUES:
        return f"rows of {plan.hidden} bfloat16 values are no multiple of {BULK_VALUES * 2} bytes"
    if plan is not None and plan.num_ranks > MAX_RANKS:
        return f"it serves at most {MAX_RANKS} ranks"
    if device.type != "cuda":
        return f"it needs a GPU, the tensors are on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability != HOPPER:
        return f"its kernels are for compute capability 9.0 (Hopper), {torch.cuda.get_device_name(device)} has " + (
            f"{capability[0]}.{capability[1]}"
        )
    try:
        load_nvrtc()
        load_driver()
        if plan is not None:
            _load_kernels(plan, device)
    except (BackendUnavailable, InvalidArgument, KernelCompileError, RuntimeError) as error:
        return str(error).splitlines()[0]
    own = torch.cuda.current_device() if device.index is None else device.index
    for peer in range(torch.cuda.device_count()):
        if peer != own and not torch.cuda.can_device_access_peer(own, peer):
            return f"{device} cannot access the memory of cuda:{peer}"
    return None


def _load_kernels(plan: Plan, device: torch.device) -> None:
    """Raise what an old driver, a compiler that is missing, or too many experts come to."""
    # If experts fit in these, they fit everywhere.
    DispatchVariant(plan=plan, layout="expert", x_dtype=torch.bfloat16).spec()
    DispatchVariant(plan=plan, layout="slots", x_dtype=torch.bfloat16, staged=True).spec()
    Kernel(BarrierVariant(plan=plan).spec(), torch.cuda.current_device() if device.index is None else device.index)


def require_sms(request: Request) -> None:
    """The blocks of a kernel wait for each other, so all of them must be on the GPU at the same time."""
    if not request.num_sms:
        return
    usable = usable_sms(torch.cuda.current_device() if request.device.index is None else request.device.index)
    if request.num_sms > usable:
        raise InvalidArgument(
            f"num_sms is {request.num_sms}, more than the {usable} SMs of {request.device} that this process may use "
            "(an MPS limit or a green context)"
        )
