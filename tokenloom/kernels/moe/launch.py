"""The host side of the kernels before and after the GEMMs of MegaMoE: their arguments and variants."""

from __future__ import annotations

import ctypes
from dataclasses import KW_ONLY, dataclass

import torch

from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.common import (
    DTYPES,
    MAX_BLOCKS,
    MAX_SHARED_BYTES,
    UNIT_BYTES,
    Call,
    FieldsAtOnce,
    describe,
    int32_fields,
    require_shared,
    short_name,
    uint64_fields,
)
from tokenloom.plan import FP8_BLOCK, Plan, align_up

SEND_WARPS = 8
"""Warps of a block that send rows. Their rings share the memory of an SM."""
SEND_THREADS = 512
MOST_STAGES = 4
"""Rows of a warp between load and store. More are no faster."""
ROW_BESIDE_BYTES = 16 + 8
"""Shared memory of such a row beside its bytes: RowToSend, and its barrier."""
RING_UNIT = 128
"""Alignment of a warp's ring."""
PACK_THREADS = SUM_THREADS = 512
TERMS_AT_ONCE = 8
"""Most rows of a token that are loaded together to be added."""
CLUSTER = 2
"""Blocks of a cluster, as those of GEMM1, so that kernels leave whole pairs of SMs to each other."""
HOME_ROW_BITS = 26
"""kHomeRowBits of device/roles/arrivals.cuh."""


class PackTokensArgs(ctypes.Structure):
    """Mirror of PackTokensArgs in pack_tokens.cuh, which says what each value is."""

    _fields_ = [
        *uint64_fields("x", "scales", "packed"),
        *int32_fields("num_tokens", "padding"),
        *uint64_fields("trace"),
    ]


PACK_FIELDS = FieldsAtOnce(PackTokensArgs, "x", "scales", "packed", "num_tokens")
"""What it is told anew in every call."""


class SendRoutesArgs(ctypes.Structure):
    """Mirror of SendRoutesArgs in send_routes.cuh, which says what each value is."""

    _fields_ = [
        ("call", Call),
        *uint64_fields("topk_ids", "topk_weights", "stats"),
        *int32_fields("num_tokens", "ids_are_int64"),
        *uint64_fields("peers", "rows", "row_scales", "row_homes", "row_weights", "arrived"),
        *uint64_fields("offsets", "expected", "begun"),
        *uint64_fields("packed", "block_counts", "order"),
    ]


SEND_FIELDS = FieldsAtOnce(SendRoutesArgs, "topk_ids", "topk_weights", "stats", "num_tokens", "ids_are_int64")
"""What it is told anew in every call."""


class SumRoutesArgs(ctypes.Structure):
    """Mirror of SumRoutesArgs in sum_routes.cuh, which says what each value is."""

    _fields_ = [
        *uint64_fields("topk_ids", "out"),
        *int32_fields("num_tokens", "ids_are_int64"),
        *uint64_fields("met", "masked", "combine_recv", "trace"),
    ]


SUM_FIELDS = FieldsAtOnce(SumRoutesArgs, "topk_ids", "out", "num_tokens", "ids_are_int64")
"""What it is told anew in every call."""


def block_count_words(plan: Plan, most_blocks: int) -> int:
    """Count the int32 words of ``block_counts``, as device/roles/count_routes.cuh has them."""
    return most_blocks * (1 + plan.num_ranks + plan.num_experts)


