"""Memory of all ranks, stores over NVLink, puts over the network, and what a rank may conclude from flags and signals.

Stores and puts move no bytes at some moment. They are under way from when they are issued until their reader has
acquired a word that covers them:

- a flag covers what its rank stored over NVLink before it;
- a strong signal covers its own put and earlier ones of the same rank and context. Signals of one context may overtake
  each other, so a count of n covers the first n puts and no more. Nothing orders two contexts.

Who reads what is not covered is caught in every history, not only where the bytes are late. The same holds for who
writes where somebody may still read: he must know, from words that he has acquired from the reader itself, that the
reader has completed the call for which the area was used. That covers a put's source too, which the network may read
until its peer has the payload.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from tests.support.network_model.calls import Shape

CONTEXTS = 4
"""Contexts that a communicator of NCCL 2.28 has at most."""

Area = tuple[Any, ...]
"""A part of a rank's window that one call uses at a time: a name, a turn, and whose rows it holds."""


class Violation(AssertionError):
    """The protocol does what nothing allows."""


class Died(Exception):
    """The rank ends here."""


class Wait(NamedTuple):
    """What a rank polls for.

    Attributes:
        word: number of the flag or signal, of those of this rank.
        wanted: what it has to reach.
        peer: the rank that shall write it.
        node: where the rows come from that it stands for.
        phase: of the call.
        epoch: number of the call.
        limited: it has a deadline.
    """

    word: int
    wanted: int
    peer: int
    node: int
    phase: str
    epoch: int
    limited: bool = True


