"""The host side of the combine kernel: its arguments and its variants."""

from __future__ import annotations

import ctypes

import torch

from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.shape import (
    DTYPES,
    LAYOUTS,
    MAX_SHARED_BYTES,
    MOST_STAGES,
    THREADS,
    WARPS,
    Call,
    int32_fields,
    ring,
    uint64_fields,
)
from tokenloom.plan import Plan, align_up

CHUNK_ROWS = 16
"""kChunkRows of combine.cuh."""
LARGEST_SUM_STAGE_BYTES = 3584
"""Half of what copies use: a lane holds its part of a segment in registers while terms are added."""


class CombineArgs(ctypes.Structure):
    """Mirror of CombineArgs in combine.cuh, which says what each value is; addresses and offsets are uint64."""

    _fields_ = [
        ("call", Call),
        *uint64_fields("y", "row_places", "row_weights", "slots", "all_counts", "out"),
        *uint64_fields("chunk_flags", "peers", "home"),
        *int32_fields("num_tokens", "max_tokens", "capacity", "push_blocks"),
    ]


def max_chunks(plan: Plan) -> int:
    """Chunks that one rank can send another in a combine."""
    return -(-plan.max_tokens_per_rank // CHUNK_ROWS)


def combine_spec(
    plan: Plan, layout: str, y_dtype: torch.dtype, wire_dtype: torch.dtype, out_dtype: torch.dtype
) -> tuple[KernelSpec, int]:
    """The variant for these dtypes: (spec, dynamic shared memory)."""
    group = 8 if plan.hidden % 8 == 0 else 4
    other_bytes = 16 * plan.num_ranks + 256
    copy_stage_bytes, copy_stages, copy_bytes = ring(plan.hidden * wire_dtype.itemsize, other_bytes)
    groups = _segment_groups(plan.hidden, group, max(y_dtype.itemsize, wire_dtype.itemsize))
    y_stage_bytes, wire_stage_bytes = groups * group * y_dtype.itemsize, groups * group * wire_dtype.itemsize
    # Each warp: a ring of terms, their descriptions, and (when pushing) two stages of sums on their way out.
    terms = 16 + 16 * max(plan.num_ranks, plan.top_k if layout == "expert" else 1)
    out_bytes = 2 * align_up(wire_stage_bytes, 128)
    room = (MAX_SHARED_BYTES - other_bytes - 2048) // WARPS - out_bytes
    per_stage = align_up(max(y_stage_bytes, wire_stage_bytes), 128) + 8 + terms
    sum_stages = max(2, min(MOST_STAGES, (room - terms - 256) // per_stage))
    sum_bytes = WARPS * (sum_stages * per_stage + terms + out_bytes + 256) + other_bytes
    shared_bytes = max(copy_bytes, sum_bytes)
    shape = {
        "num_ranks": plan.num_ranks,
        "num_experts": plan.num_experts,
        "top_k": plan.top_k,
        "hidden": plan.hidden,
        "y_dtype": DTYPES[y_dtype],
        "wire_dtype": DTYPES[wire_dtype],
        "out_dtype": DTYPES[out_dtype],
        "group": group,
        "layout": LAYOUTS[layout],
        "copies_rows": int(layout != "expert" and y_dtype == wire_dtype),
        "threads": THREADS,
        "copy_stage_bytes": copy_stage_bytes,
        "copy_stages": copy_stages,
        "sum_stages": sum_stages,
        "y_stage_bytes": y_stage_bytes,
        "wire_stage_bytes": wire_stage_bytes,
        "shared_bytes": shared_bytes,
        "max_chunks": max_chunks(plan),
    }
    spec = KernelSpec("combine", "kernels/combine/combine.cuh", tuple(shape.items()), CombineArgs, THREADS)
    return spec, shared_bytes


def _segment_groups(hidden: int, group: int, value_bytes: int) -> int:
    """Groups of values in a segment: a row is cut evenly into segments of at most LARGEST_SUM_STAGE_BYTES."""
    groups = hidden // group
    segments = -(-groups * group * value_bytes // LARGEST_SUM_STAGE_BYTES)
    return -(-groups // segments)
