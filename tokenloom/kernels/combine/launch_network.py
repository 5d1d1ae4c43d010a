"""The host side of the combine between nodes: its arguments and its variants."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

import torch

from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.combine.launch import CombineArgs, CombineVariant
from tokenloom.kernels.common import describe, ranks_of_token, short_name, uint64_fields
from tokenloom.kernels.common.rail import CARRIERS, DESCRIPTOR_BYTES, Rail
from tokenloom.plan import Plan

HEADER_BYTES = 16
"""What lies before the rows of a node; NodeHeader of combine_network.cuh."""
MOST_TERMS_AT_ONCE = {2: 8, 4: 4}
"""Terms of a sum whose loads are in flight together, by bytes of a value."""
SUM_REGISTERS = 64
"""Registers for the terms of a sum and for the sum itself. With more, variants spill."""


class CombineNetworkArgs(CombineArgs):
    """Mirror of CombineNetworkArgs in combine_network.cuh, which says what each value is."""

    _fields_ = [  # noqa: RUF012
        ("rail", Rail),
        *uint64_fields("partials_bytes", "node_rows", "forwarded_slots", "forwarded_rows"),
    ]


@dataclass(frozen=True)
class CombineNetworkVariant:
    """One compiled form of the combine between nodes, in mode "per_node". Behind NCCL's headers, with GIN.

    Attributes:
        plan: sizes of the group.
        ranks_per_node: rank n * ranks_per_node + g is on node n.
        layout: "expert", also for rows in slots, "token" or "rank".
        y_dtype, wire_dtype, out_dtype: dtypes of the rows given, of all sums on their way, and of the result.
        hidden: values of a row; None means the plan's.
        weights: what rows are multiplied by: "none", or "received" (layout "expert" only).
        part: "whole", or the half of a call that "send" or "receive" is.
        carrier: what carries rows between nodes, of :data:`CARRIERS`. "collective" has halves only.
    """

    plan: Plan
    ranks_per_node: int
    _: KW_ONLY
    layout: str = "expert"
    y_dtype: torch.dtype
    wire_dtype: torch.dtype
    out_dtype: torch.dtype
    hidden: int | None = None
    weights: str = "none"
    part: str = "whole"
    carrier: str = "gin"

    @property
    def record_bytes(self) -> int:
        """A sum on its way between nodes."""
        return (self.hidden or self.plan.hidden) * self.wire_dtype.itemsize

    @property
    def partials_rows(self) -> int:
        """Partial sums that the ranks of a node can have for one home."""
        return self.plan.max_tokens_per_rank * min(self.ranks_per_node, self.plan.top_k)

    def __str__(self) -> str:
        dtypes = " > ".join(short_name(dtype) for dtype in (self.y_dtype, self.wire_dtype, self.out_dtype))
        words = [
            describe(self.plan),
            f"nodes of {self.ranks_per_node}",
            self.layout,
            dtypes,
            f"{self.weights} weights",
            self.part,
            self.carrier,
            *([f"rows of {self.hidden}"] if self.hidden is not None else []),
        ]
        return f"combine_network, {', '.join(words)}"

    def spec(self) -> KernelSpec:
        """What to compile, with GIN behind NCCL's headers, and how to launch it."""
        near = CombineVariant(
            self.plan,
            layout=self.layout,
            y_dtype=self.y_dtype,
            wire_dtype=self.wire_dtype,
            out_dtype=self.out_dtype,
            hidden=self.hidden,
            weights=self.weights,
            eager=True,
            part=self.part,
        )
        nodes = self.plan.num_ranks // self.ranks_per_node
        spec = near.spec(4 * self.plan.num_ranks + nodes * DESCRIPTOR_BYTES + 128)
        own = {
            "node_ranks": self.ranks_per_node,
            "sum_terms": _terms_at_once(
                ranks_of_token(self.plan.num_ranks, self.plan.top_k), MOST_TERMS_AT_ONCE[self.wire_dtype.itemsize]
            ),
            "sum_registers": SUM_REGISTERS,
            "carrier": CARRIERS.index(self.carrier),
        }
        return replace(
            spec,
            name="combine_network",
            path="kernels/combine/combine_network.cuh",
            shape=tuple((dict(spec.shape) | own).items()),
            args=CombineNetworkArgs,
        )


def _terms_at_once(expected: float, most: int) -> int:
    """Terms of a sum that are loaded together: the power of two that about holds the expected number."""
    terms = 1
    while terms < min(0.9 * expected, most):
        terms *= 2
    return terms
