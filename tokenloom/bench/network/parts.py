"""The parts of the check that measure: order, links, rails. Each makes its verdicts, the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenloom.bench.network import exchanges, judge
from tokenloom.bench.network.exchanges import BURST, Exchange, run_exchange
from tokenloom.bench.network.findings import Finding, merge
from tokenloom.bench.network.fit import Points
from tokenloom.bench.network.links import BETWEEN, INSIDE, Link, Meter, Sample, rounds_of
from tokenloom.bench.network.order import LONGEST_WAIT_S, Stress
from tokenloom.bench.network.wire import Wire
from tokenloom.bench.tables import counted
from tokenloom.comm.communicator import Communicator
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.topology import Topology

LINK_TURNS = 3
MORE_TURNS = 8
"""Further turns of links that look bad, one at a time: something else may have been busy."""


def check_order(ranks: RankGroup, comm: Communicator, rounds: int, seed: int) -> list[Finding]:
    """The stress of order over one communicator. Collective."""
    seen = Stress(comm, seed).run(rounds)
    what = f"{counted(rounds, 'round')}, waits up to {LONGEST_WAIT_S * 1e3:g} ms, seed {seed}"
    return merge("order", ranks.all_gather_object({(f"{comm.backend}: two calls open at once", what): seen}, "order"))


def check_links(wire: Wire, topology: Topology, large_bytes: int | None) -> list[Finding]:
    """Every link, in turns, and links that look bad again. Collective."""
    meter, rounds, device = Meter(wire, large_bytes), rounds_of(topology), wire.device.type
    turns: list[dict[tuple[Link, int], Sample]] = []
    for turn in range(LINK_TURNS):
        turns.append({key: sample for found in meter.rounds(rounds, turn) for key, sample in found.items()})
    for turn in range(LINK_TURNS, LINK_TURNS + MORE_TURNS):
        bad = [[link] for link, fault in judge.verdicts(judge.sum_up(turns), device).items() if fault]
        turns.append({key: sample for found in meter.rounds(bad, turn) for key, sample in found.items()})
    measured = judge.sum_up(turns)
    faults = judge.verdicts(measured, device)
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


def check_rails(wire: Wire, topology: Topology) -> tuple[list[Finding], Points | None]:
    """All-to-alls of all rails at once, then of all nodes at once, and the points for constants. Collective."""
    device, has_inside = wire.device.type, max(map(len, topology.nodes)) > 1
    large = exchanges.LARGE_BYTES[device]
    inside = [run_exchange(wire, topology, INSIDE, size) for size in large] if has_inside else []
    findings = list(judged(topology.nodes, "node", inside))
    if topology.num_nodes == 1:
        return findings, None
    between = {
        size: run_exchange(wire, topology, BETWEEN, size) for size in sorted({*exchanges.SMALL_BYTES[device], *large})
    }
    peers = topology.num_nodes - 1
    one, burst = (run_exchange(wire, topology, BETWEEN, count * peers, count) for count in (1, BURST))
    longest = max(map(len, topology.nodes))
    rails = [tuple(ranks[place] for ranks in topology.nodes if place < len(ranks)) for place in range(longest)]
    findings += judged(rails, "rail", [one, burst, *between.values()])
    points = Points(
        small=[(size, between[size].us()) for size in exchanges.SMALL_BYTES[device]],
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
    slow = judge.slow_teams(name, rates)
    for number in rates:
        team = teams[number]
        wrong = next((each.faults[rank] for each in found for rank in team if each.faults[rank]), "")
        fault = wrong or slow[number]
        listed = f"{name} {number}, ranks {', '.join(map(str, team))}"
        yield Finding(
            "rails",
            f"all {name}s at once",
            listed,
            not fault,
            fault or f"{rates[number]:.3g} GB/s each way",
            {"gbytes_per_s": rates[number]},
        )
