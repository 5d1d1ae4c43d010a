"""The host side of the kernel that brings weights from routes to rows, and their gradients back."""

from __future__ import annotations

import ctypes
from dataclasses import KW_ONLY, dataclass

from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.common import describe, int32_fields, uint64_fields
from tokenloom.plan import Plan

THREADS = 512
BLOCKS = 64
"""Blocks of a launch: each thread has a few routes of a large call."""


class RowWeightsArgs(ctypes.Structure):
    """Mirror of RowWeightsArgs in row_weights.cuh, which says what each value is."""

    _fields_ = [
        *uint64_fields("row_places", "source_counts", "source", "target"),
        ("routes", ctypes.c_int64),
        *int32_fields("places", "padding"),
    ]


@dataclass(frozen=True)
class RowWeightsVariant:
    """One compiled form of the kernel.

    Attributes:
        plan: sizes of the group.
        to_rows: values go from received routes to rows of layout "expert"; False: from rows to routes.
    """

    plan: Plan
    _: KW_ONLY
    to_rows: bool

    def __str__(self) -> str:
        return f"row_weights, {describe(self.plan)}, {'to rows' if self.to_rows else 'to routes'}"

    def spec(self) -> KernelSpec:
        """What to compile and how to launch it: with any number of blocks."""
        shape = {
            "num_ranks": self.plan.num_ranks,
            "top_k": self.plan.top_k,
            "to_rows": int(self.to_rows),
            "threads": THREADS,
        }
        path = "kernels/row_weights/row_weights.cuh"
        return KernelSpec("row_weights", path, tuple(shape.items()), RowWeightsArgs, threads=THREADS)
