"""The host side of the combine kernel: its arguments and its variants."""

from __future__ import annotations

import ctypes
from dataclasses import KW_ONLY, dataclass, replace

import torch

from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.common import (
    DTYPES,
    LAYOUTS,
    MAX_BLOCKS,
    MAX_SHARED_BYTES,
    PARTS,
    Call,
    FieldsAtOnce,
    Rates,
    SharesWork,
    Work,
    describe,
    int32_fields,
    ranks_of_token,
    ring,
    short_name,
    uint64_fields,
)
from tokenloom.plan import Plan

COPY_THREADS, SUM_THREADS = 512, 640
"""Threads of a block whose pushing warps send rows as they are, and of one where they make them. Eager calls have few
rows, and need the registers more than the warps."""
CHUNK_SHIFT, LONE_ROWS = 2, 512
"""Chunks have 4 rows. In layout expert, where rows are sums, the last 512 for each home rank are chunks by themselves:
at the end home waits for what slow SMs have claimed. But each chunk has a claim and a flag, and rows that are copied
lose by it. Ranks agree on layouts, but not on the dtype of y, by which rows are copied."""
COPY_WARPS = {12288: 4, 2048: 6, 0: 12}
"""Warps of a block that send rows as they are, by the least bytes of a row. Bulk copies need few threads."""
PUSH_STAGES = 4
"""Most stages of each warp that sends rows which are sums, or have to be converted: all of a block but the one that
notifies. 19 warps have 114 KB in flight; with more or fewer stages they are slower."""
PRE_REDUCE_WARPS = 12
PRE_REDUCE_BLOCKS = 64
"""Blocks of the kernel that pre-reduces, which only reads and writes this GPU's memory."""
SUM_STAGES = 4
"""Most stages of each warp that sums at home."""


WEIGHTS = {"none": 0, "received": 1, "home": 2}
"""Weights that rows are multiplied by: none, those that came with the dispatch, or what home sends along."""

ROWS = ("row_places", "row_tokens", "slots", "all_counts")
"""Addresses of what a dispatch has left of its rows, as the arguments of its combine name them."""


class CombineArgs(ctypes.Structure):
    """Mirror of CombineArgs in args.cuh, which says what each value is. Addresses and offsets are uint64."""

    _fields_ = [
        ("call", Call),
        *uint64_fields("y", *ROWS, "weights", "topk_ids", "out"),
        *int32_fields("num_tokens", "capacity", "ids_are_int64", "max_tokens"),
        *uint64_fields("chunk_flags", "peers", "combine_recv", "turn_bytes", "home_weights"),
        *int32_fields("max_chunks", "combine_turns"),
        *uint64_fields("own_sums"),
        *int32_fields("send_blocks", "push_blocks"),
    ]


CALL_FIELDS = FieldsAtOnce(
    CombineArgs, "y", *ROWS, "weights", "topk_ids", "out", "num_tokens", "capacity", "ids_are_int64"
)
"""What every combine is told anew."""


def max_chunks(plan: Plan) -> int:
    """Give a bound of the chunks that one rank sends another in a combine: rows, or blocks of a call between nodes."""
    return max(plan.max_tokens_per_rank, MAX_BLOCKS)


