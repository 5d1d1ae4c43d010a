"""How a MegaMoE runs a call, by its number of tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MegaSchedule:
    """Choices of one call, which change its time and not its result. Ranks may differ.

    Attributes:
        copies_rows: received rows are put in the order of the experts before GEMM1, which then loads them by TMA, as
            far as there is room beside the activations. Otherwise it gathers them.
    """

    copies_rows: bool


SCHEDULES: tuple[tuple[int, MegaSchedule], ...] = (
    (128, MegaSchedule(copies_rows=False)),
    (1 << 30, MegaSchedule(copies_rows=True)),
)
"""(most tokens of this rank, schedule), measured on H200 (docs/performance.md)."""


def schedule_for(num_tokens: int) -> MegaSchedule:
    """The first of the table that is for so many tokens."""
    return next(schedule for most, schedule in SCHEDULES if num_tokens <= most)
