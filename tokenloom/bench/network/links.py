"""Pings and large messages over every link: two ranks of a rail on different nodes, or two ranks of a node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from statistics import median

import torch

from tokenloom.bench.network.wire import Wire, pattern
from tokenloom.runtime.topology import Topology

BETWEEN, INSIDE = "between nodes", "inside nodes"
PING_BYTES = 8
PINGS = 40
WARM_UP_PINGS = 5
LARGE_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
LARGE_MESSAGES = 3
"""Messages of LARGE_BYTES one behind the other, with one answer to all of them, after one that warms up."""


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
        """Measure round by round; samples by link and rank, the same on all ranks. Collective.

        Args:
            turn: number of the turn, which the messages hold.
        """
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
