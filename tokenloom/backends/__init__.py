"""Which backends exist, which work here, and which one ``auto`` picks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenloom.backends.base import Backend
from tokenloom.backends.collective import CollectiveBackend
from tokenloom.errors import BackendUnavailable, InvalidArgument
from tokenloom.group import RankGroup
from tokenloom.plan import Plan

BACKENDS = ("nvlink", "collective")
"""All names, best first: ``auto`` picks the first that works."""


@dataclass(frozen=True)
class Availability:
    """Whether a backend works on this rank.

    Attributes:
        name: of the backend.
        works: on this rank.
        why: what it runs on, or why it does not work.
    """

    name: str
    works: bool
    why: str


def availability(transport: str, device: torch.device) -> list[Availability]:
    """Every backend, best first, for a group over ``transport`` ("gloo", "nccl", ..., "local") on ``device``."""
    over = "this rank alone" if transport == "local" else f"torch.distributed over {transport}"
    return [
        Availability("nvlink", False, "not part of this version"),
        Availability("collective", True, f"{over}, tensors on {device.type}"),
    ]


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
        if name in ("auto", candidate) and not failing:
            return candidate, reasons
        if failing:
            ranks = "every rank" if len(failing) == len(by_rank) else f"rank {failing[0][0]}"
            reason = f"{candidate} does not work on {ranks}: {failing[0][1]}"
            if name == candidate:
                raise BackendUnavailable(f"{reason}; use backend='auto'")
            reasons.append(reason)
    raise BackendUnavailable("; ".join(reasons))


def make(name: str, plan: Plan, ranks: RankGroup) -> Backend:
    """The backend of that name; collective: every rank makes the same one."""
    return {"collective": CollectiveBackend}[name](plan, ranks)
