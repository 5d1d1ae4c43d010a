"""The memory of backend "padded", and the all-to-all that carries regions."""

from __future__ import annotations

import torch

from tokenloom.backends.gin.memory import NodeBuffers
from tokenloom.kernels.common import MAX_BLOCKS
from tokenloom.kernels.common.rail import Rail
from tokenloom.runtime.collectives import Transfer
from tokenloom.runtime.deferred_release import keep_until_idle
from tokenloom.runtime.rank_group import RankGroup


class PaddedMemory(NodeBuffers):
    """What the ranks of a node share. Regions that cross the network are tensors of a call, so none is overwritten."""

    carrier = "collective"

    def reach_nodes(self, ranks: RankGroup) -> None:
        """Find the ranks of this rail."""
        size = self.ranks_per_node
        self._ranks = ranks
        self._counts = [int(rank % size == ranks.rank % size) for rank in range(ranks.num_ranks)]
        self._blocks = torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=ranks.device)
        keep_until_idle(self, ranks.device, self._blocks)

    def tell(self, rail: Rail, traffic: int) -> None:
        """Tell a kernel what is the same in all calls."""
        rail.region_bytes, rail.turn_bytes = self.regions.region_bytes, 0
        rail.chunks, rail.chunk_rows = self.regions.chunks, self.regions.chunk_rows
        rail.blocks = self._blocks.data_ptr()

    def new_regions(self, rail: Rail) -> torch.Tensor:
        """Regions of a call, to send and to receive, uint8 [2, N, bytes]; and tell its kernels of them."""
        shape = (2, self.num_nodes, self.regions.region_bytes)
        regions = torch.empty(shape, dtype=torch.uint8, device=self._ranks.device)
        rail.put_from, rail.put_to = regions[0].data_ptr(), regions[1].data_ptr()
        return regions

    def exchange(self, regions: torch.Tensor) -> Transfer:
        """Start the all-to-all, behind the kernel that packs. Its sizes are the same in all calls, of either kind."""
        return self._ranks.start_all_to_all(
            regions[0], self._counts, self._counts, "rows between nodes", out=regions[1]
        )

    def describe(self) -> list[str]:
        """Lines for people."""
        sizes = self.sizes
        return [f"regions of a call: {sizes.call_bytes / 1e6:.1f} MB, of {sizes.widest} at most", *super().describe()]
