"""Schedules of MegaMoE calls, by their number of tokens and the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from tokenloom.errors import InvalidArgument

MOST_SEND_SMS = 32
"""Most SMs that send rows. GEMM1 runs on the others."""
MOST_GEMM2_SMS = 64
"""About half of the SMs of a GPU."""


@dataclass(frozen=True)
class MegaSchedule:
    """Choices of one call that change its time but not its result. Ranks may differ.

    Attributes:
        send_sms: SMs that send rows to the experts, an even number up to 32, while GEMM1 runs on the others.
        gemm2_sms: SMs that GEMM1 leaves to GEMM2, an even number up to 64. GEMM1 keeps at least half of the SMs. GEMM2
            begins there as soon as nothing else uses them, and sends first results home while GEMM1 runs.

    Raises:
        InvalidArgument: a number is not as above.
    """

    send_sms: int = MOST_SEND_SMS
    gemm2_sms: int = 0

    def __post_init__(self) -> None:
        if not _is_integer(self.send_sms) or self.send_sms not in range(2, MOST_SEND_SMS + 1, 2):
            raise InvalidArgument(f"send_sms is {self.send_sms!r}, expected an even number up to {MOST_SEND_SMS}")
        if not _is_integer(self.gemm2_sms) or self.gemm2_sms not in range(0, MOST_GEMM2_SMS + 1, 2):
            raise InvalidArgument(f"gemm2_sms is {self.gemm2_sms!r}, expected an even number up to {MOST_GEMM2_SMS}")


def _is_integer(value: object) -> bool:
    """False for 2.0 and False, which equal integers."""
    return isinstance(value, int) and not isinstance(value, bool)


SCHEDULES: tuple[tuple[int, int, MegaSchedule], ...] = (
    (513, 3, MegaSchedule(send_sms=16, gemm2_sms=32)),
    (129, 1, MegaSchedule(send_sms=16)),
    (0, 1, MegaSchedule(send_sms=32)),
)
"""(fewest tokens of this rank, fewest ranks, schedule). The first that fits is taken. Measured, see the notebook.

From three ranks on, GEMM2 of many tokens would wait for links if all its rows went home behind GEMM1.
"""


def schedule_for(num_tokens: int, num_ranks: int) -> MegaSchedule:
    """Return the schedule for a number of tokens of this rank, and a number of ranks."""
    return next(schedule for tokens, ranks, schedule in SCHEDULES if num_tokens >= tokens and num_ranks >= ranks)