@dataclass(frozen=True)
class CombineVariant(SharesWork):
    """One compiled form of the combine kernel.

    Attributes:
        plan: sizes of the group.
        layout: "token", "expert" or "rank", as the dispatch had.
        y_dtype, wire_dtype, out_dtype: dtypes of the rows given, of those sent home, and of the result.
        mode: "per_rank" sends partial sums home, "per_route" each weighted row.
        hidden: values of a row; None means the plan's.
        dense: rows have come home as :class:`PreReduceVariant` makes them, and the kernel only adds them.
        weights: what rows are multiplied by (layout "expert" only): one of :data:`WEIGHTS`.
        eager: rows leave before all ranks have opened the call, to one of :data:`TURNS` buffers that take turns. Each
            word of a row says that it is here (device/sync/arrival.cuh).
        part: "whole", or the half of a call that "send" or "receive" is.
    """

    plan: Plan
    _: KW_ONLY
    layout: str
    y_dtype: torch.dtype
    wire_dtype: torch.dtype
    out_dtype: torch.dtype
    mode: str = "per_rank"
    hidden: int | None = None
    dense: bool = False
    weights: str = "none"
    eager: bool = False
    part: str = "whole"

    def work(self, rates: Rates) -> Work | None:
        if self.dense:
            return None
        plan, hidden = self.plan, self.hidden or self.plan.hidden
        rows = plan.top_k if self.mode == "per_route" else ranks_of_token(plan.num_ranks, plan.top_k)  # of a token
        from_peers = rows * (1 - 1 / plan.num_ranks)
        y_bytes, wire_bytes = hidden * self.y_dtype.itemsize, hidden * self.wire_dtype.itemsize
        if self.layout == "expert":  # rows for this rank's own tokens are sent too
            pushed = plan.top_k * y_bytes + rows * wire_bytes
        elif self.y_dtype == self.wire_dtype:
            pushed = 2 * from_peers * wire_bytes
        else:
            pushed = rows * (y_bytes + wire_bytes)
        added = rows * wire_bytes + hidden * self.out_dtype.itemsize
        if self.eager:  # what is read is set back
            added += (from_peers if self.layout != "expert" and self.y_dtype == self.wire_dtype else rows) * wire_bytes
        return Work(
            pushed * 1e-3 / rates.push_gbytes_per_s,
            added * 1e-3 / rates.add_gbytes_per_s,
            from_peers * wire_bytes * 1e-3 / rates.link_gbytes_per_s,
        )

    @property
    def copies(self) -> bool:
        """Whether rows are sent as they are, in large calls."""
        return self.layout != "expert" and self.y_dtype == self.wire_dtype and not (self.dense or self.eager)

    def __str__(self) -> str:
        dtypes = [short_name(dtype) for dtype in (self.y_dtype, self.wire_dtype, self.out_dtype)]
        extras = [word for word in ("dense", "eager") if getattr(self, word)]
        if self.weights != "none":
            extras.append(f"{self.weights} weights")
        if self.part != "whole":
            extras.append(self.part)
        if self.hidden is not None:
            extras.append(f"rows of {self.hidden}")
        words = [describe(self.plan), f"layout {self.layout}", self.mode, " > ".join(dtypes), *extras]
        return f"combine, {', '.join(words)}"

    def spec(self, reserved_bytes: int = 0) -> KernelSpec:
        """What to compile and how to launch it.

        Args:
            reserved_bytes: shared memory for what a kernel that shares the pushing role, and adds in registers, has
                besides; 0: rows are added through rings.
        """
        plan, hidden = self.plan, self.hidden or self.plan.hidden
        copies = self.copies
        row_bytes = hidden * self.wire_dtype.itemsize
        threads = COPY_THREADS if copies or self.dense or self.eager else SUM_THREADS
        push_warps = threads // 32 if self.eager else _copy_warps(row_bytes) if copies else threads // 32 - 1
        rings = 1 if self.dense or self.part == "receive" else push_warps
        sum_warps = 1 if self.part == "send" or self.eager or reserved_bytes else threads // 32
        other_bytes = 36 * plan.num_ranks + 4 * 19 * push_warps + 256 + reserved_bytes
        _, sum_stages, sum_bytes = _term_ring(hidden, self.wire_dtype, sum_warps, SUM_STAGES)
        if copies:
            stage_bytes, stages, shared_bytes = ring(row_bytes, rings, other_bytes, sum_bytes)
        else:
            stage_bytes, stages, ring_bytes = _term_ring(hidden, self.y_dtype, rings, PUSH_STAGES)
            shared_bytes = max(ring_bytes, sum_bytes) + other_bytes
        shape = {
            "num_ranks": plan.num_ranks,
            "node_ranks": plan.num_ranks,
            "num_experts": plan.num_experts,
            "top_k": plan.top_k,
            "hidden": hidden,
            "y_dtype": DTYPES[self.y_dtype],
            "wire_dtype": DTYPES[self.wire_dtype],
            "out_dtype": DTYPES[self.out_dtype],
            "group": 8 if hidden % 8 == 0 else 4,
            "layout": LAYOUTS[self.layout],
            "per_route": int(self.mode == "per_route"),
            "dense": int(self.dense),
            "weights": WEIGHTS[self.weights],
            "eager": int(self.eager),
            "part": PARTS[self.part],
            "threads": threads,
            "push_warps": push_warps,
            "stage_bytes": stage_bytes,
            "stages": stages,
            "sum_stages": sum_stages,
            "chunk_shift": CHUNK_SHIFT,
            "lone_rows": LONE_ROWS if self.layout == "expert" else 0,
        }
        return KernelSpec(
            "combine",
            "kernels/combine/combine.cuh",
            tuple(shape.items()),
            CombineArgs,
            threads=threads,
            shared_bytes=shared_bytes,
        )


