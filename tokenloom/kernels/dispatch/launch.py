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
    MAX_BLOCKS,
    MAX_SHARED_BYTES,
    MOST_STAGES,
    PARTS,
    Call,
    FieldsAtOnce,
    Rates,
    SharesWork,
    Work,
    describe,
    int32_fields,
    ranks_of_token,
    require_shared,
    ring,
    short_name,
    uint64_fields,
)
from tokenloom.plan import DISPATCH_STRATEGIES, ROUTE_LAYOUTS, Plan

SEND_WARPS = 8
"""Warps of a block that stream rows. Their rings share the memory of an SM."""
FILL_WARPS = 8
"""Further warps of a block in layout expert, where rows are sent as they are. One notifies, all copy rows to their
further places."""
QUANTIZE_WARPS = 16
"""Warps of a block that quantise rows on their way. In layout expert one of them notifies instead. They need no ring,
and a row takes each of them the same time, however many there are."""
STAGED_WARPS = 16
"""Warps of a block that copies rows to their places when they have come. The first of them send."""
SCALE_LAYOUTS = {"rows": 0, "columns": 1, "packed": 2}
"""How scales lie; ScaleLayout of scales.cuh."""
DISPATCH_LAYOUTS = {**LAYOUTS, "slots": 3}
"""Numbers of layouts; combine knows "slots" as "expert"."""
QUANTIZE = {"": 0, "any scale": 1, "power of two": 2}
"""How rows become FP8 on their way; Quantize of shared.cuh."""


RESULTS = ("slots", "all_counts", "num_rows", "source_counts", "expert_counts", "expert_offsets")
"""Addresses of what every dispatch leaves beside rows, as its arguments name them."""
OUTPUTS = ("out_rows", "out_scales", "out_ids", "out_weights", "out_places", "out_tokens", "slot_ranges")
"""Addresses of the outputs of a staged dispatch. What goes straight to slots has scales and ranges of these."""


class DispatchArgs(ctypes.Structure):
    """Mirror of DispatchArgs in args.cuh, which says what each value is. Addresses and offsets are uint64."""

    _fields_ = [
        ("call", Call),
        *uint64_fields("x", "scales", "topk_ids", "topk_weights", *RESULTS),
        *int32_fields("num_tokens", "host_sequence"),
        *uint64_fields(*OUTPUTS),
        *uint64_fields("gathered", "done_flags", "row_flags"),
        *uint64_fields("peers", "rows", "row_scales", "row_ids", "row_weights", "row_places", "row_tokens"),
        *uint64_fields("region_bytes", "turn_bytes", "block_counts", "host_counts"),
        *int32_fields("max_tokens", "capacity", "alignment", "ids_are_int64", "stop_on_overflow"),
        *int32_fields("send_blocks", "peer_blocks"),
    ]


_ANEW = ("x", "scales", "topk_ids", "topk_weights", *RESULTS, "num_tokens", "host_sequence")
CALL_FIELDS, STAGED_FIELDS = FieldsAtOnce(DispatchArgs, *_ANEW), FieldsAtOnce(DispatchArgs, *_ANEW, *OUTPUTS)
"""What every dispatch is told anew, and every one that is staged or goes to slots."""


