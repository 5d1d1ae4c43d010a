"""Speed and bits of messages: of every link, then of all rails and all nodes at once; constants of the cost model.

A link is two ranks of a rail on different nodes, or two of a node. Messages go over torch.distributed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise, zip_longest
from statistics import median, median_low
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tokenloom.bench.network.findings import Finding
from tokenloom.errors import PeerTimeout
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.topology import Topology
from tokenloom.tune.network.constants import FITTED, Constants, Regime

POLL_S = 50e-6
Message = tuple[torch.Tensor, int]
"""A tensor, and the rank that it goes to or comes from."""
BETWEEN, INSIDE = "between nodes", "inside nodes"
PING_BYTES = 8
PINGS = 40
WARM_UP_PINGS = 5
LINK_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
LARGE_MESSAGES = 3
"""Messages of LINK_BYTES one behind the other, with one answer to all of them, after one that warms up."""
LINK_TURNS = 3
MORE_TURNS = 8
"""Further turns of links that look bad, one at a time: something else may have been busy."""
SLOW_SHARE = 0.5
"""A link fails whose bandwidth, in its slower direction, is below this share of the median of its kind."""
LATE_TIMES = 4.0
LATE_US = {"cpu": 5000.0, "cuda": 50.0}
"""A link fails whose ping takes more than LATE_TIMES the median of its kind, and LATE_US more than that. On CPUs a
process that shares its core waits for others, some milliseconds at a time."""

FEW_BYTES = {"cpu": (1 << 12, 1 << 15, 1 << 18), "cuda": (1 << 14, 1 << 17, 1 << 20)}
MANY_BYTES = {"cpu": (1 << 18, 1 << 20, 1 << 22), "cuda": (1 << 22, 1 << 24, 1 << 26)}
"""Bytes that a rank sends, by device. 128 tokens of hidden 7168 are 1 to 2 MB, 4096 tokens 30 to 60."""
BURST = 16
"""Messages of a byte that go to a peer at once, against one, for the time of a message."""
RAIL_TURNS = 3
ONE_AFTER_THE_OTHER = {"cpu": 4, "cuda": 10}
"""Exchanges in a turn: each rank's next one waits for its peers, so they need no barrier, which would cost time."""
NOISE = 0.01
"""Share of the longest time that says nothing: a line that grows by no more does not tell a rate."""


class Wire:
    """The messages of one rank. Over gloo the host waits for each of them, over NCCL the stream does."""

    def __init__(self, ranks: RankGroup) -> None:
        self.ranks = ranks
        self.device = ranks.device
        self._on_stream = ranks.device.type == "cuda"
        self._peers: set[int] = set()

    def transfer(self, sends: Sequence[Message], receives: Sequence[Message], phase: str) -> None:
        """Send and receive all of these together.

        Args:
            phase: what is going on, for errors.

        Raises:
            PeerTimeout: a message was not sent or did not come in time; names the ranks at their other ends.
        """
        group = self.ranks.process_group
        assert group is not None
        peers = {rank for _, rank in (*sends, *receives)}
        operations = [(dist.isend, each) for each in sends] + [(dist.irecv, each) for each in receives]
        asked: list[Any] = [
            dist.P2POp(start, tensor, dist.get_global_rank(group, rank), group) for start, (tensor, rank) in operations
        ]
        deadline = time.monotonic() + self.ranks.timeout_s
        try:
            for work in dist.batch_isend_irecv(asked):
                if self._on_stream:
                    work.wait()  # the stream waits, not the host
                else:
                    work.wait(timedelta(seconds=max(0.01, deadline - time.monotonic())))
        except RuntimeError as error:
            raise self._lost(peers, phase, str(error).splitlines()[0]) from error
        self._peers |= peers

    def finish(self, phase: str) -> None:
        """Wait on the host until all transfers are done.

        Raises:
            PeerTimeout: they were not in time.
        """
        peers, self._peers = self._peers, set()
        if not self._on_stream:
            return
        done, deadline = self.mark(), time.monotonic() + self.ranks.timeout_s
        try:
            while not done.query():
                if time.monotonic() > deadline:
                    raise self._lost(peers, phase, f"no answer within {self.ranks.timeout_s:g} s")
                time.sleep(POLL_S)
        except RuntimeError as error:  # of CUDA or NCCL
            raise self._lost(peers, phase, str(error).splitlines()[0]) from error

    def mark(self) -> Any:
        """A point in time: on a GPU an event on the stream, else seconds."""
        if not self._on_stream:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def us_between(self, first: Any, last: Any) -> float:
        """Microseconds between two marks, both of which are over (see :meth:`finish`)."""
        return float(first.elapsed_time(last) * 1e3 if self._on_stream else (last - first) * 1e6)

    def bytes_of(self, size: int) -> torch.Tensor:
        """uint8 [size] of zeros, on the device."""
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def _lost(self, peers: set[int], phase: str, cause: str) -> PeerTimeout:
        """Tell the ranks that wait elsewhere; the error to raise."""
        timeout = PeerTimeout(self.ranks.rank, sorted(peers), phase, self.ranks.step, cause)
        with suppress(RuntimeError):  # the store may be gone with the rank that hosts it
            self.ranks.mark_broken(timeout)
        return timeout