@dataclass(frozen=True)
class PreReduceVariant:
    """One compiled form of the kernel that makes the partial sums of layout "expert", for copy engines to take home.

    Attributes:
        plan: sizes of the group.
        y_dtype, wire_dtype: dtypes of the rows given, and of the sums.
        weighted: received weights are given.
    """

    plan: Plan
    _: KW_ONLY
    y_dtype: torch.dtype
    wire_dtype: torch.dtype
    weighted: bool = False

    def __str__(self) -> str:
        dtypes = f"{short_name(self.y_dtype)} > {short_name(self.wire_dtype)}"
        return f"pre_reduce, {describe(self.plan)}, {dtypes}{', weighted' if self.weighted else ''}"

    def spec(self) -> KernelSpec:
        """What to compile and how to launch it: with any number of blocks."""
        spec = CombineVariant(
            plan=self.plan,
            layout="expert",
            y_dtype=self.y_dtype,
            wire_dtype=self.wire_dtype,
            out_dtype=self.wire_dtype,
            weights="received" if self.weighted else "none",
        ).spec()
        _, stages, shared_bytes = _term_ring(self.plan.hidden, self.y_dtype, PRE_REDUCE_WARPS, PUSH_STAGES)
        shape = dict(spec.shape) | {"push_warps": PRE_REDUCE_WARPS, "threads": 32 * PRE_REDUCE_WARPS, "stages": stages}
        return replace(
            spec,
            name="pre_reduce",
            path="kernels/combine/pre_reduce.cuh",
            shape=tuple(shape.items()),
            threads=32 * PRE_REDUCE_WARPS,
            shared_bytes=shared_bytes + 256,
        )


def _term_ring(hidden: int, dtype: torch.dtype, warps: int, most: int) -> tuple[int, int, int]:
    """Stages of TermStream (device/pipe/term_stream.cuh) for the rings of a block.

    Returns:
        Bytes of a stage, stages of a ring, and bytes of all rings.
    """
    group = 8 if hidden % 8 == 0 else 4
    all_steps = -(-(hidden // group) // 32)
    lane_bytes = 64 if hidden // group % 32 == 0 else 48
    tiles = -(-all_steps // (lane_bytes // (group * dtype.itemsize)))
    stage_bytes = 32 * -(-all_steps // tiles) * group * dtype.itemsize
    stages = min(most, MAX_SHARED_BYTES * 9 // 10 // (warps * stage_bytes))
    return stage_bytes, stages, warps * stages * stage_bytes


def _copy_warps(row_bytes: int) -> int:
    return next(warps for least, warps in COPY_WARPS.items() if row_bytes >= least)
