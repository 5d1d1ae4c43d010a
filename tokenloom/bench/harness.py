"""The harness of all benches: contestants take turns, and samples of all ranks become percentiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ROUNDS = 3
"""Turns of everybody measured, so that a drifting clock hits all of them alike."""
START_LIMIT_S, SAMPLE_LIMIT_S = 500.0, 5.0
"""Longest times to make what is measured, and for one sample of everybody."""

Sample = dict[str, float]
"""Microseconds by what was timed."""


@dataclass(frozen=True)
class Measured:
    """Samples of a contestant on one rank.

    Attributes:
        samples: microseconds by what was timed, one value for each sample, which all ranks take together.
        why_not: why something was not timed; empty where nothing is missing.
        difference: distance of its output from ours, where a bench compares them.
    """

    samples: dict[str, list[float]] = field(default_factory=dict)
    why_not: str = ""
    difference: float | None = None


@dataclass(frozen=True)
class Contestant:
    """Somebody who is measured on one rank.

    Attributes:
        sample: takes one sample. Collective.
        measured: filled as samples are taken. Contestants that are timed in several ways share one.
        check: raises what samples have left behind: a CUDA graph cannot raise by itself.
    """

    sample: Callable[[], Sample]
    measured: Measured = field(default_factory=Measured)
    check: Callable[[], None] = lambda: None

    def take(self, count: int) -> None:
        """Take samples that count."""
        for _ in range(count):
            for what, us in self.sample().items():
                self.measured.samples.setdefault(what, []).append(us)


def take_turns(
    contestants: Mapping[Any, Contestant],
    iterations: int,
    warm_ups: int = 1,
    first_warm_ups: int | None = None,
    say: Callable[[str], None] = lambda what: None,
) -> None:
    """Fill everybody's samples in ROUNDS rounds, so that a drifting clock hits all alike. Collective.

    Every second round goes the other way round: who comes behind calls that draw much power has lower clocks.

    Args:
        warm_ups: samples at the beginning of each turn that do not count, because caches are left as somebody else
            used them, and so is code on the host.
        first_warm_ups: as many in the first round; None: no more than in the others.
        say: called with what begins.
    """
    for number, count in enumerate(shares(iterations)):
        for who in reversed(contestants) if number % 2 else contestants:
            say(f"round {number + 1} of {ROUNDS}: {who}")
            each = contestants[who]
            for _ in range(warm_ups if number or first_warm_ups is None else first_warm_ups):
                each.sample()
            each.take(count)
            each.check()


def shares(iterations: int) -> list[int]:
    """Samples to take in each of the ROUNDS turns."""
    return [iterations * (number + 1) // ROUNDS - iterations * number // ROUNDS for number in range(ROUNDS)]


def limit_s(iterations: int) -> float:
    """Longest time, in seconds, for so many samples of everybody who is measured together, and what goes before."""
    return START_LIMIT_S + SAMPLE_LIMIT_S * iterations


def of_the_slowest(times_us: Sequence[Sequence[float]]) -> tuple[float, float, int]:
    """Percentiles of the slowest rank.

    Args:
        times_us: samples [W][iterations]; all ranks take each sample together.

    Returns:
        p50 and p99 over the slowest rank of each sample, as measured values without interpolation, and the rank that
        was slowest most often.
    """
    times = np.asarray(times_us)
    p50, p99 = np.percentile(times.max(0), [50, 99], method="inverted_cdf").tolist()
    return p50, p99, Counter(times.argmax(0).tolist()).most_common(1)[0][0]


def percentiles(by_rank: Sequence[Measured]) -> dict[str, tuple[float, float, int]]:
    """Percentiles of the slowest rank, by what was timed."""
    return {what: of_the_slowest([each.samples[what] for each in by_rank]) for what in by_rank[0].samples}
