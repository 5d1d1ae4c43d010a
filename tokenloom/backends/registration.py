"""What a backend says of itself, so that one can be added without a change elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tokenloom.backends.seam import Backend, Capabilities
from tokenloom.plan import Plan
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.topology import Topology


@dataclass(frozen=True)
class Request:
    """What a communicator asks for.

    Attributes:
        transport: what torch.distributed uses for ``device``: "gloo", "nccl", ..., or "local" for a process alone.
        device: where the tensors are.
        name: of a backend, or "auto".
        plan: sizes, where they are known.
        dtype: of the tokens, where it is known.
        num_sms: SMs that a kernel may take.
        checked: the host reads ids, and the outcome of every call, before it returns.
        between_nodes: what is to carry rows between nodes, "auto" or one of ``base.TRANSPORTS``.
        ranks_per_node: ranks of each node, where nodes are pretended.
    """

    transport: str
    device: torch.device
    name: str = "auto"
    plan: Plan | None = None
    dtype: torch.dtype | None = None
    num_sms: int = 0
    checked: bool = False
    between_nodes: str = "auto"
    ranks_per_node: int | None = None

    def must_agree(self) -> dict[str, Any]:
        """What all ranks have to ask for alike."""
        names = ("dtype", "num_sms", "checked", "ranks_per_node")
        options = {"backend": self.name, "transport": self.between_nodes}
        options |= {name: getattr(self, name) for name in names}
        return (vars(self.plan) if self.plan else {}) | options | {"device type": self.device.type}


@dataclass(frozen=True)
class Availability:
    """Whether a backend works on one rank.

    Attributes:
        name: of the backend.
        works: whether it does, as far as this rank can say alone.
        why: what it runs on, or why it does not work.
        facts: what :attr:`Registration.objections` compares between ranks.
    """

    name: str
    works: bool
    why: str
    facts: Mapping[str, str] = field(default_factory=dict)


def no_objections(by_rank: Sequence[Availability]) -> list[tuple[int, str]]:
    """For a backend that works wherever it works on each rank."""
    return []


def on_any_nodes(topology: Topology) -> str | None:
    """For a backend that works however ranks lie on nodes."""
    return None


@dataclass(frozen=True)
class Registration:
    """A backend that communicators may use.

    Attributes:
        name: unique.
        capabilities: what it can do, but for what a communicator asks for.
        probe: whether it works on this rank. Tries what can be tried without the other ranks, and never raises for
            what does not work here. May raise InvalidArgument for a request that is wrong everywhere.
        make: makes the backend. Collective; fails on all ranks alike.
        objections: (rank, why) for each rank that cannot take part, from what all ranks found.
        why_not_on: why it does not work on these nodes, or None.
    """

    name: str
    capabilities: Capabilities
    probe: Callable[[Request], Availability]
    make: Callable[[Request, RankGroup], Backend]
    objections: Callable[[Sequence[Availability]], list[tuple[int, str]]] = no_objections
    why_not_on: Callable[[Topology], str | None] = on_any_nodes
