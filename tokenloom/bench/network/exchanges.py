"""All-to-alls among the ranks of a rail, with all rails busy, or among those of a node, with all nodes busy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tokenloom.bench.network.links import BETWEEN
from tokenloom.bench.network.wire import Message, Wire, pattern
from tokenloom.runtime.topology import Topology

SMALL_BYTES = {"cpu": (1 << 12, 1 << 15, 1 << 18), "cuda": (1 << 14, 1 << 17, 1 << 20)}
LARGE_BYTES = {"cpu": (1 << 18, 1 << 20, 1 << 22), "cuda": (1 << 22, 1 << 24, 1 << 26)}
"""Bytes that a rank sends, by device. 128 tokens of hidden 7168 are 1 to 2 MB, 4096 tokens 30 to 60."""
BURST = 16
"""Messages of a byte that go to a peer at once, against one, for the time of a message."""
TURNS = 3
ONE_AFTER_THE_OTHER = {"cpu": 4, "cuda": 10}
"""Exchanges in a turn: each rank's next one waits for its peers, so they need no barrier, which would cost time."""


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
