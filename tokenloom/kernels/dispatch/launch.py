"""The host side of the dispatch kernel: its arguments and its variants."""

from __future__ import annotations

import ctypes

from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.shape import LAYOUTS, THREADS, WARPS, Call, int32_fields, ring, uint64_fields
from tokenloom.plan import Plan

MAX_BLOCKS = 32
"""Most blocks, and so SMs, of one dispatch; the flags are laid out for as many."""


class DispatchArgs(ctypes.Structure):
    """Mirror of DispatchArgs in args.cuh, which says what each value is; addresses and offsets are uint64."""

    _fields_ = [
        ("call", Call),
        *uint64_fields("x", "scales", "topk_ids", "topk_weights", "done_flags"),
        *uint64_fields("peers", "rows", "row_scales", "row_ids", "row_weights", "row_places"),
        *uint64_fields("slots", "all_counts", "num_rows", "source_counts", "expert_counts", "expert_offsets"),
        *int32_fields("num_tokens", "max_tokens", "capacity", "alignment", "ids_are_int64", "stop_on_overflow"),
    ]


def dispatch_spec(plan: Plan, layout: str, row_bytes: int, scales_per_row: int) -> tuple[KernelSpec, int]:
    """The variant for rows of ``row_bytes`` with ``scales_per_row`` float32 scales: (spec, dynamic shared memory)."""
    counts = plan.num_ranks + plan.num_experts
    by_expert = layout == "expert"
    route_bytes = 4 * (2 * counts + 2 * plan.num_ranks + (2 * plan.num_experts if by_expert else 2))
    route_bytes += 4 * WARPS * (counts if by_expert else plan.num_ranks)
    stage_bytes, stages, shared_bytes = ring(row_bytes, route_bytes)
    shape = {
        "num_ranks": plan.num_ranks,
        "num_experts": plan.num_experts,
        "experts_per_rank": plan.experts_per_rank,
        "top_k": plan.top_k,
        "row_bytes": row_bytes,
        "scales_per_row": scales_per_row,
        "layout": LAYOUTS[layout],
        "threads": THREADS,
        "stage_bytes": stage_bytes,
        "stages": stages,
        "shared_bytes": shared_bytes,
        "max_blocks": MAX_BLOCKS,
    }
    return KernelSpec("dispatch", "kernels/dispatch/dispatch.cuh", tuple(shape.items()), DispatchArgs, THREADS), (
        shared_bytes
    )
