"""The host side of the dispatch between nodes: its arguments and its variants."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

import torch

from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.common import HEADER_WORDS, describe, short_name, uint64_fields
from tokenloom.kernels.common.rail import CARRIERS, DESCRIPTOR_BYTES, Rail
from tokenloom.kernels.dispatch.launch import STAGED_WARPS, DispatchArgs, DispatchVariant
from tokenloom.plan import Plan, align_up


class DispatchNetworkArgs(DispatchArgs):
    """Mirror of DispatchNetworkArgs in nodes.cuh, which says what each value is."""

    _fields_ = [("rail", Rail), *uint64_fields("node_rows", "forwarded_slots", "forwarded_rows")]  # noqa: RUF012


@dataclass(frozen=True)
class DispatchNetworkVariant:
    """One compiled form of the dispatch between nodes. Behind NCCL's headers, with GIN.

    Attributes:
        plan: sizes of the group.
        ranks_per_node: rank n * ranks_per_node + g is on node n.
        layout: any.
        x_dtype, quantize, scale_layout, recipe, part: as in :class:`DispatchVariant`.
        carrier: what carries rows between nodes, of :data:`CARRIERS`. "collective" has halves only.
    """

    plan: Plan
    ranks_per_node: int
    _: KW_ONLY
    layout: str = "slots"
    x_dtype: torch.dtype
    quantize: str = ""
    scale_layout: str = "rows"
    recipe: str = "block"
    part: str = "whole"
    carrier: str = "gin"

    @property
    def near(self) -> DispatchVariant:
        """The same for ranks of one node."""
        return DispatchVariant(
            self.plan,
            layout=self.layout,
            x_dtype=self.x_dtype,
            quantize=self.quantize,
            staged=True,
            scale_layout=self.scale_layout,
            recipe=self.recipe,
            part=self.part,
        )

    @property
    def header_bytes(self) -> int:
        """What lies before the rows for a node: what a call is announced with, and their number."""
        return 4 * align_up(HEADER_WORDS + self.plan.num_ranks + self.plan.num_experts, 4) + 16

    @property
    def record_bytes(self) -> int:
        """A row on its way between nodes, with all that comes with it; Packed::kBytes of nodes.cuh."""
        plan, near = self.plan, self.near
        words = near.scales_per_row + 3 * plan.top_k + self.ranks_per_node + 1
        return align_up(plan.hidden * near.row_dtype.itemsize + 4 * words, 16)

    def __str__(self) -> str:
        words = f"{short_name(self.x_dtype)}{self.quantize and ' to fp8, '}{self.quantize}, {self.scale_layout}"
        words += "" if self.recipe == "block" else f", {self.recipe} scales"
        sizes = f"{describe(self.plan)}, nodes of {self.ranks_per_node}"
        return f"dispatch_network, {sizes}, {self.layout}, {words}, {self.part}, {self.carrier}"

    def spec(self) -> KernelSpec:
        """What to compile, with GIN behind NCCL's headers, and how to launch it.

        Raises:
            InvalidArgument: counts of so many experts leave no shared memory for rows.
        """
        nodes = self.plan.num_ranks // self.ranks_per_node
        spec = self.near.spec(nodes * (4 * (STAGED_WARPS + 1) + DESCRIPTOR_BYTES) + 128)
        sizes = {"node_ranks": self.ranks_per_node, "header_bytes": self.header_bytes}
        sizes |= {"record_bytes": self.record_bytes, "carrier": CARRIERS.index(self.carrier)}
        shape = dict(spec.shape) | sizes
        return replace(
            spec,
            name="dispatch_network",
            path="kernels/dispatch/dispatch_network.cuh",
            shape=tuple(shape.items()),
            args=DispatchNetworkArgs,
        )
