"""What ranks are asked to do: sizes, calls with their routing, and the results that the routing alone gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

DISPATCH, COMBINE = 0, 1
"""Kinds of calls. Each has a context of the network for itself."""
SEND, RECEIVE = 0, 1
"""Halves of a call."""

Step = tuple[int, "Call"]
Row = tuple[int, tuple[tuple[int, int], ...]]
"""A token that goes to a node, and its (rank, number among the rows from its source) there."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a group.

    Attributes:
        nodes, ranks_per_node: rank n * ranks_per_node + g is on node n and rail g.
        chunks: puts to each node in a call.
        max_tokens: of a rank.
        halves: two calls may be open at a time.
        depth: puts that one context takes for one peer before it blocks.
    """

    nodes: int
    ranks_per_node: int
    chunks: int = 1
    max_tokens: int = 4
    halves: bool = False
    depth: int = 32

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def turns(self) -> int:
        """Regions that calls take turns in, by their numbers."""
        return 4 if self.halves else 2

    def chunk(self, index: int, count: int) -> range:
        """Which of a node's rows are in a chunk."""
        size = -(-self.max_tokens // self.chunks)
        return range(min(index * size, count), min((index + 1) * size, count))


@dataclass
class Call:
    """One call, as all ranks make it.

    Attributes:
        number: from 1 on, over calls of both kinds.
        kind: DISPATCH or COMBINE.
        of: the number of the dispatch whose rows go: for a dispatch, its own.
        routes: of each rank's tokens, the ranks that hold its experts, ascending.
        faulty: the rank that cannot make the call, and opens it for that reason, or -1. Then all ranks refuse it.
        rows: for each source and node, the rows that go there.
        counts: for each source, how many rows go to each rank.
    """

    number: int
    kind: int
    of: int
    routes: Sequence[Sequence[Sequence[int]]]
    faulty: int = -1
    rows: list[list[list[Row]]] = field(default_factory=list)
    counts: list[list[int]] = field(default_factory=list)

    def number_rows(self, shape: Shape) -> None:
        """Fill in ``rows`` and ``counts``: what each source finds from its own routing."""
        size = shape.ranks_per_node
        for tokens in self.routes:
            counts, rows = [0] * shape.num_ranks, [[] for _ in range(shape.nodes)]  # type: ignore[var-annotated]
            for token, ranks in enumerate(tokens):
                of_nodes: dict[int, list[tuple[int, int]]] = {}
                for rank in ranks:
                    of_nodes.setdefault(rank // size, []).append((rank, counts[rank]))
                    counts[rank] += 1
                for node, targets in of_nodes.items():
                    rows[node].append((token, tuple(targets)))
            self.rows.append(rows)
            self.counts.append(counts)

    def wanted(self, shape: Shape, rank: int) -> object:
        """The result on a rank, found without the protocol, and without ``rows``."""
        if self.kind == DISPATCH:
            return [
                [(self.of, source, token) for token, ranks in enumerate(tokens) if rank in ranks]
                for source, tokens in enumerate(self.routes)
            ]
        sums = []
        for token, ranks in enumerate(self.routes[rank]):
            by_node: dict[int, list[object]] = {}
            for each in ranks:
                by_node.setdefault(each // shape.ranks_per_node, []).append((each, (self.of, rank, token)))
            sums.append(tuple((node, tuple(by_node[node])) for node in sorted(by_node)))
        return sums


def make_calls(
    shape: Shape,
    kinds: Sequence[int],
    routing: Callable[[], Sequence[Sequence[int]]],
    faults: Mapping[int, int] | None = None,
) -> list[Call]:
    """Calls of these kinds. Combines take the oldest dispatch that none has taken; without one they are dispatches.

    Args:
        shape: sizes.
        kinds: of the calls.
        routing: makes up the routing of one rank's tokens.
        faults: ranks that cannot make a call, by its number.
    """
    calls: list[Call] = []
    waiting: list[Call] = []
    for number, kind in enumerate(kinds, 1):
        faulty = (faults or {}).get(number, -1)
        if kind == COMBINE and waiting:
            first = waiting.pop(0)
            calls.append(Call(number, COMBINE, first.number, first.routes, faulty, first.rows, first.counts))
            continue
        call = Call(number, DISPATCH, number, [routing() for _ in range(shape.num_ranks)], faulty)
        call.number_rows(shape)
        calls.append(call)
        if faulty < 0:
            waiting.append(call)
    return calls


def whole(calls: Sequence[Call]) -> list[Step]:
    """Calls one after the other."""
    return [(part, call) for call in calls for part in (SEND, RECEIVE)]


def in_halves(calls: Sequence[Call], choose: Callable[[], float]) -> list[Step]:
    """Halves of calls, of which two may be open, in an order that `choose` (from 0 to 1) decides."""
    steps: list[Step] = []
    opened: list[Call] = []
    for call in calls:
        # A rank that opens call n has received call n - 2, and a combine's rows are here.
        while any(each.number <= call.number - 2 or each.number == call.of for each in opened) or (
            opened and choose() < 0.4
        ):
            late = [each for each in opened if each.number <= call.number - 2]
            pick = late[0] if late else opened[int(choose() * len(opened))]
            opened.remove(pick)
            steps.append((RECEIVE, pick))
        opened.append(call)
        steps.append((SEND, call))
    while opened:
        steps.append((RECEIVE, opened.pop(int(choose() * len(opened)))))
    return steps
