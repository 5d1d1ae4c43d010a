"""All-to-alls of all rails at once, then of all nodes at once: bits, slow ones, and constants of the cost model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from tokenloom.bench.network.findings import Finding
from tokenloom.bench.network.links import BETWEEN, INSIDE, SLOW_SHARE
from tokenloom.bench.network.wire import Message, Wire, pattern
from tokenloom.runtime.topology import Topology
from tokenloom.tune.network.constants import FITTED, Constants, Regime

SMALL_BYTES = {"cpu": (1 << 12, 1 << 15, 1 << 18), "cuda": (1 << 14, 1 << 17, 1 << 20)}
LARGE_BYTES = {"cpu": (1 << 18, 1 << 20, 1 << 22), "cuda": (1 << 22, 1 << 24, 1 << 26)}
"""Bytes that a rank sends, by device. 128 tokens of hidden 7168 are 1 to 2 MB, 4096 tokens 30 to 60."""
BURST = 16
"""Messages of a byte that go to a peer at once, against one, for the time of a message."""
TURNS = 3
ONE_AFTER_THE_OTHER = {"cpu": 4, "cuda": 10}
"""Exchanges in a turn: each rank's next one waits for its peers, so they need no barrier, which would cost time."""
NOISE = 0.01
"""Share of the longest time that says nothing: a line that grows by no more does not tell a rate."""


@dataclass(frozen=True)
class Exchange:
    """All-to-alls of one size on all ranks.

    Attributes:
        kind: BETWEEN, among ranks of a rail, or INSIDE, among those of a node.
        num_bytes: that a rank sends in all.
        messages: to each peer.
        times_us: microseconds of one all-to-all [rank][turn]; empty for ranks without a peer.
        faults: of each rank, what is wrong with the bits that came.
    """

    kind: str
    num_bytes: int
    messages: int
    times_us: list[list[float]]
    faults: list[str]

    def us(self) -> float:
        """Of the slowest rank, in the median turn."""
        return median(max(turn) for turn in zip(*filter(None, self.times_us), strict=True))

    def best_gbytes_per_s(self, ranks: Sequence[int]) -> float:
        """What each of these ranks sends at least, in the best turn."""
        return (
            self.num_bytes
            / min(max(turn) for turn in zip(*(self.times_us[rank] for rank in ranks), strict=True))
            / 1e3
        )


def peers_of(topology: Topology, rank: int, kind: str) -> list[int]:
    """The other ranks of its rail or of its node."""
    own = topology.nodes[topology.node_of[rank]]
    if kind != BETWEEN:
        return [each for each in own if each != rank]
    place = own.index(rank)
    return [ranks[place] for ranks in topology.nodes if place < len(ranks) and ranks[place] != rank]


def run_exchange(wire: Wire, topology: Topology, kind: str, num_bytes: int, messages: int = 1) -> Exchange:
    """Exchange on all ranks at once. Collective.

    Args:
        num_bytes: that a rank sends in all, rounded down to its messages; at least a byte each.
    """
    rank, phase = wire.ranks.rank, f"an all-to-all {kind}"
    peers = peers_of(topology, rank, kind) * messages
    size = max(1, num_bytes // max(1, len(peers)))
    sends: list[Message] = [(pattern(rank, peer, messages, size, wire.device), peer) for peer in peers]
    receives: list[Message] = [(wire.bytes_of(size), peer) for peer in peers]
    times: list[float] = []
    calls = ONE_AFTER_THE_OTHER[wire.device.type]
    for _ in range(TURNS + 1):  # the first connects
        wire.ranks.all_gather_object(None, phase)
        if not peers:
            continue
        first = wire.mark()
        for _ in range(calls):
            wire.transfer(sends, receives, phase)
        last = wire.mark()
        wire.finish(phase)
        times.append(wire.us_between(first, last) / calls)
    fault = ""
    for came, peer in receives:
        wrong = int((came != pattern(peer, rank, messages, size, wire.device)).sum())
        if wrong and not fault:
            fault = f"{wrong:,} of {size:,} bytes from rank {peer} came wrong to rank {rank}"
    said = wire.ranks.all_gather_object((times[1:], fault), phase)
    return Exchange(kind, num_bytes, messages, [each for each, _ in said], [each for _, each in said])


def check_rails(wire: Wire, topology: Topology) -> tuple[list[Finding], Points | None]:
    """All-to-alls of all rails at once, then of all nodes at once, and the points for constants. Collective."""
    device, has_inside = wire.device.type, max(map(len, topology.nodes)) > 1
    large = LARGE_BYTES[device]
    inside = [run_exchange(wire, topology, INSIDE, size) for size in large] if has_inside else []
    findings = list(judged(topology.nodes, "node", inside))
    if topology.num_nodes == 1:
        return findings, None
    between = {size: run_exchange(wire, topology, BETWEEN, size) for size in sorted({*SMALL_BYTES[device], *large})}
    peers = topology.num_nodes - 1
    one, burst = (run_exchange(wire, topology, BETWEEN, count * peers, count) for count in (1, BURST))
    longest = max(map(len, topology.nodes))
    rails = [tuple(ranks[place] for ranks in topology.nodes if place < len(ranks)) for place in range(longest)]
    findings += judged(rails, "rail", [one, burst, *between.values()])
    points = Points(
        small=[(size, between[size].us()) for size in SMALL_BYTES[device]],
        large=[(size, between[size].us()) for size in large],
        inside=[(each.num_bytes, each.us()) for each in inside],
        one_us=one.us(),
        burst_us=burst.us(),
        burst=BURST,
        peers=peers,
    )
    return findings, points


def judged(teams: Sequence[Sequence[int]], name: str, found: Sequence[Exchange]) -> Iterator[Finding]:
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
    """What was measured: microseconds of an all-to-all by the bytes that each rank sends, with all rails busy.

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
