"""The host side of the kernels between and behind the GEMMs of a MegaMoE: their arguments and variants."""

from __future__ import annotations

import ctypes

from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.shape import Call, int32_fields, uint64_fields
from tokenloom.plan import Plan

LIST_THREADS = 512
MEET_THREADS = 128
SUM_THREADS = 512
TERMS_AT_ONCE = 8
"""Rows of a token that are added together are loaded together, up to so many."""


class RouteListsArgs(ctypes.Structure):
    """Mirror of RouteListsArgs in route_lists.cuh, which says what each value is."""

    _fields_ = [
        *uint64_fields("ids", "weights", "row_tokens", "num_rows", "source_counts", "expert_counts"),
        *uint64_fields("peers", "home", "home_row_bytes"),
        *uint64_fields("offsets", "rows", "row_weights", "targets", "stats", "fault_claimed"),
    ]


class MeetRanksArgs(ctypes.Structure):
    """Mirror of MeetRanksArgs in meet_ranks.cuh, which says what each value is."""

    _fields_ = [("call", Call), *uint64_fields("met")]


class SumRoutesArgs(ctypes.Structure):
    """Mirror of SumRoutesArgs in sum_routes.cuh, which says what each value is."""

    _fields_ = [
        *uint64_fields("topk_ids", "slots", "met", "home", "out"),
        *int32_fields("num_tokens", "ids_are_int64"),
    ]


def route_lists_spec(plan: Plan) -> tuple[KernelSpec, int]:
    """(spec, dynamic shared memory); launched with a block for each local expert."""
    shape = {
        "num_ranks": plan.num_ranks,
        "experts_per_rank": plan.experts_per_rank,
        "top_k": plan.top_k,
        "threads": LIST_THREADS,
    }
    path = "kernels/mega/route_lists.cuh"
    return KernelSpec("route_lists", path, tuple(shape.items()), RouteListsArgs, LIST_THREADS), 0


def meet_ranks_spec(plan: Plan) -> tuple[KernelSpec, int]:
    """(spec, dynamic shared memory); launched with one block."""
    shape = {"num_ranks": plan.num_ranks, "num_experts": plan.num_experts, "threads": MEET_THREADS}
    path = "kernels/mega/meet_ranks.cuh"
    return KernelSpec("meet_ranks", path, tuple(shape.items()), MeetRanksArgs, MEET_THREADS), 0


def sum_routes_spec(plan: Plan) -> tuple[KernelSpec, int]:
    """(spec, dynamic shared memory); launched with any number of blocks."""
    shape = {
        "num_ranks": plan.num_ranks,
        "num_experts": plan.num_experts,
        "top_k": plan.top_k,
        "hidden": plan.hidden,
        "terms": min(TERMS_AT_ONCE, 1 << (plan.top_k - 1).bit_length()),
        "threads": SUM_THREADS,
    }
    path = "kernels/mega/sum_routes.cuh"
    return KernelSpec("sum_routes", path, tuple(shape.items()), SumRoutesArgs, SUM_THREADS), 0
