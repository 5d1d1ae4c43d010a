"""Schedules of MegaMoE calls, by their number of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache


@dataclass(frozen=True)
class MegaSchedule:
    """Choices of one call that change its time but not its result. Ranks may differ.

    Attributes:
        copies_rows: copy received rows into the order of the experts, as far as there is room beside the activations,
            so that GEMM1 loads them by TMA. GEMM1 gathers all other rows.
        waves: number of groups of experts. GEMM2 of one group, which sends results home, runs beside GEMM1 of the
            next.
    """

    copies_rows: bool
    waves: int = 1


SCHEDULES: tuple[tuple[int, MegaSchedule], ...] = (
    (128, MegaSchedule(copies_rows=False)),
    (2048, MegaSchedule(copies_rows=True)),
    (1 << 30, MegaSchedule(copies_rows=True, waves=4)),
)
"""Pairs (most tokens of this rank, schedule), measured on H200 (docs/performance/notebook.md)."""


@lru_cache(maxsize=1024)
def schedule_for(num_tokens: int, num_ranks: int) -> MegaSchedule:
    """Return the schedule for a number of tokens. A single rank sends nothing home, so it needs no waves."""
    found = next(schedule for most, schedule in SCHEDULES if num_tokens <= most)
    return found if num_ranks > 1 else replace(found, waves=1)
