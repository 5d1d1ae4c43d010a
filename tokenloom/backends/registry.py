"""Which backends exist, which work here, and which one ``auto`` picks."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

import torch

from tokenloom.backends.base import Backend
from tokenloom.backends.collective import CollectiveBackend
from tokenloom.backends.nvlink.backend import DEFAULT_SMS, NvlinkBackend
from tokenloom.errors import BackendUnavailable, InvalidArgument
from tokenloom.jit.compiler import load_nvrtc
from tokenloom.jit.kernel import load_driver
from tokenloom.kernels.common import HOPPER
from tokenloom.kernels.dispatch.launch import MAX_BLOCKS as MAX_SMS
from tokenloom.kernels.dispatch.launch import dispatch_spec
from tokenloom.plan import Plan
from tokenloom.runtime.rank_group import RankGroup

__all__ = ["BACKENDS", "DEFAULT_SMS", "MAX_SMS", "Availability", "Backend", "availability", "choose", "make"]

BACKENDS = ("nvlink", "collective")
"""All names, best first: ``auto`` picks the first that works."""
MAX_RANKS = 32
"""Ranks whose rows one warp of the kernels can send to."""


BULK_VALUES = 8
"""Values of 2 bytes in what a bulk copy moves at once."""


@dataclass(frozen=True)
class Availability:
    """Whether a backend works on this rank.

    Attributes:
        name: of the backend.
        works: on this rank.
        why: what it runs on, or why it does not work.
        host: of the rank; "nvlink" needs all ranks on one.
        gpu: of the rank, by a name that no other has, or ""; "nvlink" needs one for each rank.
    """

    name: str
    works: bool
    why: str
    host: str
    gpu: str = ""


def availability(
    transport: str, device: torch.device, plan: Plan | None = None, dtype: torch.dtype | None = None
) -> list[Availability]:
    """Every backend, best first, for a group over ``transport`` ("gloo", "nccl", ..., "local") on ``device``.

    Args:
        plan: sizes, where they are known.
        dtype: of the tokens, where it is known.
    """
    over = "this rank alone" if transport == "local" else f"torch.distributed over {transport}"
    why_not, host = _why_not_nvlink(device, plan, dtype), _host()
    own = why_not or f"own kernels on {torch.cuda.get_device_name(device)}"
    gpu = "" if why_not else str(torch.cuda.get_device_properties(device).uuid)
    return [
        Availability("nvlink", why_not is None, own, host, gpu),
        Availability("collective", True, f"{over}, tensors on {device.type}", host),
    ]


def _host() -> str:
    """The host's name, and what tells two hosts of the same name apart: both started at different times."""
    started = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{started.read_text().strip() if started.exists() else ''}"


def _why_not_nvlink(device: torch.device, plan: Plan | None, dtype: torch.dtype | None) -> str | None:
    """What keeps the kernels from running on this rank, or None."""
    if dtype == torch.float64:
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
        if plan is not None:  # experts that fit layout "expert", which counts most, fit all
            dispatch_spec(plan, "expert", plan.hidden * 2, 0)
    except (BackendUnavailable, InvalidArgument) as error:
        return str(error)
    own = torch.cuda.current_device() if device.index is None else device.index
    for peer in range(torch.cuda.device_count()):
        if peer != own and not torch.cuda.can_device_access_peer(own, peer):
            return f"{device} cannot access the memory of cuda:{peer}"
    return None


def require_known(name: str) -> None:
    """Raises InvalidArgument for a name that is no backend."""
    if name != "auto" and name not in BACKENDS:
        raise InvalidArgument(f"backend is {name!r}, expected auto, {', '.join(BACKENDS)}")


def choose(name: str, by_rank: list[list[Availability]]) -> tuple[str, list[str]]:
    """The backend to use, given what works on every rank; and why each better one was not picked.

    Raises:
        BackendUnavailable: the one asked for does not work on some rank; the message says where and why.
    """
    reasons: list[str] = []
    for index, candidate in enumerate(BACKENDS):
        failing = [(rank, found[index].why) for rank, found in enumerate(by_rank) if not found[index].works]
        if candidate == "nvlink" and not failing:
            away = [rank for rank, found in enumerate(by_rank) if found[index].host != by_rank[0][index].host]
            failing = [(rank, "it is on another host than rank 0") for rank in away]
            gpus = [found[index].gpu for found in by_rank]
            sharing = [rank for rank, gpu in enumerate(gpus) if gpu and gpu in gpus[:rank]]
            failing += [(rank, f"it shares its GPU with rank {gpus.index(gpus[rank])}") for rank in sharing]
        if name in ("auto", candidate) and not failing:
            return candidate, reasons
        if failing:
            ranks = "every rank" if len(failing) == len(by_rank) else f"rank {failing[0][0]}"
            reason = f"{candidate} does not work on {ranks}: {failing[0][1]}"
            if name == candidate:
                raise BackendUnavailable(f"{reason}; use backend='auto'")
            reasons.append(reason)
    raise BackendUnavailable("; ".join(reasons))


def make(name: str, plan: Plan, ranks: RankGroup, num_sms: int, checked: bool) -> Backend:
    """The backend of that name; collective: every rank makes the same one. The last two are for "nvlink"."""
    if name == "nvlink":
        return NvlinkBackend(plan, ranks, num_sms, checked)
    return CollectiveBackend(plan, ranks)
