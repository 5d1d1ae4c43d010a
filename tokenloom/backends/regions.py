"""What lies in the symmetric buffers of a communicator, and how large it is."""

from __future__ import annotations

from tokenloom.kernels.combine.launch import max_chunks
from tokenloom.kernels.dispatch.launch import MAX_BLOCKS
from tokenloom.plan import FP8_BLOCK, Plan
from tokenloom.symmetric import Regions

HEADER_WORDS = 16
"""kHeaderWords of device/sync/call.cuh."""
EXPERT_ROOM = 1.25
"""Rows of layout "expert" that a region has room for, over the mean of an even routing."""


def control_regions(plan: Plan) -> Regions:
    """Flags, headers and counts."""
    row_words = HEADER_WORDS + plan.num_ranks + plan.num_experts
    return Regions.of(
        [
            ("flags", 4 * plan.num_ranks),
            ("rows", 4 * 2 * plan.num_ranks * row_words),
            ("done_flags", 4 * plan.num_ranks * MAX_BLOCKS),
            ("chunk_flags", 4 * plan.num_ranks * max_chunks(plan)),
        ]
    )


def data_regions(plan: Plan, value_bytes: int) -> Regions:
    """Two receive regions and the home buffer of combine, for payloads of ``value_bytes`` bytes a value."""
    received, rows = plan.worst_case_rows("token"), region_rows(plan)
    sizes = []
    for i in (0, 1):
        sizes += [
            (f"rows{i}", rows * plan.hidden * value_bytes),
            (f"row_scales{i}", rows * (plan.hidden // FP8_BLOCK) * 4),
            (f"row_ids{i}", received * plan.top_k * 4),
            (f"row_weights{i}", received * plan.top_k * 4),
            (f"row_places{i}", received * plan.top_k * 4),
        ]
    home_rows = plan.max_tokens_per_rank * min(plan.num_ranks, plan.top_k)
    return Regions.of([*sizes, ("home", home_rows * plan.hidden * value_bytes)])


def region_rows(plan: Plan) -> int:
    """Rows of one receive region: the worst case of layouts "token" and "rank", and room for layout "expert"."""
    even = int(plan.max_tokens_per_rank * plan.top_k * EXPERT_ROOM) + plan.experts_per_rank * 128
    return max(plan.worst_case_rows("token"), min(even, plan.worst_case_rows("expert", 128)))