def packed_bytes(hidden: int) -> int:
    """Bytes of a token as it is sent: values in E4M3, then scales, as bulk copies move them."""
    return align_up(hidden + hidden // FP8_BLOCK * 4, UNIT_BYTES)


@dataclass(frozen=True)
class PackTokensVariant:
    """One compiled form of the kernel that packs a rank's tokens.

    Attributes:
        hidden: H.
        dtype: of the tokens; float8_e4m3fn comes with scales, others are quantised.
        power_of_two_scales: for other dtypes, as in ``quantize_fp8``.
    """

    hidden: int
    dtype: torch.dtype
    power_of_two_scales: bool = False

    def __str__(self) -> str:
        scales = ", powers of two" if self.power_of_two_scales else ""
        return f"pack_tokens, h{self.hidden} {short_name(self.dtype)}{scales}"

    def spec(self) -> KernelSpec:
        """What to compile and how to launch it: with an even number of blocks."""
        quantize = self.dtype in DTYPES
        shape = {
            "hidden": self.hidden,
            "packed_bytes": packed_bytes(self.hidden),
            "quantize": int(quantize),
            "x_dtype": DTYPES[self.dtype] if quantize else 0,
            "power_of_two": int(quantize and self.power_of_two_scales),
            "threads": PACK_THREADS,
        }
        path = "kernels/moe/pack_tokens.cuh"
        return KernelSpec("pack_tokens", path, tuple(shape.items()), PackTokensArgs, PACK_THREADS, cluster=CLUSTER)


@dataclass(frozen=True)
class SendRoutesVariant:
    """One compiled form of the kernel that sends each route's row to its place among its expert's.

    Attributes:
        plan: sizes of the group.
        num_shared_experts: experts that take all of this rank's tokens.
    """

    plan: Plan
    _: KW_ONLY
    num_shared_experts: int = 0

    def __str__(self) -> str:
        return f"send_routes, {describe(self.plan)}, {self.num_shared_experts} shared experts"

    def spec(self) -> KernelSpec:
        """What to compile and how to launch it: with an even number of blocks, up to MAX_BLOCKS of kernels.common.

        Raises:
            InvalidArgument: counts of so many experts leave no shared memory for rows.
        """
        plan, shared, row = self.plan, self.num_shared_experts, packed_bytes(self.plan.hidden)
        counts = plan.num_ranks + plan.num_experts
        other = 4 * (3 * counts + 16 + 3 * plan.num_experts + plan.experts_per_rank + shared + 1)
        other += 4 * 19 * SEND_WARPS + 8 * plan.num_ranks + 512
        stage = row + ROW_BESIDE_BYTES
        room = MAX_SHARED_BYTES - other
        warps = min(SEND_WARPS, room // (2 * (stage + RING_UNIT)))
        require_shared(other + max(warps, 1) * 2 * (stage + RING_UNIT))
        stages = min(MOST_STAGES, (room // warps - RING_UNIT) // stage)
        shape = {
            "num_ranks": plan.num_ranks,
            "num_experts": plan.num_experts,
            "experts_per_rank": plan.experts_per_rank,
            "shared_experts": shared,
            "top_k": plan.top_k,
            "hidden": plan.hidden,
            "packed_bytes": row,
            "threads": SEND_THREADS,
            "send_warps": warps,
            "stages": stages,
            "max_blocks": MAX_BLOCKS,
        }
        shared_bytes = other + warps * (stages * stage + RING_UNIT)
        path = "kernels/moe/send_routes.cuh"
        return KernelSpec(
            "send_routes",
            path,
            tuple(shape.items()),
            SendRoutesArgs,
            SEND_THREADS,
            cluster=CLUSTER,
            shared_bytes=shared_bytes,
        )


@dataclass(frozen=True)
class SumRoutesVariant:
    """One compiled form of the kernel that adds the rows of each token.

    Attributes:
        plan: sizes of the group.
        num_shared_experts: rows of a token beside those of its routes.
    """

    plan: Plan
    _: KW_ONLY
    num_shared_experts: int = 0

    def __str__(self) -> str:
        return f"sum_routes, {describe(self.plan)}, {self.num_shared_experts} shared experts"

    def spec(self) -> KernelSpec:
        """What to compile and how to launch it: with any number of blocks."""
        plan = self.plan
        shape = {
            "num_ranks": plan.num_ranks,
            "num_experts": plan.num_experts,
            "top_k": plan.top_k,
            "shared_experts": self.num_shared_experts,
            "hidden": plan.hidden,
            "terms": min(TERMS_AT_ONCE, 1 << (plan.top_k + self.num_shared_experts - 1).bit_length()),
            "threads": SUM_THREADS,
        }
        path = "kernels/moe/sum_routes.cuh"
        return KernelSpec("sum_routes", path, tuple(shape.items()), SumRoutesArgs, SUM_THREADS)