def pattern(sender: int, receiver: int, turn: int, size: int, device: torch.device) -> torch.Tensor:
    """uint8 [size]: bytes that differ by place, and by who sends to whom in which turn. Both ends know them."""
    start = (sender * 2654435761 + receiver * 40503 + turn * 97) % 2**31
    numbers = torch.arange(-(-size // 4), dtype=torch.int64, device=device)
    words = ((numbers + start) * 2654435761 % 2**32 - 2**31).to(torch.int32)
    return words.view(torch.uint8)[:size].contiguous()


def wrong_bytes(came: torch.Tensor, sender: int, receiver: int, turn: int) -> str:
    """The fault of a message, "" if it has none."""
    wrong = int((came != pattern(sender, receiver, turn, len(came), came.device)).sum())
    return f"{wrong:,} of {len(came):,} bytes from rank {sender} came wrong to rank {receiver}" if wrong else ""


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
    """Result of one end of a link in one turn.

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


def teams_of(topology: Topology, kind: str) -> list[tuple[int, ...]]:
    """The ranks of each rail, or of each node."""
    if kind == INSIDE:
        return list(topology.nodes)
    return [tuple(rank for rank in rail if rank is not None) for rail in zip_longest(*topology.nodes)]


def rounds_of(topology: Topology) -> list[list[Link]]:
    """All links, in rounds of disjoint ones that are measured at the same time.

    In a round between nodes only one rail is busy, with at most one link on each node. Inside nodes, at most one link
    of each rank.
    """
    nodes, rounds = topology.nodes, []
    for rail in teams_of(topology, BETWEEN):
        for pairs in matchings(len(rail)):
            rounds.append([Link(BETWEEN, *sorted((rail[a], rail[b]))) for a, b in pairs])
    for pairs in matchings(max(map(len, nodes))):
        inside = [Link(INSIDE, ranks[a], ranks[b]) for ranks in nodes for a, b in pairs if b < len(ranks)]
        rounds.append(inside)
    return [each for each in rounds if each]


class Meter:
    """Measures links on one rank.

    Args:
        wire: carries the messages.
        large_bytes: size of a large message; None: LINK_BYTES of the device.
    """

    def __init__(self, wire: Wire, large_bytes: int | None = None) -> None:
        self._wire = wire
        self._bytes = large_bytes or LINK_BYTES[wire.device.type]
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
        fault = wrong_bytes(self._in, peer, me, turn)
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
    """Result of all turns of one link.

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
    """The fault of each link, "" if it has none. Links are compared with those of their kind alone."""
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


@dataclass(frozen=True)
class AllToAllTimes:
    """All-to-alls of one size on all ranks.

    Attributes:
        times_us: microseconds of one all-to-all [rank][turn]; empty for ranks without a peer.
        faults: of each rank, what is wrong with the bits that came.
    """

    num_bytes: int
    times_us: list[list[float]]
    faults: list[str]

    def us(self) -> float:
        """Of the slowest rank, in the median turn."""
        return median(max(turn) for turn in zip(*filter(None, self.times_us), strict=True))

    def best_gbytes_per_s(self, ranks: Sequence[int]) -> float:
        """Rate that each of these ranks reaches, in the best turn."""
        us = min(max(turn) for turn in zip(*(self.times_us[rank] for rank in ranks), strict=True))
        return self.num_bytes / us / 1e3


def run_exchange(wire: Wire, topology: Topology, kind: str, num_bytes: int, messages: int = 1) -> AllToAllTimes:
    """AllToAllTimes on all ranks at once. Collective.

    Args:
        num_bytes: that a rank sends in all, rounded down to its messages; at least a byte each.
    """
    rank, phase = wire.ranks.rank, f"an all-to-all {kind}"
    team = next(team for team in teams_of(topology, kind) if rank in team)
    peers = [each for each in team if each != rank] * messages
    size = max(1, num_bytes // max(1, len(peers)))
    sends: list[Message] = [(pattern(rank, peer, messages, size, wire.device), peer) for peer in peers]
    receives: list[Message] = [(wire.bytes_of(size), peer) for peer in peers]
    times: list[float] = []
    calls = ONE_AFTER_THE_OTHER[wire.device.type]
    for _ in range(RAIL_TURNS + 1):  # the first connects
        wire.ranks.all_gather_object(None, phase)
        if not peers:
            continue
        first = wire.mark()
        for _ in range(calls):
            wire.transfer(sends, receives, phase)
        last = wire.mark()
        wire.finish(phase)
        times.append(wire.us_between(first, last) / calls)
    fault = next(filter(None, (wrong_bytes(came, peer, rank, messages) for came, peer in receives)), "")
    said = wire.ranks.all_gather_object((times[1:], fault), phase)
    return AllToAllTimes(num_bytes, [each for each, _ in said], [each for _, each in said])


def check_rails(wire: Wire, topology: Topology) -> tuple[list[Finding], Points | None]:
    """All-to-alls of all rails at once, then of all nodes at once, and the points for constants. Collective."""
    device, has_inside = wire.device.type, max(map(len, topology.nodes)) > 1
    large = MANY_BYTES[device]
    inside = [run_exchange(wire, topology, INSIDE, size) for size in large] if has_inside else []
    findings = list(judged(topology.nodes, "node", inside))
    if topology.num_nodes == 1:
        return findings, None
    between = {size: run_exchange(wire, topology, BETWEEN, size) for size in sorted({*FEW_BYTES[device], *large})}
    peers = topology.num_nodes - 1
    one, burst = (run_exchange(wire, topology, BETWEEN, count * peers, count) for count in (1, BURST))
    findings += judged(teams_of(topology, BETWEEN), "rail", [one, burst, *between.values()])
    points = Points(
        small=[(size, between[size].us()) for size in FEW_BYTES[device]],
        large=[(size, between[size].us()) for size in large],
        inside=[(each.num_bytes, each.us()) for each in inside],
        one_us=one.us(),
        burst_us=burst.us(),
        burst=BURST,
        peers=peers,
    )
    return findings, points


def judged(teams: Sequence[Sequence[int]], name: str, found: Sequence[AllToAllTimes]) -> Iterator[Finding]:
    """A finding for each rail or node: the bits of all sizes, and the rate of the largest."""
    if not found:
        return
    rates = {number: found[-1].best_gbytes_per_s(team) for number, team in enumerate(teams) if len(team) > 1}
    usual = median(rates.values())
    for number in rates:
        team = teams[number]
        wrong = next((each.faults[rank] for each in found for rank in team if each.faults[rank]), "")
        slow = f"{rates[number]:.3g} GB/s, while the median {name} has {usual:.3g}"
        fault = wrong or (slow if rates[number] < SLOW_SHARE * usual else "")
        listed = f"{name} {number}, ranks {', '.join(map(str, team))}"
        yield Finding(
            "rails",
            f"all {name}s at once",
            listed,
            not fault,
            fault or f"{rates[number]:.3g} GB/s each way",
            {"gbytes_per_s": rates[number]},
        )


@dataclass(frozen=True)
class Points:
    """Measurements: microseconds of an all-to-all by the bytes that each rank sends, with all rails busy.

    Attributes:
        small, large: between nodes, in ascending order: for the regimes of few and of many tokens.
        inside: inside nodes; empty where nodes have one rank.
        one_us, burst_us: one message to each peer, and ``burst`` of them at once, of a byte each.
        peers: of a rank between nodes.
    """

    small: Sequence[tuple[int, float]]
    large: Sequence[tuple[int, float]]
    inside: Sequence[tuple[int, float]]
    one_us: float
    burst_us: float
    burst: int
    peers: int


def fit_line(points: Sequence[tuple[int, float]], rate: float | None = None) -> tuple[float, float]:
    """Fit ``time = base + bytes / rate`` to points.

    Errors count by their share of the time, so that short times count as much as long ones. A line that starts below 0
    is replaced by one through 0. So is one that hardly grows: its slope is noise.

    Args:
        points: bytes and microseconds; at least two, of different sizes.
        rate: most GB/s, which hold where times grow more slowly with bytes, or not at all; None: no limit is known.

    Returns:
        base, microseconds; rate, GB/s.
    """
    num_bytes, times_us = (np.array(each, dtype=float) for each in zip(*points, strict=True))
    slope, base_us = np.polyfit(num_bytes, times_us, 1, w=1 / times_us)
    if rate is not None and slope <= 1 / (rate * 1e3):
        return max(0.0, float(np.mean(times_us - num_bytes / rate / 1e3))), rate
    if slope * num_bytes.max() <= NOISE * times_us.max() or base_us < 0:
        base_us, slope = 0.0, float(np.average(times_us / num_bytes, weights=num_bytes))
    return float(base_us), float(1 / slope / 1e3)


def fit_constants(points: Points, where: str) -> Constants:
    """Make the constants of a cluster.

    ``exposed_share`` says how well a transport overlaps the NIC with NVLink, which messages of their own cannot tell;
    it stays as fitted to published figures. So does the rate of NVLink where nodes have one rank.
    """
    kept = ["exposed_share"]
    put_us = max(0.0, (points.burst_us - points.one_us) / ((points.burst - 1) * points.peers))
    large = fit_line(points.large)
    lines = {"low_latency": fit_line(points.small, rate=large[1]), "high_throughput": large}
    regimes = {
        name: Regime(_short(base_us), _short(rate), FITTED.regime(name).exposed_share, _short(put_us))
        for name, (base_us, rate) in lines.items()
    }
    nvlink = FITTED.nvlink_gbytes_per_s
    if points.inside:
        nvlink = _short(fit_line(points.inside)[1])
    else:
        kept.append("nvlink_gbytes_per_s")
    return Constants(f"{where}; {', '.join(kept)} as in published figures", nvlink, **regimes)


def _short(value: float) -> float:
    """Four digits: more were not measured."""
    return float(f"{value:.4g}")
