"""The host side of the kernels between and behind the GEMMs of a MegaMoE: their arguments and variants."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.common import DTYPES, int32_fields, uint64_fields
from tokenloom.plan import Plan

LIST_THREADS = 512
LIST_BLOCKS_PER_SM = 2
SUM_THREADS = 512
TERMS_AT_ONCE = 8
"""Rows of a token that are added together are loaded together, up to so many."""


class RouteListsArgs(ctypes.Structure):
    """Mirror of RouteListsArgs in route_lists.cuh, which says what each value is."""

    _fields_ = [
        *uint64_fields("ids", "weights", "row_tokens", "num_rows", "source_counts", "expert_counts"),
        *uint64_fields("values", "scales", "x", "x_scales"),
        *int32_fields("num_tokens", "rank"),
        *uint64_fields("peers", "home"),
        *uint64_fields("offsets", "rows", "row_weights", "targets", "taken", "stats", "copies", "copied"),
        *int32_fields("copy_room", "padding"),
        *uint64_fields("fault_claimed"),
    ]


class SumRoutesArgs(ctypes.Structure):
    """Mirror of SumRoutesArgs in sum_routes.cuh, which says what each value is."""

    _fields_ = [
        *uint64_fields("topk_ids", "slots", "met", "home", "out"),
        *int32_fields("num_tokens", "ids_are_int64"),
    ]


@dataclass(frozen=True)
class OwnTokens:
    """How a rank's tokens come to its shared experts.

    Attributes:
        dtype: of x; float8_e4m3fn beside scales.
        power_of_two_scales: as in ``quantize_fp8``, for other dtypes.
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    power_of_two_scales: bool = False


def route_lists_spec(
    plan: Plan, intermediate: int, num_shared_experts: int = 0, own_tokens: OwnTokens = OwnTokens()
) -> KernelSpec:
    """What to compile; launched with any number of blocks."""
    quantize = num_shared_experts > 0 and own_tokens.dtype in DTYPES
    shape = {
        "num_ranks": plan.num_ranks,
        "experts_per_rank": plan.experts_per_rank,
        "top_k": plan.top_k,
        "hidden": plan.hidden,
        "intermediate": intermediate,
        "shared_experts": num_shared_experts,
        "received_rows": plan.worst_case_rows("token"),
        "quantize": int(quantize),
        "x_dtype": DTYPES[own_tokens.dtype] if quantize else 0,
        "power_of_two": int(quantize and own_tokens.power_of_two_scales),
        "threads": LIST_THREADS,
    }
    path = "kernels/moe/route_lists.cuh"
    return KernelSpec("route_lists", path, tuple(shape.items()), RouteListsArgs, LIST_THREADS)


def sum_routes_spec(plan: Plan, num_shared_experts: int = 0) -> KernelSpec:
    """What to compile; launched with any number of blocks."""
    shape = {
        "num_ranks": plan.num_ranks,
        "num_experts": plan.num_experts,
        "top_k": plan.top_k,
        "shared_experts": num_shared_experts,
        "hidden": plan.hidden,
        "terms": min(TERMS_AT_ONCE, 1 << (plan.top_k + num_shared_experts - 1).bit_length()),
        "threads": SUM_THREADS,
    }
    path = "kernels/moe/sum_routes.cuh"
    return KernelSpec("sum_routes", path, tuple(shape.items()), SumRoutesArgs, SUM_THREADS)
