"""Launching kernels that open a call on several nodes."""

from __future__ import annotations

from typing import Protocol

from tokenloom.backends.nodes.memory import NodeBuffers
from tokenloom.backends.peers.opening import Launcher, OpeningKernel
from tokenloom.plan import Plan
from tokenloom.runtime.openings import Fields
from tokenloom.runtime.rank_group import RankGroup

COMBINES = ("combine", "gradient of dispatch", "gradient of weights")
"""Names of the calls that bring rows home. All others are dispatches."""


class Empty(Protocol):
    """Calls without tokens, whose arguments never change.

    Attributes:
        kernel: of the whole call, or of its sending half. receiving_kernel: of the other half, or None.
    """

    kernel: OpeningKernel
    receiving_kernel: OpeningKernel | None


class NodesLauncher(Launcher):
    """Launches kernels between nodes.

    A call is opened by the kind of kernel that the others launch. Otherwise they would wait for words that nobody
    sends. So a rank with a fault opens it by one of no tokens.

    Args:
        plan, ranks, num_sms: see :class:`Launcher`.
        memory: of the communicator.

    Attributes:
        empty: calls without tokens: a "dispatch" and a "combine".
    """

    def __init__(self, plan: Plan, ranks: RankGroup, memory: NodeBuffers, num_sms: int) -> None:
        super().__init__(plan, ranks, memory.control, num_sms)
        self.memory = memory
        self.empty: dict[str, Empty] = {}
        self.keep_with_graphs.append(memory)

    def empty_call(self, fields: Fields) -> tuple[OpeningKernel, int | None]:
        return self.empty_of(fields).kernel, None

    def empty_of(self, fields: Fields) -> Empty:
        """The call without tokens that opens one of these fields."""
        return self.empty["combine" if fields["call"] in COMBINES else "dispatch"]
