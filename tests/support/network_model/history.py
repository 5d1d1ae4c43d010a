"""One history of a run: which rank goes on, and which word lands, as a seed decides."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.network_model.calls import Call, Shape, Step
from tests.support.network_model.fabric import Died, Fabric, Violation, Wait
from tests.support.network_model.rank import Rank


@dataclass(frozen=True)
class Report:
    """A wait that has expired: who waited, for what, and what it saw instead."""

    rank: int
    wait: Wait
    seen: int


@dataclass
class Outcome:
    """What became of a run.

    Attributes:
        results: by rank, then by number of the call.
        reports: waits that expired, by rank.
        most_puts: that any context had under way for one peer.
        actions: of each rank.
        words: that landed.
    """

    results: list[dict[int, Any]]
    reports: dict[int, Report]
    most_puts: int
    actions: list[int]
    words: int


def run(
    shape: Shape,
    steps: Sequence[Step],
    seed: int,
    protocol: type[Rank] = Rank,
    dies: tuple[int, int] | None = None,
) -> Outcome:
    """Let all ranks make all calls.

    A deadline passes where nothing else can happen any more, of one waiting rank after the other.

    Args:
        shape: sizes of the group.
        steps: calls, or their halves, as every rank makes them.
        seed: of what happens when.
        protocol: what ranks do.
        dies: a rank, and after how many actions it ends. Some of what it sent before may be lost.

    Raises:
        Violation: a rule is broken, results are wrong, or nobody died and ranks wait for each other.
    """
    chance = random.Random(seed).random
    fabric = Fabric(shape, dies)
    ranks = [protocol(fabric, rank) for rank in range(shape.num_ranks)]
    runs = [rank.run(steps) for rank in ranks]
    ready = list(range(shape.num_ranks))
    waits: list[Wait | None] = [None] * shape.num_ranks  # of those that are ready too: they acquire when they go on
    parked: set[int] = set()
    reports: dict[int, Report] = {}
    values, words = fabric.values, 0
    while True:
        flying = fabric.flying
        choices = len(ready) + len(flying)
        if not choices:
            if not parked:
                break
            late = sorted(parked)[int(chance() * len(parked))]
            parked.remove(late)
            expired = waits[late]
            assert expired is not None
            reports[late] = Report(late, expired, values[late][expired.word])
            runs[late].close()
            if dies is None or not expired.limited:
                raise Violation(f"rank {late} waits for ever: {expired}, seen {reports[late].seen}")
            continue
        pick = int(chance() * choices)
        if pick >= len(ready):
            to, word = fabric.land(pick - len(ready))
            words += 1
            wait = waits[to]
            if to in parked and wait is not None and wait.word == word and values[to][word] >= wait.wanted:
                parked.remove(to)
                ready.append(to)
            continue
        ready[pick], ready[-1] = ready[-1], ready[pick]
        rank = ready.pop()
        wait = waits[rank]
        if wait is not None:
            fabric.acquire(rank, wait.word)
        try:
            wait = waits[rank] = next(runs[rank], None)
        except Died:
            fabric.lose(rank, chance)
            continue
        if wait is None:
            continue
        if values[rank][wait.word] >= wait.wanted:
            ready.append(rank)
        else:
            parked.add(rank)
    for rank in ranks:
        check_results(shape, rank, [call for _, call in steps])
    return Outcome([rank.results for rank in ranks], reports, fabric.most_puts, fabric.actions, words)


def check_results(shape: Shape, rank: Rank, calls: Sequence[Call]) -> None:
    """Whatever a rank has received is what the routing says."""
    for call in calls:
        if call.number not in rank.results:
            continue
        found, wanted = rank.results[call.number], call.wanted(shape, rank.rank)
        if found != wanted:
            raise Violation(f"rank {rank.rank} finds {found} in call {call.number}, expected {wanted}")


def culprits(outcome: Outcome) -> set[int]:
    """Whom reports lead to: each names the rank that should have written, whose own report names the next."""
    found = set()
    for report in outcome.reports.values():
        peer, followed = report.wait.peer, {report.rank}
        while peer in outcome.reports and peer not in followed:
            followed.add(peer)
            peer = outcome.reports[peer].wait.peer
        found.add(peer)
    return found
