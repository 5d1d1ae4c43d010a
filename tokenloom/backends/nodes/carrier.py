"""What carries regions to other nodes: the kernels themselves, or a collective between two of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from tokenloom.backends.nodes.launcher import NodesLauncher
from tokenloom.backends.nodes.memory import NodeBuffers
from tokenloom.backends.registration import Availability, Request
from tokenloom.backends.seam import Capabilities
from tokenloom.plan import Plan
from tokenloom.runtime.rank_group import RankGroup

Memory = TypeVar("Memory", bound=NodeBuffers)


@dataclass(frozen=True)
class Carrier(Generic[Memory]):
    """What :class:`NodesBackend` is made with.

    Attributes:
        name: of the backend with this carrier.
        capabilities: what that backend can do. A communicator that is ``checked`` reads on the host besides.
        probe: whether it works on this rank.
        memory: makes all memory that calls need.
        launcher: makes what launches kernels, and what runs between them.
        always_two: every call is two kernels.
    """

    name: str
    capabilities: Capabilities
    probe: Callable[[Request], Availability]
    memory: Callable[[Plan, RankGroup, torch.dtype | None], Memory]
    launcher: Callable[[Plan, RankGroup, Memory, int], NodesLauncher]
    always_two: bool = False
