"""Schedules of MegaMoE calls, by their number of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from tokenloom.errors import InvalidArgument
from tokenloom.kernels.common import MAX_BLOCKS


@dataclass(frozen=True)
class MegaSchedule:
    """Choices of one call that change its time but not its result. Ranks may differ.

    Attributes:
        send_sms: SMs that send rows to the experts, an even number up to 32, while GEMM1 runs on the others.

    Raises:
        InvalidArgument: the number is not as above.
    """

    send_sms: int = MAX_BLOCKS

    def __post_init__(self) -> None:
        if self.send_sms not in range(2, MAX_BLOCKS + 1, 2):
            raise InvalidArgument(f"send_sms is {self.send_sms!r}, expected an even number up to {MAX_BLOCKS}")


SCHEDULES: tuple[tuple[int, MegaSchedule], ...] = (
    (128, MegaSchedule(send_sms=32)),
    (1 << 30, MegaSchedule(send_sms=16)),
)
"""Pairs (most tokens of this rank, schedule), measured (docs/performance/notebook.md)."""


def schedule_for(num_tokens: int) -> MegaSchedule:
    """Return the schedule for a number of tokens."""
    return next(schedule for most, schedule in SCHEDULES if num_tokens <= most)
