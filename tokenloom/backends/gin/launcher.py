"""Launching kernels that open a call on several nodes."""

from __future__ import annotations

from dataclasses import dataclass

from tokenloom.backends.gin.memory import NodeMemory
from tokenloom.backends.handshake import Fields
from tokenloom.backends.nvlink.launcher import Launcher, OpeningKernel
from tokenloom.jit.compiler import KernelSpec, Prelude
from tokenloom.kernels.common import Variant
from tokenloom.plan import Plan
from tokenloom.runtime.rank_group import RankGroup


@dataclass(frozen=True)
class BehindNccl:
    """A variant whose source comes behind NCCL's headers."""

    variant: Variant
    prelude: Prelude

    def __str__(self) -> str:
        return str(self.variant)

    def spec(self) -> KernelSpec:
        """What to compile and how to launch it."""
        return self.variant.spec().behind(self.prelude)


class NodesLauncher(Launcher):
    """Launches kernels between nodes.

    A call is opened by the kind of kernel that the others launch. Otherwise they would wait for words that nobody
    sends. So a rank with a fault opens it by one of no tokens.

    Args:
        plan, ranks, num_sms: see :class:`Launcher`.
        memory: of the communicator.

    Attributes:
        empty: kernels of calls without tokens, by the name of the call; other calls open as a dispatch does.
    """

    def __init__(self, plan: Plan, ranks: RankGroup, memory: NodeMemory, num_sms: int) -> None:
        super().__init__(plan, ranks, memory.control, num_sms)
        self.memory = memory
        self.empty: dict[str, OpeningKernel] = {}
        self.keep_with_graphs.append(memory)

    def empty_call(self, fields: Fields) -> tuple[OpeningKernel, int | None]:
        return self.empty.get(str(fields["call"]), self.empty["dispatch"]), None
