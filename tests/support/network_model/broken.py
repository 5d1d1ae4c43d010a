"""Protocols that break one rule each. Every one has to be caught, or the model could not show the rule to be kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.network_model.calls import COMBINE, DISPATCH, RECEIVE, Call
from tests.support.network_model.fabric import CONTEXTS, Area, Wait
from tests.support.network_model.rank import HEADER, Rank, Waits


class SignalsOnAnotherContext(Rank):
    """The payload goes on one context, its signal behind it on the next."""

    def put_chunk(self, peer: int, packed: Area, target: Area, indices: list[int], call: Call) -> None:
        self.fabric.put(self.rank, peer, call.kind, packed, target, indices, call.number)
        context, signal = (call.kind + 1) % CONTEXTS, self.signal(call.kind, self.node)
        self.fabric.put(self.rank, peer, context, packed, target, [], call.number, signal)


class PlainSignals(Rank):
    """The signal is a put of its own, before the payload."""

    def put_chunk(self, peer: int, packed: Area, target: Area, indices: list[int], call: Call) -> None:
        self.fabric.put(self.rank, peer, call.kind, packed, target, [], call.number, self.signal(call.kind, self.node))
        self.fabric.put(self.rank, peer, call.kind, packed, target, indices, call.number)


class FullChunksAlone(Rank):
    """Chunks without rows are not put."""

    def put_chunk(self, peer: int, packed: Area, target: Area, indices: list[int], call: Call) -> None:
        if [each for each in indices if each != HEADER]:
            super().put_chunk(peer, packed, target, indices, call)


class ChunksInAnyOrder(Rank):
    """Whichever block has packed its chunk puts it."""

    def chunks(self) -> list[int]:
        return [*range(self.shape.chunks)][::-1]


class TargetsBeginAnew(Rank):
    """Each call waits for signals as the first one did."""

    def wanted(self, call: Call, chunk: int) -> int:
        return chunk + 1


class FirstChunkIsAll(Rank):
    """A signal is taken for all of a call's chunks."""

    def wanted(self, call: Call, chunk: int) -> int:
        return super().wanted(call, 0)


class CountedWhenReceived(Rank):
    """Signals are counted in the order in which calls are received, but rows are put when they are sent."""

    def counting_half(self) -> int:
        return RECEIVE


