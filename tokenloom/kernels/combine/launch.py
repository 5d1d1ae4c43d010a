"""The host side of the combine kernel: its arguments and its variants."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch

from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.common import DTYPES, LAYOUTS, Call, int32_fields, ring, uint64_fields
from tokenloom.plan import Plan

THREADS = 512
MOST_CHUNK_SHIFT = 2
"""Chunks have up to 4 rows: with more, home waits longer for the chunks that many warps send at once."""
COPY_WARPS = 3
"""Warps of a block that send rows as they are; bulk copies need few threads. The others sum."""
PUSH_WARPS = {"per_rank": 12, "per_route": 10}
"""Warps of a block that send rows which are sums or have to be converted; the others sum what arrives."""
PRESUM_BLOCKS = 64
"""Of the kernel before copies by copy engines, which only reads and writes this GPU's memory."""
MOST_TERMS_AT_ONCE = 8
MOST_WEIGHTED_TERMS_AT_ONCE = 4
"""Weights take registers too."""


class CombineArgs(ctypes.Structure):
    """Mirror of CombineArgs in combine.cuh, which says what each value is; addresses and offsets are uint64."""

    _fields_ = [
        ("call", Call),
        *uint64_fields("y", "row_places", "row_weights", "row_tokens", "slots", "all_counts", "topk_ids", "out"),
        *uint64_fields("chunk_flags", "peers", "home"),
        *int32_fields("num_tokens", "max_tokens", "capacity", "ids_are_int64", "max_chunks"),
    ]


def max_chunks(plan: Plan) -> int:
    """Chunks that one rank can send another in a combine: fewer than 128 rows are chunks by themselves."""
    return max(min(plan.max_tokens_per_rank, 128), -(-plan.max_tokens_per_rank >> MOST_CHUNK_SHIFT))


def combine_spec(
    plan: Plan,
    layout: str,
    y_dtype: torch.dtype,
    wire_dtype: torch.dtype,
    out_dtype: torch.dtype,
    mode: str = "per_rank",
    hidden: int | None = None,
    dense: bool = False,
    weighted: bool = False,
) -> tuple[KernelSpec, int]:
    """The variant for these dtypes: (spec, dynamic shared memory).

    Args:
        hidden: values of a row, if not the plan's.
        dense: rows have come home as :func:`presum_spec` makes them; the kernel only adds them.
        weighted: ``row_weights`` are given (layout "expert").
    """
    hidden = hidden or plan.hidden
    copies = layout != "expert" and y_dtype == wire_dtype and not dense
    ranks_of_token = plan.num_ranks * (1 - (1 - 1 / plan.num_ranks) ** plan.top_k)  # if routing is random
    routes_of_row = plan.top_k / ranks_of_token if layout == "expert" else 1
    other_bytes = 36 * plan.num_ranks + 4 * 19 * max(PUSH_WARPS.values()) + 256
    stage_bytes, stages, shared_bytes = 128, 2, 768 + other_bytes
    if copies:
        stage_bytes, stages, shared_bytes = ring(hidden * wire_dtype.itemsize, COPY_WARPS, other_bytes, 0)
    shape = {
        "num_ranks": plan.num_ranks,
        "num_experts": plan.num_experts,
        "top_k": plan.top_k,
        "hidden": hidden,
        "y_dtype": DTYPES[y_dtype],
        "wire_dtype": DTYPES[wire_dtype],
        "out_dtype": DTYPES[out_dtype],
        "group": 8 if hidden % 8 == 0 else 4,
        "layout": LAYOUTS[layout],
        "per_route": int(mode == "per_route"),
        "dense": int(dense),
        "weighted": int(weighted),
        "threads": THREADS,
        "push_warps": COPY_WARPS if copies else PUSH_WARPS[mode],
        "push_terms": _terms_at_once(routes_of_row, MOST_WEIGHTED_TERMS_AT_ONCE),
        "home_terms": _terms_at_once(plan.top_k if mode == "per_route" else ranks_of_token, MOST_TERMS_AT_ONCE),
        "stage_bytes": stage_bytes,
        "stages": stages,
        "shared_bytes": shared_bytes,
        "most_chunk_shift": MOST_CHUNK_SHIFT,
    }
    return KernelSpec("combine", "kernels/combine/combine.cuh", tuple(shape.items()), CombineArgs, THREADS), (
        shared_bytes
    )


def presum_spec(
    plan: Plan, y_dtype: torch.dtype, wire_dtype: torch.dtype, weighted: bool = False
) -> tuple[KernelSpec, int]:
    """The partial sums of layout "expert", for copy engines to take home: (spec, dynamic shared memory)."""
    spec, _ = combine_spec(plan, "expert", y_dtype, wire_dtype, wire_dtype, weighted=weighted)
    shape = dict(spec.shape) | {"shared_bytes": 0}
    return replace(spec, name="presum", path="kernels/combine/presum.cuh", shape=tuple(shape.items())), 0


def _terms_at_once(expected: float, most: int) -> int:
    """How many terms of a sum are loaded together: the power of two that about holds the expected number."""
    terms = 1
    while terms < min(0.9 * expected, most):
        terms *= 2
    return terms
