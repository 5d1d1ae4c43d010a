"""The host side of the kernels before and after the GEMMs of MegaMoE: their arguments and variants."""

from __future__ import annotations

import ctypes
from dataclasses import KW_ONLY, dataclass

import torch

from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.common import DTYPES, FieldsAtOnce, describe, int32_fields, short_name, uint64_fields
from tokenloom.plan import Plan

LIST_THREADS = 512
LIST_BLOCKS_PER_SM = 2
SUM_THREADS = 512
TERMS_AT_ONCE = 8
"""Most rows of a token that are loaded together to be added."""


class RouteListsArgs(ctypes.Structure):
    """Mirror of RouteListsArgs in route_lists.cuh, which says what each value is."""

    _fields_ = [
        *uint64_fields("num_rows", "source_counts", "expert_counts", "x", "x_scales", "stats"),
        *int32_fields("num_tokens", "copy_room"),
        *uint64_fields("ids", "weights", "row_tokens", "values", "scales"),
        *uint64_fields("peers", "combine_recv"),
        *uint64_fields("offsets", "rows", "row_weights", "targets", "taken", "copies", "copied"),
        *uint64_fields("fault_claimed"),
        *int32_fields("rank", "padding"),
    ]


LIST_FIELDS = FieldsAtOnce(
    RouteListsArgs,
    *("num_rows", "source_counts", "expert_counts", "x", "x_scales", "stats", "num_tokens", "copy_room"),
)
"""What it is told anew in every call."""


class SumRoutesArgs(ctypes.Structure):
    """Mirror of SumRoutesArgs in sum_routes.cuh, which says what each value is."""

    _fields_ = [
        *uint64_fields("topk_ids", "slots", "out"),
        *int32_fields("num_tokens", "ids_are_int64"),
        *uint64_fields("met", "masked", "combine_recv"),
    ]


SUM_FIELDS = FieldsAtOnce(SumRoutesArgs, "topk_ids", "slots", "out", "num_tokens", "ids_are_int64")
"""What it is told anew in every call."""


@dataclass(frozen=True)
class OwnTokens:
    """How a rank's own tokens come to its shared experts.

    Attributes:
        dtype: of x; float8_e4m3fn comes with scales.
        power_of_two_scales: for other dtypes, as in ``quantize_fp8``.
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    power_of_two_scales: bool = False


@dataclass(frozen=True)
class RouteListsVariant:
    """One compiled form of the kernel that lists the routes of each local expert.

    Attributes:
        plan: sizes of the group.
        intermediate: width of an expert.
        num_shared_experts: experts that take all of this rank's tokens.
        own_tokens: what the shared experts are given.
    """

    plan: Plan
    _: KW_ONLY
    intermediate: int
    num_shared_experts: int = 0
    own_tokens: OwnTokens = OwnTokens()

    def __str__(self) -> str:
        shared = ""
        if self.num_shared_experts:
            scales = ", powers of two" if self.own_tokens.power_of_two_scales else ""
            shared = f", {self.num_shared_experts} shared experts of {short_name(self.own_tokens.dtype)}{scales}"
        return f"route_lists, {describe(self.plan)} i{self.intermediate}{shared}"

    def spec(self) -> KernelSpec:
        """What to compile and how to launch it: with any number of blocks."""
        plan, own_tokens = self.plan, self.own_tokens
        quantize = self.num_shared_experts > 0 and own_tokens.dtype in DTYPES
        shape = {
            "num_ranks": plan.num_ranks,
            "experts_per_rank": plan.experts_per_rank,
            "top_k": plan.top_k,
            "hidden": plan.hidden,
            "intermediate": self.intermediate,
            "shared_experts": self.num_shared_experts,
            "received_rows": plan.worst_case_rows("token"),
            "quantize": int(quantize),
            "x_dtype": DTYPES[own_tokens.dtype] if quantize else 0,
            "power_of_two": int(quantize and own_tokens.power_of_two_scales),
            "threads": LIST_THREADS,
        }
        path = "kernels/moe/route_lists.cuh"
        return KernelSpec("route_lists", path, tuple(shape.items()), RouteListsArgs, LIST_THREADS)


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
