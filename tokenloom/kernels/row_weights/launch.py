"""The host side of the kernel that brings weights from routes to rows, and their gradients back."""

from __future__ import annotations

import ctypes

from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.common import int32_fields, uint64_fields
from tokenloom.plan import Plan

THREADS = 512
BLOCKS = 64
"""Each thread has a few routes of a large call."""


class RowWeightsArgs(ctypes.Structure):
    """Mirror of RowWeightsArgs in row_weights.cuh, which says what each value is."""

    _fields_ = [
        *uint64_fields("row_places", "source_counts", "from", "to"),
        ("routes", ctypes.c_int64),
        *int32_fields("places", "padding"),
    ]


def row_weights_spec(plan: Plan, to_rows: bool) -> tuple[KernelSpec, int]:
    """(spec, dynamic shared memory); launched with any number of blocks."""
    shape = {"num_ranks": plan.num_ranks, "top_k": plan.top_k, "to_rows": int(to_rows), "threads": THREADS}
    path = "kernels/row_weights/row_weights.cuh"
    return KernelSpec("row_weights", path, tuple(shape.items()), RowWeightsArgs, THREADS), 0
