"""Every link, two ranks of a rail on different nodes or two of a node: pings, large messages, and outliers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from statistics import median, median_low

import torch

from tokenloom.bench.network.findings import Finding
from tokenloom.bench.network.wire import Wire, pattern
from tokenloom.runtime.topology import Topology

BETWEEN, INSIDE = "between nodes", "inside nodes"
PING_BYTES = 8
PINGS = 40
WARM_UP_PINGS = 5
LARGE_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
LARGE_MESSAGES = 3
"""Messages of LARGE_BYTES one behind the other, with one answer to all of them, after one that warms up."""
LINK_TURNS = 3
MORE_TURNS = 8
"""Further turns of links that look bad, one at a time: something else may have been busy."""
SLOW_SHARE = 0.5
"""A link fails whose bandwidth, in its slower direction, is below this share of the median of its kind."""
LATE_TIMES = 4.0
LATE_US = {"cpu": 5000.0, "cuda": 50.0}
"""A link fails whose ping takes more than LATE_TIMES the median of its kind, and LATE_US more than that. On CPUs a
process that shares its core waits for others, some milliseconds at a time."""


@dataclass(frozen=True, order=True)
class Link:
    """Two ranks that exchange rows.

    Attributes:
        kind: BETWEEN or INSIDE.
        low, high: the ranks, in ascending order.
    """

    kind: str
    low: int
    high: int

    def name(self, topology: Topology) -> str:
        """Both ends, for people."""
        ends = (f"node {topology.node_of[rank]} rank {rank}" for rank in (self.low, self.high))
        return " <-> ".join(ends)


@dataclass(frozen=True)
class Sample:
    """What one end saw of a link in one turn.

    Attributes:
        ping_us: median round trip of 8 bytes; None on the higher rank, which answers.
        gbytes_per_s: rate of what this end sent.
        fault: what is wrong with the bits that came, "" if nothing is.
    """

    ping_us: float | None
    gbytes_per_s: float
    fault: str = ""


def matchings(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of ``count`` things, in rounds whose pairs are disjoint, as in a tournament."""
    seats = [*range(count), *([-1] if count % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def rounds_of(topology: Topology) -> list[list[Link]]:
    """All links, in rounds of disjoint ones that are measured at the same time.

    In a round between nodes only one rail is busy, with at most one link on each node. Inside nodes, at most one link
    of each rank.
    """
    nodes = topology.nodes
    rounds = []
    for rail in zip_longest(*nodes):
        members = [rank for rank in rail if rank is not None]
        for pairs in matchings(len(members)):
            rounds.append([Link(BETWEEN, *sorted((members[a], members[b]))) for a, b in pairs])
    for pairs in matchings(max(map(len, nodes))):
        inside = [Link(INSIDE, ranks[a], ranks[b]) for ranks in nodes for a, b in pairs if b < len(ranks)]
        rounds.append(inside)
    return [each for each in rounds if each]


class Meter:
    """Measures links on one rank.

    Args:
        wire: carries the messages.
        large_bytes: size of a large message; None: LARGE_BYTES of the device.
    """

    def __init__(self, wire: Wire, large_bytes: int | None = None) -> None:
        self._wire = wire
        self._bytes = large_bytes or LARGE_BYTES[wire.device.type]
        self._in = wire.bytes_of(self._bytes)
        self._small = wire.bytes_of(PING_BYTES), wire.bytes_of(PING_BYTES)

    def rounds(self, rounds: Sequence[Sequence[Link]], turn: int) -> Iterator[dict[tuple[Link, int], Sample]]:
        """Measure round by round; samples by link and rank, the same on all ranks. Collective."""
        ranks = self._wire.ranks
        for links in rounds:
            mine = [link for link in links if ranks.rank in (link.low, link.high)]
            found = {(link, ranks.rank): self._measure(link, turn) for link in mine}
            everybody: dict[tuple[Link, int], Sample] = {}
            for each in ranks.all_gather_object(found, "links"):
                everybody |= each
            yield everybody

    def _measure(self, link: Link, turn: int) -> Sample:
        me = self._wire.ranks.rank
        peer = link.low + link.high - me
        starts = me == link.low
        ping_us = self._ping(peer, starts, link.kind)
        out = pattern(me, peer, turn, self._bytes, self._wire.device)
        self._in.zero_()
        rates = [self._stream(peer, each, out, link.kind) for each in (starts, not starts)]
        wrong = int((self._in != pattern(peer, me, turn, self._bytes, self._wire.device)).sum())
        fault = f"{wrong:,} of {self._bytes:,} bytes from rank {peer} came wrong to rank {me}" if wrong else ""
        return Sample(ping_us, rates[0 if starts else 1], fault)

    def _ping(self, peer: int, starts: bool, kind: str) -> float | None:
        wire, (out, back), phase = self._wire, self._small, f"a ping {kind}"
        marks = [wire.mark()]
        for _ in range(WARM_UP_PINGS + PINGS):
            for sends in (starts, not starts):
                wire.transfer([(out, peer)] if sends else [], [] if sends else [(back, peer)], phase)
            marks.append(wire.mark())
        wire.finish(phase)
        times = [wire.us_between(a, b) for a, b in pairwise(marks)]
        return median(times[WARM_UP_PINGS:]) if starts else None

    def _stream(self, peer: int, sends: bool, out: torch.Tensor, kind: str) -> float:
        """Send large messages and await an answer, or receive and answer; GB/s."""
        wire, (small, answer), phase = self._wire, self._small, f"a large message {kind}"
        first = last = wire.mark()
        for messages in (1, LARGE_MESSAGES):
            first = wire.mark()
            for _ in range(messages):
                wire.transfer([(out, peer)] if sends else [], [] if sends else [(self._in, peer)], phase)
            wire.transfer([] if sends else [(small, peer)], [(answer, peer)] if sends else [], phase)
            last = wire.mark()
        wire.finish(phase)
        return LARGE_MESSAGES * self._bytes / wire.us_between(first, last) / 1e3


@dataclass(frozen=True)
class Speed:
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


def sum_up(turns: Sequence[Mapping[tuple[Link, int], Sample]]) -> list[Speed]:
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
            Speed(
                link,
                min((each.ping_us for each in low if each.ping_us is not None), default=float("inf")),
                max((each.gbytes_per_s for each in low), default=0.0),
                max((each.gbytes_per_s for each in high), default=0.0),
                fault,
            )
        )
    return found


def verdicts(links: Sequence[Speed], device: str) -> dict[Link, str]:
    """What is wrong with each link, "" if nothing is. Links are compared with those of their kind alone."""
    found = {}
    for each in links:
        alike = [other for other in links if other.link.kind == each.link.kind]
        found[each.link] = _verdict(each, alike, LATE_US[device])
    return found


def _verdict(link: Speed, alike: Sequence[Speed], late_us: float) -> str:
    usual_rate = median(each.slower_gbytes_per_s for each in alike)
    usual_us = median_low(each.ping_us for each in alike)  # of two links, the better one
    if link.fault:
        return link.fault
    if link.slower_gbytes_per_s < SLOW_SHARE * usual_rate:
        return f"{link.slower_gbytes_per_s:.3g} GB/s, while the median link {link.link.kind} has {usual_rate:.3g}"
    if link.ping_us > max(LATE_TIMES * usual_us, usual_us + late_us):
        return f"a ping takes {link.ping_us:,.0f} µs, while the median {link.link.kind} is {usual_us:,.0f}"
    return ""


def check_links(wire: Wire, topology: Topology, large_bytes: int | None) -> list[Finding]:
    """Every link, in turns, and links that look bad again. Collective."""
    meter, rounds, device = Meter(wire, large_bytes), rounds_of(topology), wire.device.type
    turns: list[dict[tuple[Link, int], Sample]] = []
    for turn in range(LINK_TURNS):
        turns.append({key: sample for found in meter.rounds(rounds, turn) for key, sample in found.items()})
    for turn in range(LINK_TURNS, LINK_TURNS + MORE_TURNS):
        bad = [[link] for link, fault in verdicts(sum_up(turns), device).items() if fault]
        turns.append({key: sample for found in meter.rounds(bad, turn) for key, sample in found.items()})
    measured = sum_up(turns)
    faults = verdicts(measured, device)
    return [
        Finding(
            "links",
            each.link.kind,
            each.link.name(topology),
            not faults[each.link],
            faults[each.link],
            {
                "ping_us": each.ping_us,
                "there_gbytes_per_s": each.there_gbytes_per_s,
                "back_gbytes_per_s": each.back_gbytes_per_s,
            },
        )
        for each in measured
    ]
