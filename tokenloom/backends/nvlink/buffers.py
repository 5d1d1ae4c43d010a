"""What lies in the symmetric buffers of a communicator, and how large it is."""

from __future__ import annotations

from tokenloom.kernels.combine.launch import max_chunks
from tokenloom.kernels.dispatch.launch import MAX_BLOCKS
from tokenloom.plan import FP8_BLOCK, Plan, align_up
from tokenloom.runtime.symmetric_memory import Regions

HEADER_WORDS = 16
"""kHeaderWords of device/sync/call.cuh."""
EXPERT_ROOM = 1.25
"""Rows of layout "expert" that a region has room for, over the mean of an even routing."""


def control_regions(plan: Plan) -> Regions:
    """Flags, headers, counts, and the home buffer of the weights' gradients."""
    row_words = align_up(HEADER_WORDS + plan.num_ranks + plan.num_experts, 4)  # row_words of device/sync/call.cuh
    return Regions.of(
        [
            ("flags", 4 * plan.num_ranks),
            ("rows", 4 * 2 * plan.num_ranks * row_words),
            ("done_flags", 4 * plan.num_ranks * MAX_BLOCKS),
            ("row_flags", 4 * plan.worst_case_rows("token")),
            ("chunk_flags", 4 * plan.num_ranks * max_chunks(plan)),
            ("home_weights", 4 * _home_rows(plan) * home_weight_values(plan)),
        ]
    )


def data_regions(plan: Plan, value_bytes: int) -> Regions:
    """Two receive regions and the home buffer of combine, for payloads of ``value_bytes`` bytes a value."""
    rows = region_rows(plan)
    receive = [*_receive_region(plan, 0, rows, value_bytes), *_receive_region(plan, 1, rows, value_bytes)]
    return Regions.of([*receive, ("home", _home_rows(plan) * plan.hidden * value_bytes)])


def mega_regions(plan: Plan, value_bytes: int, num_shared_experts: int) -> Regions:
    """Of a MegaMoE: one receive region for layout "token" in FP8, a row in bfloat16 for each result that comes home.

    Behind the received rows is room for this rank's own tokens, if there are shared experts.
    """
    receive = _receive_region(plan, 0, mega_rows(plan, num_shared_experts), value_bytes)
    results = plan.max_tokens_per_rank * (plan.top_k + num_shared_experts)
    return Regions.of([*receive, ("home", results * plan.hidden * 2)])


def mega_rows(plan: Plan, num_shared_experts: int) -> int:
    """Rows of its receive region."""
    return plan.worst_case_rows("token") + (plan.max_tokens_per_rank if num_shared_experts else 0)


def _receive_region(plan: Plan, number: int, rows: int, value_bytes: int) -> list[tuple[str, int]]:
    received = plan.worst_case_rows("token")
    return [
        (f"rows{number}", rows * plan.hidden * value_bytes),
        (f"row_scales{number}", rows * (plan.hidden // FP8_BLOCK) * 4),
        (f"row_ids{number}", received * plan.top_k * 4),
        (f"row_weights{number}", received * plan.top_k * 4),
        (f"row_places{number}", received * plan.top_k * 4),
        (f"row_tokens{number}", received * 4),
    ]


def route_regions(plan: Plan, value_bytes: int) -> Regions:
    """The home buffer of combine per route: one row for each route of this rank's tokens."""
    return Regions.of([("home", plan.max_tokens_per_rank * plan.top_k * plan.hidden * value_bytes)])


def gather_regions(plan: Plan, value_bytes: int) -> Regions:
    """Rows that copy engines bring, by rank and token, [W, M]: two of these, for even and for odd calls."""
    size = plan.num_ranks * plan.max_tokens_per_rank * plan.hidden * value_bytes
    return Regions.of([("gathered0", size), ("gathered1", size)])


def home_weight_values(plan: Plan) -> int:
    """Gradients of weights in a row on its way home: top_k, rounded up to whole 16-byte units of float32."""
    return align_up(plan.top_k, 4)


def _home_rows(plan: Plan) -> int:
    return plan.max_tokens_per_rank * min(plan.num_ranks, plan.top_k)


def region_rows(plan: Plan) -> int:
    """Rows of one receive region: the worst case of layouts "token" and "rank", and room for layout "expert"."""
    even = int(plan.max_tokens_per_rank * plan.top_k * EXPERT_ROOM) + plan.experts_per_rank * 128
    return max(plan.worst_case_rows("token"), min(even, plan.worst_case_rows("expert", 128)))
