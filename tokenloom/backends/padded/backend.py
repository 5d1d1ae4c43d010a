"""Backend "padded": dispatch and combine between nodes over any network of NCCL, without the host.

A call is two kernels, and between them an all-to-all of the ranks of a rail. The first kernel packs a region for each
node, as large as all of a rank's tokens could need. So the sizes of the all-to-all are known before the call: the host
reads nothing, and CUDA graphs can capture it. The kernels are those of backend "gin".
"""

from __future__ import annotations

import torch

from tokenloom.backends.gin.backend import NodesBackend
from tokenloom.backends.gin.launcher import NodesLauncher
from tokenloom.backends.padded.capabilities import CAPABILITIES
from tokenloom.backends.padded.launcher import PaddedLauncher
from tokenloom.backends.padded.memory import PaddedMemory
from tokenloom.plan import Plan
from tokenloom.runtime.rank_group import RankGroup


class PaddedBackend(NodesBackend):
    """Dispatch and combine between nodes by all-to-alls of fixed size."""

    name, can, always_two = "padded", CAPABILITIES, True
    _memory: PaddedMemory

    def make_memory(self, plan: Plan, ranks: RankGroup, dtype: torch.dtype | None) -> PaddedMemory:
        """Make buffers."""
        return PaddedMemory(plan, ranks, dtype)

    def make_launcher(self, plan: Plan, ranks: RankGroup, num_sms: int) -> NodesLauncher:
        """Make what launches kernels, and collectives between them."""
        return PaddedLauncher(plan, ranks, self._memory, num_sms)
