"""The exchange of rows over nodes: one row for each (token, node) crosses the network.

There: a rank sends each token once to each node that it goes to, to the rank on its own rail. All that belongs to the
token is in one row of bytes: payload, metadata, and a flag for each rank of the node. That rank sends it on to the
ranks that the flags name. Back, rows take the same way. Sums per node are added where rows leave the node, so that one
row for each (token, node) comes home.

The hops are collectives of the whole group, in which most pairs of ranks have no rows for each other. So there is
nothing to agree on but counts, which the handshake brings, and ranks are masked and missed as elsewhere.

Each method starts both hops: a rank that only hears of a fault opens no more collectives than those that go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from tokenloom.backends.collective_handle import Sizes
from tokenloom.backends.exchange import Arriving, ArrivingSum, SumOnArrival, Then
from tokenloom.backends.network.inside import CollectivesInside, InsideNode, Legs, SentRows
from tokenloom.backends.network.paths import Paths, arrange, find_paths
from tokenloom.ops import routing
from tokenloom.plan import Plan, align_up
from tokenloom.runtime.rank_group import RankGroup

WORD = 8
"""Rows are padded to multiples of so many bytes, which are quicker to copy."""


class NodeExchange:
    """Rows between ranks on several nodes.

    Args:
        plan, ranks: sizes and group, whose topology has rails.

    Attributes:
        sent: rows that have been sent to other ranks; of strategy "all_gather" the metadata alone.
        inside: carries rows within this node.
    """

    def __init__(self, plan: Plan, ranks: RankGroup) -> None:
        self._plan, self._ranks, self._topology = plan, ranks, ranks.topology
        self._node = self._topology.node_of[ranks.rank]
        self._paths = find_paths(self._topology, ranks.rank, frozenset())
        self.num_counts = self._topology.num_nodes
        self.sent = SentRows()
        self.inside: InsideNode = CollectivesInside(ranks, self.sent)

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
        columns = [routing.gather_rows(values, tokens).view(torch.uint8) for values in parts.values()]
        columns.append(by_node[tokens, nodes].to(torch.uint8))
        ends = np.cumsum([each.shape[1] for each in columns]).tolist()
        columns.append(columns[-1].new_zeros(len(tokens), align_up(ends[-1], WORD) - ends[-1]))
        send, recv = [0] * self._plan.num_ranks, [0] * self._plan.num_ranks
        for node, forwarder in enumerate(paths.forwarders):
            if forwarder is not None:
                send[forwarder] = legs.to_nodes[node]
        for source in paths.served[self._ranks.rank]:
            recv[source] = legs.from_ranks[source]
        came = self.start_all_to_all(torch.cat(columns, 1), send, recv, "dispatch, between nodes").wait()
        arriving = self.inside.hand_out(came, came[:, ends[-2] : ends[-1]].bool(), legs, paths)

        def part(name: str, start: int, end: int) -> Arriving:
            dtype = parts[name].dtype
            # Always a copy, which starts where words may start.
            return Then(
                arriving, lambda rows: rows[:, start:end].clone(memory_format=torch.contiguous_format).view(dtype)
            )

        return {name: part(name, start, end) for name, start, end in zip(parts, [0, *ends], ends, strict=False)}

    # -- back -----------------------------------------------------------------------------------------------

    def bring_home(self, sizes: Sizes, rows: torch.Tensor, phase: str) -> Arriving:
        paths = self._paths
        leaving, send = self.inside.collect(routing.packed(rows).view(torch.uint8), sizes.legs, paths)
        recv = [0] * self._plan.num_ranks
        for forwarder, there in zip(paths.forwarders, paths.living, strict=True):
            if forwarder is not None:
                recv[forwarder] = sum(sizes.sent[rank] for rank in there)
        arriving = self.start_all_to_all(leaving, send, recv, f"{phase}, between nodes")
        came = [(rank, sizes.sent[rank]) for there in paths.living for rank in there]
        wanted = list(enumerate(sizes.sent))
        return _Home(arriving, paths.absent, lambda arrived: arrange(arrived, came, wanted).view(rows.dtype))

    def send_sums(
        self, sizes: Sizes, rows: torch.Tensor, tokens: torch.Tensor, order: torch.Tensor, dtype: torch.dtype
    ) -> ArrivingSum:
        paths, plan, width = self._paths, self._plan, rows.shape[1]
        packed = torch.cat([routing.packed(rows).view(torch.uint8), _bytes_of(tokens)], 1)
        came, counts = self.inside.collect(packed, sizes.legs, paths)
        values = came[:, : -tokens.itemsize].clone(memory_format=torch.contiguous_format).view(rows.dtype)
        came_tokens = came[:, -tokens.itemsize :].clone(memory_format=torch.contiguous_format).view(tokens.dtype)
        sources = torch.repeat_interleave(torch.tensor(counts, device=came.device))
        # Rows of a source lie by rank. A sum of a token's rows takes them in this order.
        keys = sources * plan.max_tokens_per_rank + came_tokens[:, 0]
        found, group = torch.unique(keys, return_inverse=True)  # by source, then token
        ranks = self._ranks_of_rows(sizes.legs, paths)
        positions = keys.new_full((len(found), self._topology.ranks_per_node), -1)
        positions[group, ranks] = torch.arange(len(keys), device=keys.device)
        sums = routing.ordered_sum(values.view(-1, width), positions, dtype=dtype).to(rows.dtype)

        # As many rows as there were tokens in the dispatch, which is known on both sides whoever is absent by now.
        send, recv, starts = [0] * plan.num_ranks, [0] * plan.num_ranks, [0] * len(paths.forwarders)
        for source in paths.served[self._ranks.rank]:
            send[source] = sizes.legs.from_ranks[source]
        for node, forwarder in enumerate(paths.forwarders):
            if forwarder is not None:
                starts[node] = sum(recv)
                recv[forwarder] = sizes.legs.to_nodes[node]
        sums = _in_blocks(sums, found // plan.max_tokens_per_rank, send)
        arriving = self.start_all_to_all(sums, send, recv, "combine, sums between nodes")
        absent = torch.tensor([rank in paths.absent for rank in range(plan.num_ranks)], device=order.device)
        here = routing.on_nodes((order >= 0) & ~absent, self._topology.ranks_per_node)  # [T, N]
        places = torch.where(here, here.cumsum(0) - 1 + torch.tensor(starts, device=order.device), -1)
        return SumOnArrival(arriving, lambda terms: routing.ordered_sum(terms, places, dtype=dtype))

    def _ranks_of_rows(self, legs: Legs, paths: Paths) -> torch.Tensor:
        """int64: place in its node of the rank that each row is from which ``inside.collect`` gives."""
        first, me = self._topology.nodes[self._node][0], self._ranks.rank
        places = [rank - first for rank in paths.served]
        counts = [legs.into_node[source][place] for source in paths.served[me] for place in places]
        of_rows = np.repeat(np.tile(places, len(paths.served[me])), counts)
        return torch.from_numpy(of_rows).to(self._ranks.device)

    # -- straight -------------------------------------------------------------------------------------------

    def start_all_to_all(
        self, rows: torch.Tensor, send_counts: list[int], recv_counts: list[int], phase: str
    ) -> Arriving:
        for rank, count in enumerate(send_counts):
            if self._topology.node_of[rank] != self._node:
                self.sent.between_nodes += count
            elif rank != self._ranks.rank:
                self.sent.inside_node += count
        return self._ranks.start_all_to_all(rows, send_counts, recv_counts, phase)


class _Home(Then):
    """Rows that came home, but for those of absent ranks, which are zero."""

    def __init__(
        self, arriving: Arriving, absent: frozenset[int], make: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__(arriving, make)
        self._absent = absent

    @property
    def lost(self) -> frozenset[int]:
        return self._absent


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
