"""How much memory calls between nodes by kernels take, for the backends and for those who plan."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from tokenloom.backends.peers.buffers import control_layout, staged_layout, weight_gradient_values
from tokenloom.kernels.combine.launch_network import HEADER_BYTES, CombineNetworkVariant
from tokenloom.kernels.common import TURNS
from tokenloom.kernels.common.rail import MOST_CHUNKS, Regions, chunk_rows, region_bytes
from tokenloom.kernels.dispatch.launch_network import DispatchNetworkVariant
from tokenloom.plan import Plan, align_up
from tokenloom.runtime.symmetric_memory import BufferLayout

CHUNK_ROWS = 64
"""Rows that are put at once: forwarding begins when the first of them are there."""
OPEN_CALLS = 2
"""Calls in halves that may be open where a collective carries regions, each with regions of its own."""


@dataclass(frozen=True)
class NodeSizes:
    """Sizes of all that a rank of backend "gin" or "padded" holds.

    Attributes:
        plan: sizes of the group.
        num_nodes: N, of equal numbers of ranks.
        carrier: what carries regions to other nodes, of :data:`tokenloom.kernels.common.rail.CARRIERS`.
        widest: dtype of the widest tokens, 2 bytes or more. FP8 rows have room wherever others have.
    """

    plan: Plan
    num_nodes: int
    carrier: str
    widest: torch.dtype = torch.bfloat16

    @property
    def ranks_per_node(self) -> int:
        """G."""
        return self.plan.num_ranks // self.num_nodes

    @cached_property
    def regions(self) -> Regions:
        """Bytes of regions that cross the network. Regions are large enough for rows and for sums."""
        plan, most = self.plan, MOST_CHUNKS if self.carrier == "gin" else 1
        dispatches = DispatchNetworkVariant(plan, self.ranks_per_node, x_dtype=self.widest)
        region = max(
            region_bytes(plan, dispatches.header_bytes, dispatches.record_bytes),
            region_bytes(plan, HEADER_BYTES, self._sum_bytes),
        )
        chunks = min(-(-plan.max_tokens_per_rank // CHUNK_ROWS), most)
        return Regions(self.num_nodes, region, chunks, chunk_rows(plan, chunks))

    @property
    def call_bytes(self) -> int:
        """Of the regions of one call, to send and to receive."""
        return 2 * self.num_nodes * self.regions.region_bytes

    @property
    def carried_bytes(self) -> int:
        """Of all regions that may be in use at once."""
        return self.regions.window_bytes if self.carrier == "gin" else OPEN_CALLS * self.call_bytes

    @property
    def partials_bytes(self) -> int:
        """Partial sums of a node for the ranks of one rail, in one turn."""
        return align_up(self._combines.partials_rows * self._sum_bytes, 128)

    @property
    def partials(self) -> BufferLayout:
        """Where partial sums of this node meet, [TURNS][N] parts."""
        return BufferLayout.of([("partials", TURNS * self.num_nodes * self.partials_bytes)])

    @property
    def control(self) -> BufferLayout:
        """Flags and headers of the ranks of this node."""
        return control_layout(self.plan)

    @property
    def staging(self) -> BufferLayout:
        """Where rows of a dispatch arrive over NVLink."""
        return staged_layout(self.plan, self.widest.itemsize, 0)

    @property
    def node_bytes(self) -> int:
        """Of what the ranks of a node share."""
        return sum(layout.total_bytes for layout in (self.control, self.staging, self.partials))

    @property
    def total_bytes(self) -> int:
        """All that a rank holds."""
        return self.node_bytes + self.carried_bytes

    def most_tokens(self, num_bytes: int, limit: int | None = None) -> int:
        """The largest ``max_tokens_per_rank`` that fits into these bytes; 0 for none.

        Args:
            limit: largest answer; None: the plan's ``max_tokens_per_rank``.
        """
        candidates = range(1, (self.plan.max_tokens_per_rank if limit is None else limit) + 1)
        return bisect_right(candidates, num_bytes, key=lambda most: self._with(most).total_bytes)

    def _with(self, most_tokens: int) -> NodeSizes:
        return replace(self, plan=replace(self.plan, max_tokens_per_rank=most_tokens))

    @property
    def _combines(self) -> CombineNetworkVariant:
        widest = self.widest
        return CombineNetworkVariant(
            self.plan, self.ranks_per_node, y_dtype=widest, wire_dtype=widest, out_dtype=widest
        )

    @property
    def _sum_bytes(self) -> int:
        return max(self._combines.record_bytes, 4 * weight_gradient_values(self.plan))
