"""The way inside a node: rows that came over the network go on to its ranks, and rows of its ranks come together.

:class:`InsideNode` is all that the exchange between nodes asks for, so kernels may take the place of collectives
(nvlink_inside.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from tokenloom.backends.exchange import Arriving, Then
from tokenloom.backends.nodes.hierarchical.paths import Block, Paths, arrange, columns
from tokenloom.backends.seam import Wait
from tokenloom.ops import routing
from tokenloom.runtime.rank_group import RankGroup


@dataclass
class Legs:
    """Sizes of a dispatch for a rank that forwards its rows.

    Attributes:
        to_nodes: list [N], rows of this rank for each node.
        from_ranks: list [W], rows of each rank for this node.
        into_node: list [W] of lists [G], (token, rank) rows of each rank to each rank of this node.
        handed_out: what carries rows inside the node remembers here of how it handed them out.
    """

    to_nodes: list[int]
    from_ranks: list[int]
    into_node: list[list[int]]
    handed_out: Any = None


@dataclass
class SentRows:
    """Rows that this rank has sent to others, since its communicator was made or the caller set them to 0.

    Attributes:
        between_nodes: to ranks of other nodes.
        inside_node: to other ranks of its own node.
    """

    between_nodes: int = 0
    inside_node: int = 0


class InsideNode(Protocol):
    """Transfers between the ranks of a node. All ranks of all nodes call it alike.

    Attributes:
        transport: what carries the rows, as ``Capabilities.own_node`` names it.
        by_node: rows of each node are a piece of their own. Otherwise all rows are one piece.
        sent: rows that have been sent to other ranks; of strategy "all_gather" the metadata alone.
    """

    transport: str
    by_node: bool
    sent: SentRows

    def hand_out(self, pieces: Sequence[Arriving], flags: slice, legs: Legs, paths: Paths) -> Arriving:
        """Send rows on to the ranks that they go to.

        Args:
            pieces: uint8 [F, b] each, rows that come for this rank to forward, in the order (source rank, token). By
                node, the first piece is from the own node, the next one from the node before, and so on in a ring.
            flags: the columns that say, with a byte for each of the G ranks of this node, where a row goes.

        Returns:
            What brings [R, b] for this rank, in the order (source rank, token). Rows of absent ranks are zero.
        """

    def collect(self, rows: torch.Tensor, legs: Legs, paths: Paths) -> Iterator[tuple[torch.Tensor, list[Block]]]:
        """Bring rows together where they leave the node.

        Args:
            rows: uint8 [R, b] of this rank, in the order (source rank, token).

        Returns:
            For each piece, rows of all ranks of this node for those that this rank forwards for; and the blocks in
            which they lie, by (source rank, rank). By node, the first piece is for the next node, and so on in a
            ring; the last one is for the own node.
        """

    def add(
        self, rows: torch.Tensor, tokens: torch.Tensor, legs: Legs, paths: Paths, dtype: torch.dtype
    ) -> Iterator[tuple[torch.Tensor, list[int]]]:
        """Add rows of the same token where they leave the node, in the order of ranks.

        Args:
            rows: [R, H] of this rank, in the order (source rank, token).
            tokens: int32 [R], which token of its source each row is.
            dtype: of the sums, which are rounded once, to the dtype of the rows.

        Returns:
            For each piece, as of :meth:`collect`: sums [n, H] in the order (source rank, token), and how many places
            they take for each of the W ranks.
        """

    def check(self, wait: Wait) -> None:
        """Raise what earlier transfers left behind; see :meth:`tokenloom.backends.seam.Backend.check`."""

    def memory(self) -> list[str]:
        """Lines for people: what carries the rows, and the memory that it holds."""

    def close(self) -> None:
        """Release it all."""


class CollectivesInside:
    """The same by collectives of the whole group, in which only ranks of one node have rows for each other.

    Args:
        ranks: the group.
        max_tokens_per_rank: M.
        why: why no kernels carry the rows; "" says nothing.
    """

    transport = "collective"
    by_node = False

    def __init__(self, ranks: RankGroup, max_tokens_per_rank: int, why: str = "") -> None:
        self._ranks, self._max_tokens, self._why = ranks, max_tokens_per_rank, why
        self.sent = SentRows()
        self._first = ranks.topology.nodes[ranks.topology.node_of[ranks.rank]][0]

    def hand_out(self, pieces: Sequence[Arriving], flags: slice, legs: Legs, paths: Paths) -> Arriving:
        (piece,) = pieces
        rows = piece.wait()
        goes_to = rows[:, flags].bool()
        me = self._ranks.rank
        send, recv = [0] * self._ranks.num_ranks, [0] * self._ranks.num_ranks
        living = torch.zeros(goes_to.shape[1], dtype=torch.bool, device=goes_to.device)
        for rank, served in paths.served.items():
            living[rank - self._first] = True
            send[rank] = sum(self._count(legs, source, rank) for source in paths.served[me])
            recv[rank] = sum(self._count(legs, source, me) for source in served)
        # By rank of this node, then in the order they came. Their number is known, so nobody waits for the flags.
        stays = (~(goes_to & living)).t().flatten().to(torch.uint8)
        row = stays.sort(stable=True).indices[: sum(send)] % max(len(rows), 1)
        rows = routing.gather_rows(rows, row)
        transfer = self._start(rows, send, recv, "dispatch, inside nodes")
        came = [(source, self._count(legs, source, me)) for served in paths.served.values() for source in served]
        wanted = [(source, self._count(legs, source, me)) for source in range(self._ranks.num_ranks)]
        return Then(transfer, lambda arrived: arrange(arrived, came, wanted))

    def collect(self, rows: torch.Tensor, legs: Legs, paths: Paths) -> Iterator[tuple[torch.Tensor, list[Block]]]:
        me, num_ranks = self._ranks.rank, self._ranks.num_ranks
        send, recv = [0] * num_ranks, [0] * num_ranks
        for rank, served in paths.served.items():
            send[rank] = sum(self._count(legs, source, me) for source in served)
            recv[rank] = sum(self._count(legs, source, rank) for source in paths.served[me])
        lie = [(source, self._count(legs, source, me)) for source in range(num_ranks)]
        leave = [(source, self._count(legs, source, me)) for served in paths.served.values() for source in served]
        arrived = self._start(arrange(rows, lie, leave), send, recv, "combine, inside nodes").wait()
        served = paths.served[me]
        came = [((source, rank), self._count(legs, source, rank)) for rank in paths.served for source in served]
        wanted = [((source, rank), self._count(legs, source, rank)) for source in served for rank in paths.served]
        yield arrange(arrived, came, wanted), wanted

    def add(
        self, rows: torch.Tensor, tokens: torch.Tensor, legs: Legs, paths: Paths, dtype: torch.dtype
    ) -> Iterator[tuple[torch.Tensor, list[int]]]:
        return add_collected(self, self._max_tokens, self._first, rows, tokens, legs, paths, dtype)

    def check(self, wait: Wait) -> None:
        pass

    def memory(self) -> list[str]:
        return [f"no kernels inside nodes: {self._why}"] if self._why else []

    def close(self) -> None:
        pass

    def _count(self, legs: Legs, source: int, rank: int) -> int:
        """(token, rank) rows from a source to a rank of this node."""
        return legs.into_node[source][rank - self._first]

    def _start(self, rows: torch.Tensor, send: list[int], recv: list[int], phase: str) -> Arriving:
        self.sent.inside_node += sum(send) - send[self._ranks.rank]
        return self._ranks.start_all_to_all(rows, send, recv, phase)


def add_collected(
    inside: InsideNode,
    max_tokens_per_rank: int,
    first: int,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    legs: Legs,
    paths: Paths,
    dtype: torch.dtype,
) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Collect rows and add those of a token; see :meth:`InsideNode.add`.

    Args:
        inside: collects them.
        first: the first rank of this node.
    """
    width, num_ranks = rows.shape[1], len(legs.from_ranks)
    packed = torch.cat([routing.packed(rows).view(torch.uint8), _bytes_of(tokens)], 1)
    for came, blocks in inside.collect(packed, legs, paths):
        end = packed.shape[1] - tokens.itemsize
        values = columns(came, 0, end).view(rows.dtype)
        words = columns(came, end, packed.shape[1]).view(tokens.dtype)
        pairs = np.array([pair for pair, _ in blocks], dtype=np.int64).reshape(-1, 2)
        of_rows = torch.from_numpy(np.repeat(pairs, [count for _, count in blocks], axis=0)).to(came.device)
        # Rows of a source lie by rank. A sum of a token's rows takes them in this order.
        keys = of_rows[:, 0] * max_tokens_per_rank + words[:, 0]
        found, group = torch.unique(keys, return_inverse=True)  # by source, then token
        positions = keys.new_full((len(found), len(legs.into_node[0])), -1)
        positions[group, of_rows[:, 1] - first] = torch.arange(len(keys), device=keys.device)
        sums = routing.ordered_sum(values.view(-1, width), positions, dtype=dtype).to(rows.dtype)
        # As many places as there were tokens in the dispatch: home knows that number, also if ranks are absent now.
        send = [0] * num_ranks
        for source in {int(source) for source in pairs[:, 0]}:
            send[source] = legs.from_ranks[source]
        yield _in_blocks(sums, found // max_tokens_per_rank, send), send


def _in_blocks(rows: torch.Tensor, blocks: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Lay rows, of which int64 [n] says the block of each in ascending order, into blocks of these sizes."""
    if len(rows) == sum(sizes):
        return rows
    starts = np.cumsum([0, *sizes[:-1]])
    before = np.cumsum([0, *torch.bincount(blocks, minlength=len(sizes)).tolist()[:-1]])
    room = rows.new_empty(sum(sizes), rows.shape[1])
    place = torch.from_numpy(starts - before).to(rows.device)[blocks] + torch.arange(len(rows), device=rows.device)
    room[place] = rows
    return room


def _bytes_of(tokens: torch.Tensor) -> torch.Tensor:
    """[R] -> its bytes, [R, itemsize]."""
    return tokens.contiguous().view(torch.uint8).view(len(tokens), tokens.itemsize)
