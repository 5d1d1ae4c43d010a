"""What happens inside a node: rows that came over the network go on to its ranks, and rows of its ranks come together.

:class:`InsideNode` is all that the exchange between nodes asks for, so kernels may take the place of collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tokenloom.backends.exchange import Arriving, Then
from tokenloom.backends.network.paths import Paths, arrange
from tokenloom.ops import routing
from tokenloom.runtime.rank_group import RankGroup


@dataclass(frozen=True)
class Legs:
    """Counts of a dispatch that a rank needs as one that forwards.

    Attributes:
        to_nodes: list [N], rows of this rank for each node.
        from_ranks: list [W], rows of each rank for this node.
        into_node: list [W] of lists [G], (token, rank) rows of each rank to each rank of this node.
    """

    to_nodes: list[int]
    from_ranks: list[int]
    into_node: list[list[int]]


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
    """Transfers between the ranks of a node. All of them call it alike."""

    def hand_out(self, rows: torch.Tensor, goes_to: torch.Tensor, legs: Legs, paths: Paths) -> Arriving:
        """Send rows on to the ranks that they go to.

        Args:
            rows: uint8 [F, b] that came for this rank to forward, in the order (source rank, token).
            goes_to: bool [F, G], the ranks of this node that each row goes to.

        Returns:
            What brings [R, b] for this rank, in the order (source rank, token). Rows of absent ranks are zero.
        """

    def collect(self, rows: torch.Tensor, legs: Legs, paths: Paths) -> tuple[torch.Tensor, list[int]]:
        """Bring rows together where they leave the node.

        Args:
            rows: uint8 [R, b] of this rank, in the order (source rank, token).

        Returns:
            Rows of all ranks of this node for those that this rank forwards for, in the order (source rank, rank of
            this node, token), and how many are for each of the W ranks.
        """


class CollectivesInside:
    """The same by collectives of the whole group, in which only ranks of one node have rows for each other.

    Args:
        ranks: the group.
        sent: counts what is sent.
    """

    def __init__(self, ranks: RankGroup, sent: SentRows) -> None:
        self._ranks, self._sent = ranks, sent
        self._first = ranks.topology.nodes[ranks.topology.node_of[ranks.rank]][0]

    def hand_out(self, rows: torch.Tensor, goes_to: torch.Tensor, legs: Legs, paths: Paths) -> Arriving:
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

    def collect(self, rows: torch.Tensor, legs: Legs, paths: Paths) -> tuple[torch.Tensor, list[int]]:
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
        counts = [0] * num_ranks
        for source in served:
            counts[source] = sum(self._count(legs, source, rank) for rank in paths.served)
        return arrange(arrived, came, wanted), counts

    def _count(self, legs: Legs, source: int, rank: int) -> int:
        """(token, rank) rows from a source to a rank of this node."""
        return legs.into_node[source][rank - self._first]

    def _start(self, rows: torch.Tensor, send: list[int], recv: list[int], phase: str) -> Arriving:
        self._sent.inside_node += sum(send) - send[self._ranks.rank]
        return self._ranks.start_all_to_all(rows, send, recv, phase)