@dataclass(frozen=True)
class DispatchVariant(SharesWork):
    """One compiled form of the dispatch kernel, or of the one that is staged.

    Attributes:
        plan: sizes of the group.
        layout: "token", "expert", "rank" or "slots".
        x_dtype: dtype of the tokens; float8_e4m3fn comes with scales.
        quantize: "" sends rows as they are. "any scale" and "power of two" make FP8 of them on the way.
        strategy: what carries rows, of :data:`tokenloom.plan.DISPATCH_STRATEGIES`. Other than "dedup" for layout
            "expert" only; "all_gather" for rows without scales only.
        staged: rows leave before all ranks have opened the call, to one of :data:`TURNS` regions. They arrive by
            source, and are copied to their places from there. Layouts "expert" with strategy "dedup" and "slots", and
            between nodes any layout.
        scale_layout: "rows"; in layout "slots" also "columns" or "packed".
        recipe: which values of FP8 rows share a scale, of :data:`tokenloom.plan.RECIPES`.
        part: "whole", or the half of a call that "send" or "receive" is.
    """

    plan: Plan
    _: KW_ONLY
    layout: str
    x_dtype: torch.dtype
    quantize: str = ""
    strategy: str = "dedup"
    staged: bool = False
    scale_layout: str = "rows"
    recipe: str = "block"
    part: str = "whole"

    @property
    def row_dtype(self) -> torch.dtype:
        """Dtype of the rows that are sent."""
        return torch.float8_e4m3fn if self.quantize else self.x_dtype

    @property
    def scales_per_row(self) -> int:
        """Scales that come with a row; 0 where it is not FP8."""
        return self.plan.scales_by(self.recipe) if self.row_dtype == torch.float8_e4m3fn else 0

    def work(self, rates: Rates) -> Work | None:
        plan, of_routes = self.plan, self.layout in ROUTE_LAYOUTS
        ranks, to_peers = plan.num_ranks, 1 - 1 / plan.num_ranks
        rows = ranks_of_token(ranks, plan.top_k)  # of a token, one for each rank that it goes to
        routes = plan.top_k * to_peers  # to other ranks
        row_bytes = plan.hidden * self.row_dtype.itemsize
        crossing = {"dedup": rows * to_peers, "all_to_all": routes, "all_gather": 0.0}[self.strategy]
        sent = rows if self.staged else crossing  # rows for this rank's own experts are staged too
        own = plan.top_k / ranks if of_routes else rows / ranks
        if self.staged:
            stored = rows + plan.top_k  # what comes is set back, and copied to all of its places
        else:
            # Whoever quantises a row also stores it here.
            stored = (0.0 if self.quantize else own) + (routes - crossing if of_routes else 0.0)
        sending = max(sent, to_peers) * rates.send_us + sent * 1e-3 / rates.send_gbytes_per_s * row_bytes
        if self.quantize:
            read = plan.hidden * self.x_dtype.itemsize
            sending = max(read * 1e-3 / rates.quantize_gbytes_per_s, sending)
        return Work(
            sending,
            stored * 1e-3 / rates.store_gbytes_per_s * row_bytes,
            crossing * row_bytes * 1e-3 / rates.link_gbytes_per_s,
        )

    def __str__(self) -> str:
        rows = f"{short_name(self.x_dtype)} to fp8, {self.quantize}" if self.quantize else short_name(self.x_dtype)
        words = [f"layout {self.layout}", self.strategy, rows]
        words += ["staged"] * self.staged
        words += [f"{self.recipe} scales"] * (self.recipe != "block")
        words += [word for word in (self.scale_layout, self.part) if word not in ("rows", "whole")]
        return f"dispatch, {describe(self.plan)}, {', '.join(words)}"

    def spec(self, reserved_bytes: int = 0) -> KernelSpec:
        """What to compile and how to launch it.

        Args:
            reserved_bytes: shared memory for what a kernel that shares these roles has besides.

        Raises:
            InvalidArgument: counts of so many experts leave no shared memory for rows.
        """
        plan, of_routes = self.plan, self.layout in ROUTE_LAYOUTS
        direct, receives = of_routes and not self.staged, self.part == "receive"
        arrives = self.staged and not reserved_bytes  # on one node: rows leave from registers
        row_bytes = plan.hidden * self.row_dtype.itemsize
        send_warps = SEND_WARPS if not self.quantize else QUANTIZE_WARPS - 1 if direct else QUANTIZE_WARPS
        if self.staged or (direct and receives):
            warps = STAGED_WARPS
        elif direct:
            warps = send_warps + 1 if self.quantize or self.part == "send" else send_warps + FILL_WARPS
        else:
            warps = send_warps
        counts = plan.num_ranks + plan.num_experts
        route_bytes = 4 * (
            3 * counts + 16 + 8 * plan.num_ranks + plan.num_experts + (plan.num_experts if direct else 1)
        )
        route_bytes += 4 * 19 * send_warps + 256 + reserved_bytes  # progress, and what else there is
        if of_routes:
            route_bytes += 4 * plan.experts_per_rank
        if self.staged:
            route_bytes += 4 * plan.num_experts + 128
        running_bytes, place_warps = 4 * warps * plan.num_ranks + 4, 1
        if of_routes:
            room = MAX_SHARED_BYTES - route_bytes - running_bytes - 1024 - send_warps * MOST_STAGES * CONTROL_BYTES
            place_warps = max(1, min(warps, room // (4 * plan.num_experts)))
            running_bytes += 4 * place_warps * plan.num_experts
        if self.quantize or receives or arrives:
            stage_bytes, stages, shared_bytes = 128, 2, max(running_bytes, 256) + route_bytes + 512
            require_shared(shared_bytes)
        else:
            stage_bytes, stages, shared_bytes = ring(row_bytes, send_warps, route_bytes, running_bytes)
        shape = {
            "num_ranks": plan.num_ranks,
            "node_ranks": plan.num_ranks,
            "num_experts": plan.num_experts,
            "experts_per_rank": plan.experts_per_rank,
            "top_k": plan.top_k,
            "hidden": plan.hidden,
            "row_bytes": row_bytes,
            "scales_per_row": self.scales_per_row,
            "scale_layout": SCALE_LAYOUTS[self.scale_layout],
            "quantize": QUANTIZE[self.quantize],
            "x_dtype": DTYPES[self.x_dtype] if self.quantize else 0,
            "layout": DISPATCH_LAYOUTS[self.layout],
            "strategy": DISPATCH_STRATEGIES.index(self.strategy),
            "staged": int(self.staged),
            "part": PARTS[self.part],
            "threads": 32 * warps,
            "send_warps": send_warps,
            "place_warps": place_warps,
            "stage_bytes": stage_bytes,
            "stages": stages,
            "max_blocks": MAX_BLOCKS,
        }
        name = "dispatch_staged" if self.staged else "dispatch"
        return KernelSpec(
            name,
            f"kernels/dispatch/{name}.cuh",
            tuple(shape.items()),
            DispatchArgs,
            threads=32 * warps,
            shared_bytes=shared_bytes,
        )
