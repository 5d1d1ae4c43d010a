"""Which links and rails are outliers among those of their kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from tokenloom.bench.network.links import Link, Sample

SLOW_SHARE = 0.5
"""A link fails whose bandwidth, in its slower direction, is below this share of the median of its kind."""
LATE_TIMES = 4.0
LATE_US = {"cpu": 5000.0, "cuda": 50.0}
"""A link fails whose ping takes more than LATE_TIMES the median of its kind, and LATE_US more than that. On CPUs a
process that shares its core waits for others, some milliseconds at a time."""


@dataclass(frozen=True)
class Measured:
    """What all turns say of one link.

    Attributes:
        ping_us: shortest of the medians of all turns.
        there_gbytes_per_s, back_gbytes_per_s: best rates, from the lower rank to the higher and back. Whatever else
            is busy makes single turns slow; a bad link is slow in all of them.
        fault: wrong bits in any turn, "" if there were none.
    """

    link: Link
    ping_us: float
    there_gbytes_per_s: float
    back_gbytes_per_s: float
    fault: str

    @property
    def slower_gbytes_per_s(self) -> float:
        """The slower direction."""
        return min(self.there_gbytes_per_s, self.back_gbytes_per_s)


def sum_up(turns: Sequence[Mapping[tuple[Link, int], Sample]]) -> list[Measured]:
    """Make one result of the samples of all turns, for each link.

    A fault of any turn stays, and so does an end that has no sample in a turn where the other has one.
    """
    found = []
    for link in sorted({link for turn in turns for link, _ in turn}):
        low, high = ([turn[link, end] for turn in turns if (link, end) in turn] for end in (link.low, link.high))
        fault = next((each.fault for each in (*low, *high) if each.fault), "")
        silent = [
            end for end, samples in ((link.low, low), (link.high, high)) if len(samples) < max(len(low), len(high))
        ]
        if silent and not fault:
            fault = f"rank {silent[0]} has no result"
        found.append(
            Measured(
                link,
                min((each.ping_us for each in low if each.ping_us is not None), default=float("inf")),
                max((each.gbytes_per_s for each in low), default=0.0),
                max((each.gbytes_per_s for each in high), default=0.0),
                fault,
            )
        )
    return found


def verdicts(links: Sequence[Measured], device: str) -> dict[Link, str]:
    """What is wrong with each link, "" if nothing is. Links are compared with those of their kind alone.

    Args:
        device: "cpu" or "cuda".
    """
    found = {}
    for each in links:
        alike = [other for other in links if other.link.kind == each.link.kind]
        found[each.link] = _verdict(each, alike, LATE_US[device])
    return found


def _verdict(link: Measured, alike: Sequence[Measured], late_us: float) -> str:
    usual_rate = median(each.slower_gbytes_per_s for each in alike)
    usual_us = median_low(each.ping_us for each in alike)  # of two links, the better one
    if link.fault:
        return link.fault
    if link.slower_gbytes_per_s < SLOW_SHARE * usual_rate:
        return f"{link.slower_gbytes_per_s:.3g} GB/s, while the median link {link.link.kind} has {usual_rate:.3g}"
    if link.ping_us > max(LATE_TIMES * usual_us, usual_us + late_us):
        return f"a ping takes {link.ping_us:,.0f} µs, while the median {link.link.kind} is {usual_us:,.0f}"
    return ""


def slow_teams(name: str, gbytes_per_s: Mapping[int, float]) -> dict[int, str]:
    """What is wrong with each rail, or node, by its rate with all of them busy; "" if nothing is."""
    usual = median(gbytes_per_s.values())
    return {
        number: f"{rate:.3g} GB/s, while the median {name} has {usual:.3g}" if rate < SLOW_SHARE * usual else ""
        for number, rate in gbytes_per_s.items()
    }
