"""The host side of the dispatch kernel: its arguments and its variants."""

from __future__ import annotations

import ctypes
from dataclasses import KW_ONLY, dataclass

import torch

from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.common import (
    CONTROL_BYTES,
    DTYPES,
    LAYOUTS,
    MAX_SHARED_BYTES,
    MOST_STAGES,
    Call,
    describe,
    int32_fields,
    ring,
    short_name,
    uint64_fields,
)
from tokenloom.plan import DISPATCH_STRATEGIES, Plan

MAX_BLOCKS = 32
"""Most blocks of one dispatch, each on an SM of its own. Flags are laid out for as many."""
SEND_WARPS = 8
"""Warps of a block that stream rows. Their rings share the memory of an SM."""
FILL_WARPS = 8
"""Further warps of a block in layout expert: a notify warp, and those that copy rows to their further places."""
QUANTIZE_WARPS = 16
"""Warps of a block that quantise rows on their way. They need no ring."""
QUANTIZE = {"": 0, "any scale": 1, "power of two": 2}
"""How rows become FP8 on their way; Quantize of shared.cuh."""


class DispatchArgs(ctypes.Structure):
    """Mirror of DispatchArgs in args.cuh, which says what each value is. Addresses and offsets are uint64."""

    _fields_ = [
        ("call", Call),
        *uint64_fields("x", "scales", "topk_ids", "topk_weights", "gathered", "done_flags", "row_flags"),
        *uint64_fields(
            "peers", "rows", "row_scales", "row_ids", "row_weights", "row_places", "row_tokens", "region_bytes"
        ),
        *uint64_fields("block_counts", "slots_found"),
        *uint64_fields("slots", "all_counts", "num_rows", "source_counts", "expert_counts", "expert_offsets"),
        *uint64_fields("host_counts"),
        *int32_fields("host_sequence", "num_tokens", "max_tokens", "capacity", "alignment", "ids_are_int64"),
        *int32_fields("stop_on_overflow", "padding"),
    ]


def block_count_words(plan: Plan) -> int:
    """Count the int32 words of ``block_counts`` and of ``slots_found``, which lies behind it."""
    return MAX_BLOCKS * (2 + plan.num_ranks + plan.num_experts)


@dataclass(frozen=True)
class DispatchVariant:
    """One compiled form of the dispatch kernel.

    Attributes:
        plan: sizes of the group.
        layout: "token", "expert" or "rank".
        x_dtype: dtype of the tokens; float8_e4m3fn comes with scales.
        quantize: "" sends rows as they are. "any scale" and "power of two" make FP8 of them on the way.
        strategy: what carries rows, of :data:`tokenloom.plan.DISPATCH_STRATEGIES`. Other than "dedup" for layout
            "expert" only; "all_gather" for rows without scales only.
    """

    plan: Plan
    _: KW_ONLY
    layout: str
    x_dtype: torch.dtype
    quantize: str = ""
    strategy: str = "dedup"

    @property
    def row_dtype(self) -> torch.dtype:
        """Dtype of the rows that are sent."""
        return torch.float8_e4m3fn if self.quantize else self.x_dtype

    def __str__(self) -> str:
        rows = f"{short_name(self.x_dtype)} to fp8, {self.quantize}" if self.quantize else short_name(self.x_dtype)
        return f"dispatch, {describe(self.plan)}, layout {self.layout}, {self.strategy}, {rows}"

    def spec(self) -> KernelSpec:
        """What to compile and how to launch it.

        Raises:
            InvalidArgument: counts of so many experts leave no shared memory for rows.
        """
        plan, by_expert = self.plan, self.layout == "expert"
        row_bytes = plan.hidden * self.row_dtype.itemsize
        send_warps = SEND_WARPS if by_expert or not self.quantize else QUANTIZE_WARPS
        warps = send_warps + (FILL_WARPS if by_expert else 0)
        counts = plan.num_ranks + plan.num_experts
        route_bytes = 4 * (
            3 * counts + 16 + 8 * plan.num_ranks + plan.num_experts + (plan.num_experts if by_expert else 1)
        )
        route_bytes += 4 * 19 * send_warps + 256  # progress
        running_bytes, place_warps = 4 * warps * plan.num_ranks + 4, 1
        if by_expert:
            room = MAX_SHARED_BYTES - route_bytes - running_bytes - 1024 - send_warps * MOST_STAGES * CONTROL_BYTES
            place_warps = max(1, min(warps, room // (4 * plan.num_experts)))
            running_bytes += 4 * place_warps * plan.num_experts
        stage_bytes, stages, shared_bytes = ring(row_bytes, send_warps, route_bytes, running_bytes)
        if self.quantize:
            stage_bytes, stages, shared_bytes = 128, 2, max(running_bytes, 256) + route_bytes + 512
        shape = {
            "num_ranks": plan.num_ranks,
            "num_experts": plan.num_experts,
            "experts_per_rank": plan.experts_per_rank,
            "top_k": plan.top_k,
            "hidden": plan.hidden,
            "row_bytes": row_bytes,
            "scales_per_row": plan.scales_per_token if self.row_dtype == torch.float8_e4m3fn else 0,
            "quantize": QUANTIZE[self.quantize],
            "x_dtype": DTYPES[self.x_dtype] if self.quantize else 0,
            "layout": LAYOUTS[self.layout],
            "strategy": DISPATCH_STRATEGIES.index(self.strategy),
            "threads": 32 * warps,
            "send_warps": send_warps,
            "place_warps": place_warps,
            "stage_bytes": stage_bytes,
            "stages": stages,
            "max_blocks": MAX_BLOCKS,
        }
        return KernelSpec(
            "dispatch",
            "kernels/dispatch/dispatch.cuh",
            tuple(shape.items()),
            DispatchArgs,
            threads=32 * warps,
            shared_bytes=shared_bytes,
        )