class Fabric:
    """All ranks' memory, and what is under way.

    Args:
        shape: sizes of the group.
        dies: a rank, and after how many actions it ends; or None.

    Attributes:
        flying: words that have not landed: (to, word, value or 0 to add 1, writer, stream, sequence number).
        values: of each rank's words. Signals count, flags hold the number of a call.
        completed: the last call of each rank before which it has completed all.
        most_puts: that any context has had for one peer, as far as its rank knew.
    """

    def __init__(self, shape: Shape, dies: tuple[int, int] | None = None) -> None:
        ranks = shape.num_ranks
        self.shape, self.size = shape, shape.ranks_per_node
        self.dying, self.actions_left = dies or (-1, 0)
        self.actions = [0] * ranks
        self.areas: list[dict[Area, tuple[int, dict[int, tuple[Any, int, int]]]]] = [{} for _ in range(ranks)]
        self.num_words = (shape.turns + 1) * ranks + 2 * shape.nodes
        self.values = [[0] * self.num_words for _ in range(ranks)]
        self.announced: list[list[dict[int, tuple[int, int, int, int]]]] = [
            [{} for _ in range(self.num_words)] for _ in range(ranks)
        ]
        self.seen = [[0] * (ranks * (1 + CONTEXTS)) for _ in range(ranks)]
        self.known = [[0] * ranks for _ in range(ranks)]
        self.completed = [0] * ranks
        self._done: list[set[int]] = [set() for _ in range(ranks)]
        self._stores = [0] * ranks
        self._puts: dict[tuple[int, int, int], tuple[list[int], deque[int]]] = {}
        self.flying: list[tuple[int, int, int, int, int, int]] = []
        self.most_puts = 0

    # -- what ranks do -------------------------------------------------------------------------------------------

    def store(self, rank: int, to: int, area: Area, index: int, value: Any, call: int) -> None:
        """A store over NVLink, or to the rank's own memory."""
        self._act(rank)
        if to // self.size != rank // self.size:
            raise Violation(f"rank {rank} stores to rank {to}, which is on another node")
        self._stores[rank] += 1
        self._cells(rank, to, to, area, call)[index] = (value, rank, self._stores[rank])

    def pack(self, rank: int, peer: int, area: Area, index: int, value: Any, call: int) -> None:
        """A store to where the rank will put from, to a peer."""
        self._act(rank)
        self._cells(rank, rank, peer, area, call)[index] = (value, rank, 0)

    def raise_flag(self, rank: int, to: int, word: int, call: int, ordered: bool = True) -> None:
        """A store that releases at system scope all that the rank has stored. Not ordered: it releases nothing."""
        self._act(rank)
        covered = self._stores[rank] if ordered else 0
        self.announced[to][word][call] = (rank, rank, covered, self.completed[rank])
        if to == rank:
            self.values[to][word] = call
        else:
            self.flying.append((to, word, call, rank, rank, covered))

    def put(
        self, rank: int, to: int, context: int, source: Area, target: Area, indices: Any, call: int, signal: int = -1
    ) -> None:
        """A put from an area of the rank to one of a peer on its rail, with a signal (number of a word) or without."""
        self._act(rank)
        if to % self.size != rank % self.size or to == rank:
            raise Violation(f"rank {rank} puts to rank {to}, which is not another of its rail")
        issued, outstanding = self._puts.setdefault((rank, to, context), ([0], deque()))
        while outstanding and outstanding[0] <= self.known[rank][to]:
            outstanding.popleft()
        if len(outstanding) >= self.shape.depth:
            raise Violation(f"rank {rank} may block: {len(outstanding)} puts to rank {to} may be on their way")
        outstanding.append(call)
        self.most_puts = max(self.most_puts, len(outstanding))
        issued[0] += 1
        stream = len(self.known) + rank * CONTEXTS + context
        cells = self._cells(rank, to, to, target, call)
        for index in indices:
            cells[index] = (self.areas[rank][source][1][index][0], stream, issued[0])
        if signal >= 0:
            before = self.announced[to][signal]
            before[len(before) + 1] = (rank, stream, issued[0], self.completed[rank])
            self.flying.append((to, signal, 0, rank, stream, issued[0]))

    def read(self, rank: int, area: Area, index: int, call: int) -> Any:
        """A load from the rank's own memory, of what was written for a call."""
        self._act(rank)
        used = self.areas[rank].get(area)
        cell = used[1].get(index) if used is not None and used[0] == call else None
        if cell is None or (cell[1] != rank and self.seen[rank][cell[1]] < cell[2]):
            raise Violation(f"rank {rank} reads {area} {index} of call {call} before its signal")
        return cell[0]

    def complete(self, rank: int, call: int) -> None:
        """The rank reads and writes nothing of this call any more."""
        done = self._done[rank]
        done.add(call)
        while self.completed[rank] + 1 in done:
            self.completed[rank] += 1

    # -- what happens --------------------------------------------------------------------------------------------

    def land(self, index: int) -> tuple[int, int]:
        """A word that is under way arrives. Returns: its rank, and its number."""
        flying = self.flying
        flying[index], flying[-1] = flying[-1], flying[index]
        to, word, value, *_ = flying.pop()
        values = self.values[to]
        values[word] = max(values[word], value) if value else values[word] + 1
        return to, word

    def acquire(self, rank: int, word: int) -> None:
        """The rank has seen its word, and knows what it covers."""
        value = self.values[rank][word]
        if value:
            writer, stream, covered, completed = self.announced[rank][word][value]
            self.seen[rank][stream] = max(self.seen[rank][stream], covered)
            self.known[rank][writer] = max(self.known[rank][writer], completed)

    def lose(self, rank: int, choose: Any) -> None:
        """Some of what a rank sent before its end never lands. Of a context that is all from some put on."""
        lost: set[tuple[int, int]] = set()
        kept = []
        for each in sorted(self.flying, key=lambda each: each[5]):
            to, _, _, writer, stream, _ = each
            if writer == rank and ((to, stream) in lost or choose() < 0.3):
                lost.add((to, stream))
            else:
                kept.append(each)
        self.flying = kept

    # -- rules ---------------------------------------------------------------------------------------------------

    def _act(self, rank: int) -> None:
        self.actions[rank] += 1
        if rank == self.dying:
            self.actions_left -= 1
            if self.actions_left < 0:
                raise Died

    def _cells(self, writer: int, owner: int, reader: int, area: Area, call: int) -> dict[int, tuple[Any, int, int]]:
        """The cells of an area of `owner`, for a call. Its reader has done with those of the call before."""
        areas = self.areas[owner]
        used = areas.get(area)
        if used is not None:
            before = used[0]
            if before == call:
                return used[1]
            sure = self.completed[writer] if reader == writer else self.known[writer][reader]
            if sure < before:
                raise Violation(
                    f"rank {writer} overwrites {area} of rank {owner} in call {call}: rank {reader} may still need it "
                    f"for call {before}"
                )
        cells: dict[int, tuple[Any, int, int]] = {}
        areas[area] = (call, cells)
        return cells
