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
    Call,
    FieldsAtOnce,
    describe,
    int32_fields,
    require_shared,
    short_name,
    uint64_fields,
)
from tokenloom.plan import FP8_BLOCK, Plan, align_up

SEND_THREADS = 512
LOADING_WARPS = 8
"""Warps of a block that load rows and send them. Their rings share the memory of an SM."""
MOST_STAGES = 4
"""Rows of such a warp between load and store. More are no faster."""
ROW_BESIDE_BYTES = 16 + 8
"""Shared memory of such a row beside its bytes: RowToSend, and its barrier."""
LINE_BYTES = 128
"""Alignment of a token, and of a warp's ring of them."""
PROGRESS_BYTES = 4 * (3 + 16)
"""Of a warp, in Progress of device/sync/progress.cuh: three numbers, and kRecent items."""
KEEPING_WARPS = 12
"""Warps of a block that send rows of tokens which the block keeps."""
MOST_KEPT = 4
"""Tokens of a block that keeps them. With more it is faster to pack them on the SMs that send nothing."""
PACK_THREADS = SUM_THREADS = 512
PACK_WARPS = 4
"""Warps for each token, where there is room for them."""
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
    """Mirror of SendRoutesArgs in routes_to_send.cuh, which says what each value is."""

    _fields_ = [
        ("call", Call),
        *uint64_fields("x", "scales", "topk_ids", "topk_weights", "stats"),
        *int32_fields("num_tokens", "ids_are_int64"),
        *uint64_fields("peers", "rows", "row_scales", "row_homes", "row_weights", "arrived"),
        *uint64_fields("offsets", "expected", "begun"),
        *uint64_fields("packed", "block_counts", "order"),
    ]


SEND_FIELDS = FieldsAtOnce(
    SendRoutesArgs, "x", "scales", "topk_ids", "topk_weights", "stats", "num_tokens", "ids_are_int64"
)
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


def packed_bytes(hidden: int, recipe: str) -> int:
    """Bytes of a token as it is sent: values in E4M3, then scales.

    Whole lines, so that tokens begin with a line wherever they are: a bulk copy need not shift them.
    """
    scales = 1 if recipe == "row" else hidden // FP8_BLOCK
    return align_up(hidden + scales * 4, LINE_BYTES)


@dataclass(frozen=True)
class Packing:
    """How a token becomes what is sent.

    Attributes:
        dtype: of the tokens; float8_e4m3fn comes with scales, others are quantised.
        power_of_two_scales: for other dtypes, as in ``quantize_fp8``.
    """

    dtype: torch.dtype
    power_of_two_scales: bool = False

    def __str__(self) -> str:
        return short_name(self.dtype) + (", powers of two" if self.power_of_two_scales else "")

    def shape(self) -> dict[str, int]:
        """What packed_token.cuh has to know."""
        quantize = self.dtype in DTYPES
        return {
            "quantize": int(quantize),
            "x_dtype": DTYPES[self.dtype] if quantize else 0,
            "power_of_two": int(quantize and self.power_of_two_scales),
        }


@dataclass(frozen=True)
class PackTokensVariant:
    """One compiled form of the kernel that packs a rank's tokens.

    Attributes:
        hidden: H.
        packing: of each token.
        recipe: one of ``RECIPES``, which says how many scales a token has.
    """

    hidden: int
    packing: Packing
    recipe: str = "block"

    def __str__(self) -> str:
        return f"pack_tokens, h{self.hidden} {self.packing}" + ", row scales" * (self.recipe == "row")

    def spec(self) -> KernelSpec:
        """What to compile and how to launch it: with an even number of blocks."""
        shape = {
            "hidden": self.hidden,
            "packed_bytes": packed_bytes(self.hidden, self.recipe),
            "row_scales": int(self.recipe == "row"),
            **self.packing.shape(),
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
        packing: blocks pack their own tokens so, and keep them, up to ``kept_tokens`` each. None: they load tokens
            that another kernel has packed.
        recipe: one of ``RECIPES``, which says how many scales a token has.
    """

    plan: Plan
    _: KW_ONLY
    num_shared_experts: int = 0
    packing: Packing | None = None
    recipe: str = "block"

    def __str__(self) -> str:
        tokens = "packed" if self.packing is None else str(self.packing)
        tokens += ", row scales" * (self.recipe == "row")
        return f"send_routes, {describe(self.plan)}, {self.num_shared_experts} shared experts, {tokens}"

    @property
    def kept_tokens(self) -> int:
        """Most tokens of a block that packs them itself, as far as there is room."""
        return min(
            MOST_KEPT, (MAX_SHARED_BYTES - self._beside_tokens()) // packed_bytes(self.plan.hidden, self.recipe)
        )

    def _beside_tokens(self) -> int:
        """Bytes of shared memory for everything but rows and what is said of them."""
        plan, counts = self.plan, self.plan.num_ranks + self.plan.num_experts
        words = 3 * counts + 16 + 3 * plan.num_experts + plan.experts_per_rank + self.num_shared_experts + 1
        return 4 * words + 8 * plan.num_ranks + 512

    def spec(self) -> KernelSpec:
        """What to compile and how to launch it: with an even number of blocks, up to MAX_BLOCKS of kernels.common.

        Raises:
            InvalidArgument: counts of so many experts leave no shared memory for rows.
        """
        plan, row = self.plan, packed_bytes(self.plan.hidden, self.recipe)
        shape = {
            "num_ranks": plan.num_ranks,
            "num_experts": plan.num_experts,
            "experts_per_rank": plan.experts_per_rank,
            "shared_experts": self.num_shared_experts,
            "top_k": plan.top_k,
            "hidden": plan.hidden,
            "packed_bytes": row,
            "row_scales": int(self.recipe == "row"),
            "threads": SEND_THREADS,
            "max_blocks": MAX_BLOCKS,
        }
        other = self._beside_tokens()
        if self.packing is not None:
            tokens = self.kept_tokens
            require_shared(other + row * max(tokens, 1))
            shape |= {**self.packing.shape(), "kept_tokens": tokens, "send_warps": KEEPING_WARPS}
            shared_bytes = other + tokens * row
        else:
            other += PROGRESS_BYTES * LOADING_WARPS
            stage, room = row + ROW_BESIDE_BYTES, MAX_SHARED_BYTES - other
            warps = min(LOADING_WARPS, room // (2 * (stage + LINE_BYTES)))
            require_shared(other + max(warps, 1) * 2 * (stage + LINE_BYTES))
            stages = min(MOST_STAGES, (room // warps - LINE_BYTES) // stage)
            shape |= {"kept_tokens": 0, "send_warps": warps, "stages": stages}
            shared_bytes = other + warps * (stages * stage + LINE_BYTES)
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
            "terms_at_once": min(TERMS_AT_ONCE, 1 << (plan.top_k + self.num_shared_experts - 1).bit_length()),
            "threads": SUM_THREADS,
        }
        path = "kernels/moe/sum_routes.cuh"
        return KernelSpec("sum_routes", path, tuple(shape.items()), SumRoutesArgs, SUM_THREADS)