class FewerTurns(Rank):
    """Half as many regions as two open calls need, or one for whole calls."""

    def area(self, name: str, call: Call, *part: int) -> Area:
        return (name, call.number % (self.shape.turns // 2), *part)


class OneSource(Rank):
    """Puts of all calls come from the same region."""

    def packed(self, name: str, call: Call, node: int) -> Area:
        return (name, 0, node)


class OneFlagForAllTurns(Rank):
    """Forwarders raise one flag for a source, whichever call was received first."""

    def source_flag(self, call: Call, source: int) -> int:
        return source


class FlagsBeforeRows(Rank):
    """The flags of a source go before the last of what they stand for."""

    def close_source(self, call: Call, source: int, counts: list[int]) -> None:
        for rank in self.neighbours:
            self.fabric.raise_flag(self.rank, rank, self.source_flag(call, source), call.number)
        for rank in self.neighbours:
            self.fabric.store(self.rank, rank, self.area("staging", call, source), HEADER, counts, call.number)


class FlagsOfTheDevice(Rank):
    """Forwarders release at device scope, as a put does: other GPUs learn nothing by the flag."""

    def close_source(self, call: Call, source: int, counts: list[int]) -> None:
        for rank in self.neighbours:
            self.fabric.store(self.rank, rank, self.area("staging", call, source), HEADER, counts, call.number)
            word = self.source_flag(call, source)
            self.fabric.raise_flag(self.rank, rank, word, call.number, ordered=source == self.rank)


class OnlyDebtors(Rank):
    """A combine waits only for neighbours that owe partial sums: a release is missing."""

    def wait_for_partials(self, call: Call) -> Waits:
        owed = {rank for rows in self.forwarded[call.of].values() for _, targets in rows for rank, _ in targets}
        for wait in super().wait_for_partials(call):
            if wait.peer in owed:
                yield wait


class OwnNodeUnrounded(Rank):
    """Partial sums of the own node are added one by one."""

    def node_sums(self, call: Call, node: int) -> list[Any]:
        sums = super().node_sums(call, node)
        return sums if node != self.node else [terms for _, terms in sums]


class RanksAsTheyCome(Rank):
    """A node's partial sums are added from the last rank on."""

    def node_sums(self, call: Call, node: int) -> list[Any]:
        return [(node, tuple(reversed(terms))) for node, terms in super().node_sums(call, node)]


class WithoutDeadlines(Rank):
    """Waits have no limit, as waitSignal and flush have none."""

    waits_have_deadlines = False


class ForwardersWaitForNobody(Rank):
    """A combine sends node sums before its neighbours' partial sums are here."""

    def wait_for_partials(self, call: Call) -> Iterator[Wait]:
        return iter(())


class FaultsWaitForReceivers(Rank):
    """A rank with a fault waits until the others receive the call, which they may do behind one that it has open."""

    def after_fault(self, call: Call, opened: list[Call]) -> Waits:
        yield from self.receive(call, opened)


class FaultsEndAll(Rank):
    """A rank with a fault receives nothing of what it has open."""

    def after_fault(self, call: Call, opened: list[Call]) -> Waits:
        yield from super().after_fault(call, [call])
        opened.clear()


class FaultsWaitForNobody(Rank):
    """A rank with a fault goes on without words from its neighbours."""

    def wait_for_announcements(self, call: Call) -> Waits:
        return iter(())


@dataclass(frozen=True)
class Broken:
    """A broken protocol, and where it shows.

    Attributes:
        protocol: what ranks do.
        says: a pattern of what the run says.
        halves: calls are halves.
        chunks, depth: as in Shape.
        kinds: of the calls.
        dies: a rank dies.
        faults: ranks that cannot make a call, by its number.
    """

    protocol: type[Rank]
    says: str
    halves: bool = False
    chunks: int = 2
    depth: int = 32
    kinds: tuple[int, ...] = (DISPATCH, DISPATCH, COMBINE, DISPATCH, COMBINE, COMBINE)
    dies: bool = False
    faults: Mapping[int, int] = field(default_factory=dict)


BROKEN = (
    Broken(SignalsOnAnotherContext, "reads .'arrived'.* before its signal"),
    Broken(PlainSignals, "reads .'arrived'.* before its signal"),
    Broken(FullChunksAlone, "waits for ever"),
    Broken(ChunksInAnyOrder, "reads .'arrived'.* before its signal"),
    Broken(TargetsBeginAnew, "reads .* before its signal"),
    Broken(FirstChunkIsAll, "reads .* before its signal"),
    Broken(CountedWhenReceived, "before its signal", halves=True, kinds=(DISPATCH,) * 4),
    Broken(CountedWhenReceived, "before its signal", halves=True, kinds=(DISPATCH, DISPATCH, COMBINE, COMBINE) * 2),
    Broken(FewerTurns, "overwrites"),
    Broken(FewerTurns, "overwrites", halves=True),
    Broken(OneSource, "overwrites .'packed'"),
    Broken(
        OneFlagForAllTurns, "reads .'staging'.* before its signal|waits for ever", halves=True, kinds=(DISPATCH,) * 6
    ),
    Broken(FlagsBeforeRows, "reads .'staging'.* before its signal"),
    Broken(FlagsOfTheDevice, "reads .'staging'.* before its signal"),
    Broken(OnlyDebtors, "overwrites"),
    Broken(OwnNodeUnrounded, "finds .* expected"),
    Broken(RanksAsTheyCome, "finds .* expected"),
    Broken(ForwardersWaitForNobody, "reads .'partials'.* before its signal"),
    Broken(ForwardersWaitForNobody, "reads .'partials'.* before its signal", halves=True),
    Broken(Rank, "may block", chunks=4, depth=7),
    Broken(Rank, "may block", halves=True, chunks=4, depth=15, kinds=(DISPATCH,) * 6),
    Broken(WithoutDeadlines, "waits for ever", dies=True),
    Broken(FaultsWaitForReceivers, "waits for ever", halves=True, kinds=(DISPATCH,) * 4, faults={2: 3}),
    Broken(FaultsEndAll, "waits for ever", halves=True, kinds=(DISPATCH,) * 4, faults={2: 3}),
    Broken(FaultsWaitForNobody, "overwrites", kinds=(DISPATCH,) * 6, faults=dict.fromkeys(range(1, 7), 3)),
)
"""All of them. Those of Rank itself are no mistake of ranks, but more chunks than the network's queue has room for."""
