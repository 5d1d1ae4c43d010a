"""The exchange of rows over nodes: one row for each (token, node) crosses the network.

There: a rank sends each token once to each node that it goes to, to the rank on its own rail. All that belongs to the
token is in one row of bytes: payload, metadata, and a flag for each rank of the node. That rank sends it on to the
ranks that the flags name. Back, rows take the same way. Sums per node are added where rows leave the node, so that one
row for each (token, node) comes home.

Between nodes rows go by collectives of the whole group, in which most pairs of ranks have no rows for each other. So
there is nothing to agree on but counts, which the handshake brings, and ranks are masked and missed as elsewhere. What
carries them inside a node is in inside.py. Where it takes the rows of each node by themselves, there is a collective
for each other node, in a ring: what one brings is handed out while the next ones run.

Each method starts both hops: a rank that only hears of a fault opens no more collectives than those that go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from tokenloom.backends.collective_handle import Sizes
from tokenloom.backends.exchange import Arriving, ArrivingSum, Here, SumOnArrival, Then
from tokenloom.backends.nodes.hierarchical.inside import InsideNode, Legs
from tokenloom.backends.nodes.hierarchical.paths import Block, arrange, columns, find_paths
from tokenloom.ops import routing
from tokenloom.plan import Plan, align_up
from tokenloom.runtime.rank_group import RankGroup

WORD = 16
"""Bytes that kernels copy at once. Rows are padded to multiples of them."""


class NodeExchange:
    """Rows between ranks on several nodes.

    Args:
        plan, ranks: sizes and group, whose topology has rails.
        inside: carries rows within this node.
    """

    def __init__(self, plan: Plan, ranks: RankGroup, inside: InsideNode) -> None:
        self._plan, self._ranks, self._topology, self._inside = plan, ranks, ranks.topology, inside
        self._node = self._topology.node_of[ranks.rank]
        self._paths = find_paths(self._topology, ranks.rank, frozenset())
        self.num_counts = self._topology.num_nodes

    # -- counts ---------------------------------------------------------------------------------------------

    def open(self, absent: frozenset[int]) -> None:
        if absent != self._paths.absent:
            self._paths = find_paths(self._topology, self._ranks.rank, absent)

    def counts(self, send: routing.SendMap, num_tokens: int) -> torch.Tensor:
        return routing.on_nodes(self._goes_to(send, num_tokens), self._topology.ranks_per_node).sum(0)

    def legs(self, rows: np.ndarray, told: np.ndarray) -> Legs:
        here = list(self._topology.nodes[self._node])
        return Legs(told[self._ranks.rank].tolist(), told[:, self._node].tolist(), rows[:, here].tolist())

    def _goes_to(self, send: routing.SendMap, num_tokens: int) -> torch.Tensor:
        """bool [T, W]: the ranks that each token goes to."""
        return routing.home_positions_per_rank(send, num_tokens, self._plan.num_ranks) >= 0

    # -- there ----------------------------------------------------------------------------------------------

    def spread(self, sizes: Sizes, parts: Mapping[str, torch.Tensor]) -> dict[str, Arriving]:
        paths, legs, width = self._paths, sizes.legs, self._topology.ranks_per_node
        num_tokens = len(next(iter(parts.values())))
        by_node = self._goes_to(sizes.send, num_tokens).unflatten(1, (-1, width))
        reached = torch.tensor([each is not None for each in paths.forwarders], device=by_node.device)
        nodes, tokens = (by_node.any(2) & reached).t().nonzero(as_tuple=True)
        parts_of_rows = [routing.gather_rows(values, tokens).view(torch.uint8) for values in parts.values()]
        parts_of_rows.append(by_node[tokens, nodes].to(torch.uint8))
        ends = np.cumsum([each.shape[1] for each in parts_of_rows]).tolist()
        parts_of_rows.append(parts_of_rows[-1].new_zeros(len(tokens), align_up(ends[-1], WORD) - ends[-1]))
        recv = [0] * self._plan.num_ranks
        for source in paths.served[self._ranks.rank]:
            recv[source] = legs.from_ranks[source]
        pieces = self._start_pieces(torch.cat(parts_of_rows, 1), self._to_forwarders(legs.to_nodes), recv)
        arriving = self._inside.hand_out(pieces, slice(ends[-2], ends[-1]), legs, paths)

        def part(name: str, start: int, end: int) -> Arriving:
            dtype = parts[name].dtype
            return Then(arriving, lambda rows: columns(rows, start, end).view(dtype))

        return {name: part(name, start, end) for name, start, end in zip(parts, [0, *ends], ends, strict=False)}

    def _start_pieces(self, rows: torch.Tensor, send: list[int], recv: list[int]) -> list[Arriving]:
        """Start to send rows to those who forward them, piece by piece."""
        starts = np.cumsum([0, *send]).tolist()
        pieces: list[Arriving] = []
        for to_ranks, from_ranks in self._pieces():
            leaving = rows[starts[to_ranks.start] : starts[to_ranks.stop]]
            if self._inside.by_node and not pieces:  # the first one stays in this node
                pieces.append(Here(leaving))
                continue
            counts = _within(to_ranks, send), _within(from_ranks, recv)
            pieces.append(self.start_all_to_all(leaving, *counts, "dispatch, between nodes"))
        return pieces

    def _pieces(self) -> list[tuple[range, range]]:
        """For each piece the ranks that this one sends to, and those that it receives from: of a node each."""
        nodes, own = self._topology.nodes, self._node
        if not self._inside.by_node:
            return [(range(self._plan.num_ranks), range(self._plan.num_ranks))]
        ring = [(nodes[(own + step) % len(nodes)], nodes[own - step]) for step in range(len(nodes))]
        return [(range(to[0], to[-1] + 1), range(there[0], there[-1] + 1)) for to, there in ring]

    def _to_forwarders(self, by_node: list[int]) -> list[int]:
        """Counts by node -> by the rank that forwards there for this one."""
        counts = [0] * self._plan.num_ranks
        for forwarder, count in zip(self._paths.forwarders, by_node, strict=True):
            if forwarder is not None:
                counts[forwarder] = count
        return counts

    # -- back -----------------------------------------------------------------------------------------------

    def bring_home(self, sizes: Sizes, rows: torch.Tensor, phase: str) -> Arriving:
        paths = self._paths
        recv = self._to_forwarders([sum(sizes.sent[rank] for rank in there) for there in paths.living])
        packed = routing.packed(rows).view(torch.uint8)
        collected = (
            (leaving, _by_source(blocks, self._plan.num_ranks))
            for leaving, blocks in self._inside.collect(packed, sizes.legs, paths)
        )
        arriving = self._start_home(collected, recv, packed.new_empty(sum(recv), packed.shape[1]), phase)
        came = [(rank, sizes.sent[rank]) for there in paths.living for rank in there]
        wanted = list(enumerate(sizes.sent))
        return _NodeHome(arriving, paths.absent, lambda arrived: arrange(arrived, came, wanted).view(rows.dtype))

    def send_sums(
        self, sizes: Sizes, rows: torch.Tensor, tokens: torch.Tensor, order: torch.Tensor, dtype: torch.dtype
    ) -> ArrivingSum:
        paths, plan = self._paths, self._plan
        recv = self._to_forwarders(sizes.legs.to_nodes)
        sums = self._inside.add(rows, tokens, sizes.legs, paths, dtype)
        room = rows.new_empty(sum(recv), rows.shape[1])
        arriving = self._start_home(sums, recv, room, "combine, sums")
        starts = [0 if each is None else sum(recv[:each]) for each in paths.forwarders]
        absent = torch.tensor([rank in paths.absent for rank in range(plan.num_ranks)], device=order.device)
        here = routing.on_nodes((order >= 0) & ~absent, self._topology.ranks_per_node)  # [T, N]
        places = torch.where(here, here.cumsum(0) - 1 + torch.tensor(starts, device=order.device), -1)
        return SumOnArrival(arriving, lambda terms: routing.ordered_sum(terms, places, dtype=dtype))

    def _start_home(
        self, leaving: Iterator[tuple[torch.Tensor, list[int]]], recv: list[int], room: torch.Tensor, phase: str
    ) -> Arriving:
        """Start to send rows home, each piece as soon as it is there to leave.

        Args:
            leaving: for each piece the rows, and how many are for each rank.
            recv: how many come from each rank.
            room: where they arrive, in the order of ranks.
        """
        starts = np.cumsum([0, *recv]).tolist()
        pieces: list[Arriving] = []
        ring = self._pieces()
        for (_, from_ranks), (rows, send) in zip(ring[1:] + ring[:1], leaving, strict=True):
            place = room[starts[from_ranks.start] : starts[from_ranks.stop]]
            if self._inside.by_node and self._ranks.rank in from_ranks:  # the last one has come home
                place.copy_(rows)
                continue
            counts = send, _within(from_ranks, recv)
            pieces.append(self.start_all_to_all(rows, *counts, f"{phase}, between nodes", place))
        return _Pieces(pieces, room)

    # -- straight -------------------------------------------------------------------------------------------

    def start_all_to_all(
        self,
        rows: torch.Tensor,
        send_counts: list[int],
        recv_counts: list[int],
        phase: str,
        out: torch.Tensor | None = None,
    ) -> Arriving:
        for rank, count in enumerate(send_counts):
            if self._topology.node_of[rank] != self._node:
                self._inside.sent.between_nodes += count
            elif rank != self._ranks.rank:
                self._inside.sent.inside_node += count
        return self._ranks.start_all_to_all(rows, send_counts, recv_counts, phase, out)


class _NodeHome(Then):
    """Rows that came home; those of absent ranks are zero."""

    def __init__(
        self, arriving: Arriving, absent: frozenset[int], make: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__(arriving, make)
        self._absent = absent

    @property
    def lost(self) -> frozenset[int]:
        return self._absent


class _Pieces:
    """Rows that arrive in pieces, in one tensor."""

    def __init__(self, pieces: Sequence[Arriving], rows: torch.Tensor) -> None:
        self._pieces, self._rows = pieces, rows

    def wait(self) -> torch.Tensor:
        for piece in self._pieces:
            piece.wait()
        return self._rows

    @property
    def lost(self) -> frozenset[int]:
        return frozenset().union(*(piece.lost for piece in self._pieces))


def _within(ranks: range, counts: list[int]) -> list[int]:
    """The counts of these ranks, and 0 for all others."""
    return [count if rank in ranks else 0 for rank, count in enumerate(counts)]


def _by_source(blocks: Sequence[Block], num_ranks: int) -> list[int]:
    """Rows for each source, of blocks by (source rank, rank)."""
    counts = [0] * num_ranks
    for (source, _), count in blocks:
        counts[source] += count
    return counts
