"""How a MegaMoE runs a call, by its number of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class MegaSchedule:
    """Choices of one call, which change its time and not its result. Ranks may differ.

    Attributes:
        copies_rows: received rows are put in the order of the experts before GEMM1, which then loads them by TMA, as
            far as there is room beside the activations. Otherwise it gathers them.
        waves: groups of experts; GEMM2 of one, which sends results home, runs beside GEMM1 of the next.
    """

    copies_rows: bool
    waves: int = 1


SCHEDULES: tuple[tuple[int, MegaSchedule], ...] = (
    (128, MegaSchedule(copies_rows=False)),
    (2048, MegaSchedule(copies_rows=True)),
    (1 << 30, MegaSchedule(copies_rows=True, waves=4)),
)
"""(most tokens of this rank, schedule), measured on H200 (docs/performance/notebook.md)."""


def schedule_for(num_tokens: int, num_ranks: int) -> MegaSchedule:
    """The first of the table that is for so many tokens; a rank alone sends nothing home, and needs no waves."""
    found = next(schedule for most, schedule in SCHEDULES if num_tokens <= most)
    return found if num_ranks > 1 else replace(found, waves=1)
