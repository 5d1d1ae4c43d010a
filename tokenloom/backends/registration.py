"""Registration of a backend: what it says of itself, and what a communicator asks it for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tokenloom.backends.seam import Backend, Capabilities
from tokenloom.plan import Plan
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.topology import Topology

DEFAULT_SMS = 16
"""Of kernels where nodes are several."""
LAYER_SMS = 32
"""Of kernels of a layer, whose largest transfers have nothing beside them."""


@dataclass(frozen=True)
class Request:
    """Request of a communicator for a backend.

    Attributes:
        transport: what torch.distributed uses for ``device``: "gloo", "nccl", ..., or "local" for a process alone.
        device: device of the tensors.
        name: name of a backend, or "auto".
        plan: sizes, or None if they are not known.
        dtype: dtype of the tokens, or None if it is not known.
        num_sms: SMs that a kernel takes; None: as the backend finds best.
        checked: the host reads ids, and the outcome of every call, before it returns.
        between_nodes: transport of rows between nodes, "auto" or one of ``seam.TRANSPORTS``.
        ranks_per_node: ranks of each pretended node; None finds the nodes.
    """

    transport: str
    device: torch.device
    name: str = "auto"
    plan: Plan | None = None
    dtype: torch.dtype | None = None
    num_sms: int | None = None
    checked: bool = False
    between_nodes: str = "auto"
    ranks_per_node: int | None = None

    @property
    def fixed_sms(self) -> int:
        """SMs of kernels between nodes, and inside them: ``num_sms``, or the usual number."""
        return DEFAULT_SMS if self.num_sms is None else self.num_sms

    def must_agree(self) -> dict[str, Any]:
        """List what all ranks have to ask for alike."""
        names = ("dtype", "num_sms", "checked", "ranks_per_node")
        options = {"backend": self.name, "transport": self.between_nodes}
        options |= {name: getattr(self, name) for name in names}
        return (vars(self.plan) if self.plan else {}) | options | {"device type": self.device.type}


@dataclass(frozen=True)
class Availability:
    """Availability of a backend on one rank.

    Attributes:
        works: whether it works, as far as this rank can say alone.
        why: hardware and software that it runs on, or the reason why it does not work.
        facts: values that :attr:`Registration.objections` compares between ranks.
    """

    name: str
    works: bool
    why: str
    facts: Mapping[str, str] = field(default_factory=dict)


def no_objections(by_rank: Sequence[Availability]) -> list[tuple[int, str]]:
    """Return no objection: the backend works wherever each rank says that it does."""
    return []


def on_any_nodes(topology: Topology) -> str | None:
    """Return no reason against any nodes."""
    return None


@dataclass(frozen=True)
class Registration:
    """Backend that communicators may use.

    Attributes:
        name: unique name.
        capabilities: what it can do by default; a request such as ``checked`` may change that.
        probe: tells whether the backend works on this rank. It tries what it can without the other ranks. It raises
            InvalidArgument only for a request that is wrong everywhere.
        make: makes the backend. Collective; fails on all ranks alike.
        objections: lists (rank, reason) for each rank that cannot take part, from the availability on all ranks.
        why_not_on: gives the reason why it does not work on these nodes, or None.
    """

    name: str
    capabilities: Capabilities
    probe: Callable[[Request], Availability]
    make: Callable[[Request, RankGroup], Backend]
    objections: Callable[[Sequence[Availability]], list[tuple[int, str]]] = no_objections
    why_not_on: Callable[[Topology], str | None] = on_any_nodes
