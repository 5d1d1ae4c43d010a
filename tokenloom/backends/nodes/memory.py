"""The memory of calls between nodes, all of it made at once, so that calls have nothing to agree on but themselves."""

from __future__ import annotations

import torch

from tokenloom.backends.nodes.sizes import NodeSizes
from tokenloom.errors import InvalidArgument
from tokenloom.kernels.common import Variant
from tokenloom.kernels.common.rail import Rail
from tokenloom.plan import Plan
from tokenloom.runtime.devices import free_bytes
from tokenloom.runtime.openings import Fields
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.symmetric_memory import SymmetricBuffer


class NodeBuffers:
    """Memory that the ranks of a node share for calls between nodes, with any carrier. Making it is collective.

    Args:
        plan, ranks: sizes and group, whose topology has rails.
        dtype: of the tokens; None: of 2 bytes. FP8 rows have room wherever others have.

    Attributes:
        carrier: what carries regions to other nodes, as variants name it.
        sizes: how large each part is. regions: what crosses the network, its.
        fused: as backend "nvlink" has it.
        turns: regions that calls take turns in.
        ranks_per_node: G. num_nodes: N.
        control: flags and headers of the ranks of this node.
        partials: where partial sums of this node meet, [TURNS][N] parts of ``sizes.partials_bytes``.
    """

    carrier: str
    fused = False

    def __init__(self, plan: Plan, ranks: RankGroup, dtype: torch.dtype | None) -> None:
        widest = dtype if dtype is not None and dtype.itemsize > 2 else torch.bfloat16
        self.sizes = sizes = NodeSizes(plan, ranks.topology.num_nodes, self.carrier, widest)
        self.num_nodes, self.ranks_per_node = sizes.num_nodes, sizes.ranks_per_node
        self.regions = sizes.regions
        require_memory(ranks, sizes)
        self.reach_nodes(ranks)  # first what a machine may lack
        try:
            self.control, self._staging = SymmetricBuffer(sizes.control, ranks), SymmetricBuffer(sizes.staging, ranks)
            self.partials = SymmetricBuffer(sizes.partials, ranks)
        except Exception:
            self.close()
            raise

    def reach_nodes(self, ranks: RankGroup) -> None:
        """Make what regions are carried with."""
        raise NotImplementedError

    def compiled(self, variant: Variant) -> Variant:
        """The variant, behind what its source needs."""
        return variant

    def tell(self, rail: Rail, traffic: int) -> None:
        """Tell a kernel of the network, for one kind of calls."""
        raise NotImplementedError

    def keep(self) -> None:
        """Ranks of other nodes may still write to what they reach here."""

    def close(self) -> None:
        """Give back what regions are carried with."""

    def staged(self, dtype: torch.dtype, fields: Fields) -> SymmetricBuffer:
        """Where rows of a dispatch arrive over NVLink."""
        self.require_room(dtype)
        return self._staging

    def require_room(self, dtype: torch.dtype) -> None:
        """Raise InvalidArgument for rows that are wider than those the memory was made for."""
        if dtype.itemsize > self.sizes.widest.itemsize:
            raise InvalidArgument(
                f"rows of {dtype} need more memory than the communicator has, which was made for {self.sizes.widest}; "
                f"make it with dtype={dtype}"
            )

    def shared(self) -> list[SymmetricBuffer]:
        """Buffers that ranks of this node share besides ``control``."""
        return [self._staging, self.partials]

    def describe(self) -> list[str]:
        """Lines for people."""
        on_node = sum(each.layout.total_bytes for each in (self.control, *self.shared()))
        return [f"buffers for ranks of this node: {on_node / 1e6:.1f} MB"]


def require_memory(ranks: RankGroup, sizes: NodeSizes) -> None:
    """Raise InvalidArgument on all ranks where some GPU has not so much memory free. Collective."""
    free, needed = free_bytes(ranks.device), sizes.total_bytes
    lacking = ranks.all_gather_object(None if needed <= free else free, "asking for memory")
    for rank, has in enumerate(lacking):
        if has is not None:
            most = sizes.most_tokens(min(each for each in lacking if each is not None))
            ways = [*([f"pass max_tokens_per_rank={most}"] if most else []), "take backend='network'"]
            raise InvalidArgument(
                f"calls between nodes by kernels need {needed / 1e9:.1f} GB, rank {rank} has {has / 1e9:.1f} GB free; "
                + ", or ".join(ways)
            )
