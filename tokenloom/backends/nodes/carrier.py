"""Carriers of regions to other nodes: the kernels themselves, or a collective between two of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch

from tokenloom.backends.nodes.launcher import NodesLauncher
from tokenloom.backends.nodes.memory import NodeBuffers
from tokenloom.backends.registration import Availability, Request
from tokenloom.backends.seam import Capabilities
from tokenloom.plan import Plan
from tokenloom.runtime.rank_group import RankGroup

Memory = TypeVar("Memory", bound=NodeBuffers)

GIN_CAPABILITIES = Capabilities(
    layouts=("token", "expert", "rank", "slots"),
    dispatch_strategies=("dedup",),
    combine_strategies=("per_node",),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    captures=True,
    takes_sms=True,
    own_node="nvlink",
    other_nodes="gin",
    reads_on_host=False,
    weights_apart=False,
    own_transport=True,
)
PADDED_CAPABILITIES = replace(GIN_CAPABILITIES, other_nodes="collective", own_transport=False, weights_apart=True)
"""Here, since every process knows them. NCCL's structures are imported where a carrier is asked for."""


@dataclass(frozen=True)
class Carrier(Generic[Memory]):
    """One way to carry regions, and all that :class:`NodesBackend` is made with.

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
