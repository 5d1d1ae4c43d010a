"""One rank of the protocol. Its methods are the roles of the kernels, and what broken.py changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tests.support.network_model.calls import COMBINE, DISPATCH, RECEIVE, SEND, Call, Row, Step
from tests.support.network_model.fabric import Area, Fabric, Wait

HEADER = -1
"""Index of what lies before a node's rows: the counts of their source."""
Waits = Iterator[Wait]


class Rank:
    """A rank: it sends its own tokens, forwards those of its rail, and takes what is for it.

    Args:
        fabric: shared by all ranks.
        rank: its number.

    Attributes:
        results: what each call has given, by its number.
    """

    waits_have_deadlines = True

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self.fabric, self.shape, self.rank = fabric, fabric.shape, rank
        size = self.shape.ranks_per_node
        self.node, self.rail = divmod(rank, size)
        self.neighbours = range(self.node * size, (self.node + 1) * size)
        self.others = [(self.node + step) % self.shape.nodes for step in range(1, self.shape.nodes)]
        self.sent = [0, 0]  # calls of each kind; in device memory
        self.before: dict[int, int] = {}  # calls of its kind that were sent before an open one
        self.forwarded: dict[int, dict[int, list[Row]]] = {}  # of each dispatch, by node
        self.received: dict[int, list[list[tuple[int, Any]]]] = {}
        self.results: dict[int, Any] = {}

    def run(self, steps: Sequence[Step]) -> Waits:
        """All calls."""
        opened: list[Call] = []
        for part, call in steps:
            if part == self.counting_half():
                self.before[call.number] = self.sent[call.kind]
                self.sent[call.kind] += 1
            if part == SEND:
                yield from (self.send_dispatch if call.kind == DISPATCH else self.send_combine)(call)
                opened.append(call)
            if part == SEND and self.rank == call.faulty:
                yield from self.after_fault(call, opened)
            elif part == RECEIVE and call in opened:
                yield from self.receive(call, opened)

    def receive(self, call: Call, opened: list[Call]) -> Waits:
        """The receiving half of a call that is open."""
        yield from (self.receive_dispatch if call.kind == DISPATCH else self.receive_combine)(call)
        self.fabric.complete(self.rank, call.number)
        opened.remove(call)

    def after_fault(self, call: Call, opened: list[Call]) -> Waits:
        """What a rank does with a call that it cannot make: it waits for no receiving half.

        Then it receives what it has open, since its user may not do so any more.
        """
        if call.kind == COMBINE:
            yield from self.receive(call, opened)
        else:
            for node in self.others:
                yield from self.forward(call, node)
            yield from self.wait_for_announcements(call)
            self.fabric.complete(self.rank, call.number)
            opened.remove(call)
        for each in list(opened):
            yield from self.receive(each, opened)

    def wait_for_announcements(self, call: Call) -> Waits:
        """All neighbours have sent their part of a dispatch."""
        for rank in self.neighbours:
            if rank != self.rank:
                yield self.wait(self.source_flag(call, rank), call.number, rank, self.node, "rows", call)

    def counting_half(self) -> int:
        """Which half counts signals: the one that puts rows. Halves need not end in the order of calls."""
        return SEND

    # -- words and areas -----------------------------------------------------------------------------------------

    def peer(self, node: int) -> int:
        """The rank of a node on this rail."""
        return node * self.shape.ranks_per_node + self.rail

    def source_flag(self, call: Call, source: int) -> int:
        """The word that says: rows from a source are here. One for each turn, since forwarders raise them in the order
        in which calls are received.
        """
        return call.number % self.shape.turns * self.shape.num_ranks + source

    def partials_flag(self, neighbour: int) -> int:
        """The word that says: a neighbour's partial sums are here."""
        return self.shape.turns * self.shape.num_ranks + neighbour

    def signal(self, kind: int, node: int) -> int:
        """The word that counts the chunks from a node."""
        return (self.shape.turns + 1) * self.shape.num_ranks + kind * self.shape.nodes + node

    def area(self, name: str, call: Call, *part: int) -> Area:
        """Where things of a call lie: areas take turns."""
        return (name, call.number % self.shape.turns, *part)

    def packed(self, name: str, call: Call, node: int) -> Area:
        """Where rows for a node are put from."""
        return self.area(name, call, node)

    def wanted(self, call: Call, chunk: int) -> int:
        """What a signal reaches when a chunk of this call is here. It only grows."""
        return self.before[call.number] * self.shape.chunks + chunk + 1

    def wait(self, word: int, wanted: int, peer: int, node: int, phase: str, call: Call) -> Wait:
        """Poll a word."""
        return Wait(word, wanted, peer, node, phase, call.number, self.waits_have_deadlines)

    # -- dispatch ------------------------------------------------------------------------------------------------

    def send_dispatch(self, call: Call) -> Waits:
        """Own tokens: over the network to the forwarders of other nodes first, then over NVLink to neighbours.

        It waits for nobody.
        """
        own, counts = call.rows[self.rank], call.counts[self.rank]
        if self.rank == call.faulty:
            own = [[] for _ in own]
        for node in self.others:
            rows: list[Any] = [((call.number, self.rank, token), targets) for token, targets in own[node]]
            self.put_rows("packed", "arrived", call, node, (len(rows), counts), rows)
        stores = [
            (rank, number, (call.number, self.rank, token)) for token, to in own[self.node] for rank, number in to
        ]
        self.hand_out(call, self.rank, counts, stores)
        return iter(())

    def put_rows(self, source: str, target: str, call: Call, node: int, header: Any, rows: list[Any]) -> None:
        """Rows and what lies before them to the peer on a node, in chunks. Empty chunks too have a signal."""
        peer, packed = self.peer(node), self.packed(source, call, node)
        self.fabric.pack(self.rank, peer, packed, HEADER, header, call.number)
        for index, row in enumerate(rows):
            self.fabric.pack(self.rank, peer, packed, index, row, call.number)
        for chunk in self.chunks():
            indices = [*([HEADER] if chunk == 0 else []), *self.shape.chunk(chunk, len(rows))]
            self.put_chunk(peer, packed, self.area(target, call, self.node), indices, call)

    def chunks(self) -> Iterable[int]:
        """Chunks in the order of their puts, which is that of their signals."""
        return range(self.shape.chunks)

    def put_chunk(self, peer: int, packed: Area, target: Area, indices: list[int], call: Call) -> None:
        """One put with its signal, on the context of its kind."""
        signal = self.signal(call.kind, self.node)
        self.fabric.put(self.rank, peer, call.kind, packed, target, indices, call.number, signal)

    def hand_out(self, call: Call, source: int, counts: list[int], stores: list[tuple[int, int, Any]]) -> None:
        """Rows of a source to ranks of this node, then the flags that say that they are there, with release."""
        for rank, number, payload in stores:
            self.fabric.store(self.rank, rank, self.area("staging", call, source), number, payload, call.number)
        self.close_source(call, source, counts)

    def close_source(self, call: Call, source: int, counts: list[int]) -> None:
        """All rows of a source are stored: every rank of this node hears of it, and of its counts."""
        for rank in self.neighbours:
            self.fabric.store(self.rank, rank, self.area("staging", call, source), HEADER, counts, call.number)
            self.fabric.raise_flag(self.rank, rank, self.source_flag(call, source), call.number)

    def forward(self, call: Call, node: int) -> Waits:
        """Rows from the peer on a node to the ranks of this one, chunk by chunk."""
        peer, arrived = self.peer(node), self.area("arrived", call, node)
        rows: list[Row] = []
        count, counts = 0, []
        for chunk in range(self.shape.chunks):
            yield self.wait(self.signal(DISPATCH, node), self.wanted(call, chunk), peer, node, "forward", call)
            if chunk == 0:
                count, counts = self.fabric.read(self.rank, arrived, HEADER, call.number)
                if self.rank == call.faulty:  # its own call means something else
                    count = 0
            for index in self.shape.chunk(chunk, count):
                payload, targets = self.fabric.read(self.rank, arrived, index, call.number)
                rows.append((payload[2], targets))
                for rank, number in targets:
                    area = self.area("staging", call, peer)
                    self.fabric.store(self.rank, rank, area, number, payload, call.number)
        self.forwarded.setdefault(call.number, {})[node] = rows
        self.close_source(call, peer, counts)

    def receive_dispatch(self, call: Call) -> Waits:
        """Forward for this rail; then wait for all sources, and take what is here."""
        self.forwarded[call.number] = {self.node: call.rows[self.rank][self.node]}
        for node in self.others:
            yield from self.forward(call, node)
        yield from self.wait_for_sources(call)
        if call.faulty >= 0:
            return
        received = []
        for source in range(self.shape.num_ranks):
            area = self.area("staging", call, source)
            counts = self.fabric.read(self.rank, area, HEADER, call.number)
            rows = range(counts[self.rank])
            received.append([(index, self.fabric.read(self.rank, area, index, call.number)) for index in rows])
        self.received[call.number] = received
        self.results[call.number] = [[payload for _, payload in rows] for rows in received]

    def wait_for_sources(self, call: Call) -> Waits:
        """Flags of all sources. Whoever stands for one is a neighbour: it, or the forwarder of its rail."""
        for source in [
            *self.neighbours,
            *(each for each in range(self.shape.num_ranks) if each not in self.neighbours),
        ]:
            node, rail = divmod(source, self.shape.ranks_per_node)
            writer = self.node * self.shape.ranks_per_node + rail
            if source != self.rank:
                yield self.wait(self.source_flag(call, source), call.number, writer, node, "rows", call)

    # -- combine -------------------------------------------------------------------------------------------------

    def send_combine(self, call: Call) -> Waits:
        """Partial sums to their forwarders on this node, which all hear that they are there. Then add for this rail:
        first what goes to other nodes, then what stays.
        """
        for source, rows in enumerate(self.received[call.of] if self.rank != call.faulty else ()):
            forwarder = self.node * self.shape.ranks_per_node + source % self.shape.ranks_per_node
            area = self.area("partials", call, source, self.rank)
            for number, payload in rows:
                self.fabric.store(self.rank, forwarder, area, number, (self.rank, payload), call.number)
        for rank in self.neighbours:
            self.fabric.raise_flag(self.rank, rank, self.partials_flag(self.rank), call.number)
        yield from self.wait_for_partials(call)
        for node in self.others:
            self.put_rows("sums", "home", call, node, (), self.node_sums(call, node))
        for index, row in enumerate(self.node_sums(call, self.node)):
            self.fabric.pack(self.rank, self.rank, self.packed("sums", call, self.node), index, row, call.number)

    def receive_combine(self, call: Call) -> Waits:
        """Add what comes home."""
        kept, rows = self.packed("sums", call, self.node), call.rows[self.rank][self.node]
        for node in self.others:
            for chunk in range(self.shape.chunks):
                wanted = self.wanted(call, chunk)
                yield self.wait(self.signal(COMBINE, node), wanted, self.peer(node), node, "home", call)
        if call.faulty >= 0:
            return
        by_node = {self.node: {i: self.fabric.read(self.rank, kept, i, call.number) for i in range(len(rows))}}
        for node in self.others:
            home, rows = self.area("home", call, node), call.rows[self.rank][node]
            by_node[node] = {i: self.fabric.read(self.rank, home, i, call.number) for i in range(len(rows))}
        sums: list[tuple[Any, ...]] = [()] * len(call.routes[self.rank])
        for node in sorted(by_node):
            for index, (token, _) in enumerate(call.rows[self.rank][node]):
                sums[token] = (*sums[token], by_node[node][index])
        self.results[call.number] = sums

    def wait_for_partials(self, call: Call) -> Waits:
        """Flags of all neighbours, those who owe nothing among them: they say that an older call is over there."""
        for rank in self.neighbours:
            if rank != self.rank:
                yield self.wait(self.partials_flag(rank), call.number, rank, self.node, "partials", call)

    def node_sums(self, call: Call, node: int) -> list[Any]:
        """This node's sums for the rank of another one on this rail: its ranks' partial sums, ascending."""
        home, sums = self.peer(node), []
        if call.faulty in self.neighbours:
            return sums
        for _, targets in self.forwarded[call.of][node]:
            terms = [
                self.fabric.read(self.rank, self.area("partials", call, home, rank), number, call.number)
                for rank, number in targets
            ]
            sums.append((self.node, tuple(terms)))
        return sums
