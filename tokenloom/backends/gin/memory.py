"""The memory of backend "gin", all of it made at once, so that calls have nothing to agree on but themselves."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch

from tokenloom.backends.handshake import Fields
from tokenloom.backends.nvlink.buffers import control_layout, staged_layout, weight_gradient_values
from tokenloom.errors import InvalidArgument, TokenloomError
from tokenloom.jit.compiler import KernelSpec, Prelude
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.combine.launch_network import HEADER_BYTES, CombineNetworkVariant
from tokenloom.kernels.common import TURNS, Variant
from tokenloom.kernels.common.rail import MOST_CHUNKS, STATE_BYTES, TRAFFICS, Rail, Regions, chunk_rows, region_bytes
from tokenloom.kernels.dispatch.launch_network import DispatchNetworkVariant
from tokenloom.kernels.signals.launch import SignalsVariant
from tokenloom.plan import Plan, align_up
from tokenloom.runtime.devices import free_bytes
from tokenloom.runtime.gin import GinMemory
from tokenloom.runtime.leftovers import wait_for
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.symmetric_memory import BufferLayout, SymmetricBuffer

CHUNK_ROWS = 64
"""Rows that are put at once: forwarding begins when the first of them are there."""


class NodeBuffers:
    """What the ranks of a node share for calls between nodes, whatever carries regions. Making it is collective.

    Args:
        plan, ranks: sizes and group, whose topology has rails.
        dtype: of the tokens; None: of 2 bytes. FP8 rows have room wherever others have.

    Attributes:
        carrier: what carries regions to other nodes, as variants name it. most_chunks: of a region.
        fused: as backend "nvlink" has it.
        turns: regions that calls take turns in.
        ranks_per_node: G. num_nodes: N.
        control: flags and headers of the ranks of this node.
        partials: where partial sums of this node meet, [TURNS][N] parts of ``partials_bytes``.
        regions: what crosses the network.
    """

    carrier: str
    most_chunks: int
    fused = False

    def __init__(self, plan: Plan, ranks: RankGroup, dtype: torch.dtype | None) -> None:
        topology = ranks.topology
        self.num_nodes = topology.num_nodes
        self.ranks_per_node = plan.num_ranks // self.num_nodes
        self.turns = TURNS
        self._widest = dtype if dtype is not None and dtype.itemsize > 2 else torch.bfloat16
        value_bytes = self._widest.itemsize
        dispatches = DispatchNetworkVariant(plan, self.ranks_per_node, x_dtype=self._widest)
        combines = CombineNetworkVariant(
            plan, self.ranks_per_node, y_dtype=self._widest, wire_dtype=self._widest, out_dtype=self._widest
        )
        sum_bytes = max(combines.record_bytes, 4 * weight_gradient_values(plan))
        region = max(
            region_bytes(plan, dispatches.header_bytes, dispatches.record_bytes),
            region_bytes(plan, HEADER_BYTES, sum_bytes),
        )
        chunks = min(-(-plan.max_tokens_per_rank // CHUNK_ROWS), self.most_chunks)
        self.regions = Regions(self.num_nodes, region, chunks, chunk_rows(plan, chunks))
        self.partials_bytes = align_up(combines.partials_rows * sum_bytes, 128)
        partials = BufferLayout.of([("partials", TURNS * self.num_nodes * self.partials_bytes)])
        control, staging = control_layout(plan), staged_layout(plan, value_bytes, 0, TURNS)
        on_node = sum(layout.total_bytes for layout in (control, staging, partials))
        require_memory(ranks, on_node + self.region_bytes, plan.max_tokens_per_rank)
        self.reach_nodes(ranks)  # first what a machine may lack
        try:
            self.control, self._staging = SymmetricBuffer(control, ranks), SymmetricBuffer(staging, ranks)
            self.partials = SymmetricBuffer(partials, ranks)
        except Exception:
            self.close()
            raise

    @property
    def region_bytes(self) -> int:
        """Of all regions that may be in use at once."""
        raise NotImplementedError

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
        if dtype.itemsize > self._widest.itemsize:
            raise InvalidArgument(
                f"rows of {dtype} need more memory than the communicator has, which was made for {self._widest}; make "
                f"it with dtype={dtype}"
            )

    def shared(self) -> list[SymmetricBuffer]:
        """What ranks of this node share besides ``control``."""
        return [self._staging, self.partials]

    def describe(self) -> list[str]:
        """Lines for people."""
        on_node = sum(each.layout.total_bytes for each in (self.control, *self.shared()))
        return [f"buffers for ranks of this node: {on_node / 1e6:.1f} MB"]


class NodeMemory(NodeBuffers):
    """The same with the window that ranks of other nodes put to.

    Attributes:
        gin: the window, with a device communicator. ``regions`` says what lies where in it.
    """

    carrier, most_chunks = "gin", MOST_CHUNKS

    @property
    def region_bytes(self) -> int:
        return self.regions.window_bytes

    def reach_nodes(self, ranks: RankGroup) -> None:
        """Make the window. No rank has buffers before all have reset their signals."""
        self.gin = GinMemory(
            ranks, self.regions.window_bytes, contexts=TRAFFICS, signals=self.num_nodes, state_bytes=STATE_BYTES
        )
        try:
            self._reset_signals(ranks.device)
        except Exception:
            self.close()
            raise

    def _reset_signals(self, device: torch.device) -> None:
        """An earlier communicator on the same process group may have raised them."""
        kernel = Kernel(SignalsVariant().spec().behind(self.gin.prelude), device.index)
        kernel.args.comm, kernel.args.signals = self.gin.comm, self.num_nodes
        kernel.launch(1, torch.cuda.current_stream(device).cuda_stream)
        wait_for(device)

    def compiled(self, variant: Variant) -> Variant:
        """The variant behind NCCL's headers."""
        return BehindNccl(variant, self.gin.prelude)

    def tell(self, rail: Rail, traffic: int) -> None:
        """Tell a kernel of the network, for one kind of calls."""
        gin = self.gin
        self.regions.fill(rail, traffic, comm=gin.comm, window=gin.window, base=gin.address, state=gin.state)

    def keep(self) -> None:
        """Late ranks may still put to the window."""
        self.gin.keep()

    def close(self) -> None:
        """Give back the window. What NCCL does not take stays until the process ends."""
        with suppress(TokenloomError):
            self.gin.close()

    def describe(self) -> list[str]:
        """Lines for people."""
        window = f"{self.gin.num_bytes / 1e6:.1f} MB, of {self._widest} at most"
        return [f"GIN of type {self.gin.type_name}, window for {self.num_nodes} nodes: {window}", *super().describe()]


def require_memory(ranks: RankGroup, num_bytes: int, max_tokens: int) -> None:
    """Raise InvalidArgument on all ranks where some GPU has not so much memory free. Collective.

    Args:
        max_tokens: of a rank, which the memory is for; it grows in proportion.
    """
    free = free_bytes(ranks.device)
    lacking = ranks.all_gather_object(None if num_bytes <= free else free, "asking for memory")
    for rank, has in enumerate(lacking):
        if has is not None:
            raise InvalidArgument(
                f"calls between nodes by kernels need {num_bytes / 1e9:.1f} GB, rank {rank} has {has / 1e9:.1f} GB "
                f"free; pass max_tokens_per_rank={max_tokens * has // num_bytes}, or take backend='network'"
            )


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
