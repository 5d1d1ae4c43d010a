"""Which ranks of a group share a node, as all of them see it.

A node is a set of ranks on one host whose GPUs can access each other's memory; on CPUs it is a host. Every rank says
where it is, all of them get all answers, and the same rule gives every rank the same nodes.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from tokenloom.errors import InvalidArgument


def host_identity() -> str:
    """The host's name and the time it started, which tells two hosts of the same name apart."""
    started = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{started.read_text().strip() if started.exists() else ''}"


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes:
        host: see :func:`host_identity`.
        gpu: UUID of its GPU, "" on a CPU.
        out_of_reach: UUIDs of the GPUs that it sees, and whose memory its own cannot access.
    """

    host: str
    gpu: str = ""
    out_of_reach: tuple[str, ...] = ()

    @staticmethod
    def own(device: torch.device) -> Place:
        """Where this rank is, whose tensors are on ``device``."""
        if device.type != "cuda":
            return Place(host_identity())
        own = torch.cuda.current_device() if device.index is None else device.index
        uuids = [str(torch.cuda.get_device_properties(each).uuid) for each in range(torch.cuda.device_count())]
        away = [uuid for peer, uuid in enumerate(uuids) if peer != own and not _reaches(own, peer)]
        return Place(host_identity(), uuids[own], tuple(away))

    def is_with(self, other: Place) -> bool:
        """Whether this rank sees the other one on its node. A GPU that it does not see counts as reached."""
        return self.host == other.host and other.gpu not in self.out_of_reach


def _reaches(gpu: int, peer: int) -> bool:
    return bool(torch.cuda.can_device_access_peer(gpu, peer))


@dataclass(frozen=True)
class Topology:
    """The nodes of a group, the same on all ranks.

    Attributes:
        node_of: node of each rank. Nodes are numbered by their lowest ranks.
        pretended: nodes are those of ``ranks_per_node``, wherever the ranks are.
        doubt: which ranks see different nodes, and what they see; "" if none do. Nodes are hosts then.
    """

    node_of: tuple[int, ...]
    pretended: bool = False
    doubt: str = ""

    @staticmethod
    def together(num_ranks: int) -> Topology:
        """All ranks on one node."""
        return Topology((0,) * num_ranks)

    @property
    def num_nodes(self) -> int:
        """N."""
        return max(self.node_of) + 1

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, ascending."""
        return tuple(
            tuple(rank for rank, node in enumerate(self.node_of) if node == each) for each in range(self.num_nodes)
        )

    @cached_property
    def why_no_rails(self) -> str | None:
        """Why ranks have no rails, or None.

        All nodes must have G ranks, in the order of nodes. Then rank n * G + g is on node n, and on rail g. With it
        are the ranks of that place on all other nodes.
        """
        if self.doubt:
            return self.doubt
        by_size = {len(ranks): (node, ranks) for node, ranks in reversed(list(enumerate(self.nodes)))}
        if len(by_size) > 1:
            (node, ranks), (other, others) = sorted(by_size.values())[:2]
            return (
                f"nodes have unequal numbers of ranks: node {node} has {_listed(ranks)}, node {other} has "
                f"{_listed(others)}; start as many ranks on each node"
            )
        for rank, (node, expected) in enumerate(zip(self.node_of, sorted(self.node_of), strict=True)):
            if node != expected:
                return (
                    f"ranks are not in the order of nodes: rank {rank} is on node {node}, expected on node "
                    f"{expected}; number the ranks of a node one after the other"
                )
        return None

    @property
    def ranks_per_node(self) -> int:
        """G, where there are rails."""
        assert self.why_no_rails is None, self.why_no_rails
        return len(self.nodes[0])

    def which(self, ranks: Collection[int]) -> list[int]:
        """The nodes of some ranks, ascending; none where all ranks of the group are on one."""
        return sorted({self.node_of[rank] for rank in ranks}) if self.num_nodes > 1 else []

    @property
    def who_is_where(self) -> str:
        """The ranks of each node, for people."""
        return ", ".join(f"{_listed(ranks)} on node {node}" for node, ranks in enumerate(self.nodes))

    def describe(self) -> str:
        """The nodes in a few words, for people."""
        if self.num_nodes == 1:
            return "1 node"
        how = ", as ranks_per_node says" if self.pretended else ""
        if self.why_no_rails is not None:
            return f"{self.num_nodes} nodes{how}, no rails: {self.why_no_rails}"
        rails = "1 rail" if self.ranks_per_node == 1 else f"{self.ranks_per_node} rails"
        return f"{self.num_nodes} nodes of {self.ranks_per_node}{how}; {rails} of {self.num_nodes}"


def checked_ranks_per_node(ranks_per_node: object, num_ranks: int) -> None:
    """Raise InvalidArgument unless it is None, or divides the group into equal nodes."""
    if ranks_per_node is None:
        return
    if isinstance(ranks_per_node, bool) or not isinstance(ranks_per_node, int) or ranks_per_node < 1:
        raise InvalidArgument(f"ranks_per_node is {ranks_per_node!r}, expected a positive integer, or None")
    if num_ranks % ranks_per_node:
        raise InvalidArgument(
            f"ranks_per_node is {ranks_per_node}, expected a divisor of {num_ranks}, the ranks of the group, because "
            "nodes have equal numbers of ranks"
        )


def pretended(num_ranks: int, ranks_per_node: int) -> Topology:
    """Nodes of this many ranks, one after the other."""
    return Topology(tuple(rank // ranks_per_node for rank in range(num_ranks)), pretended=True)


def find_nodes(places: Sequence[Place]) -> Topology:
    """The nodes of ranks that are at these places."""
    seen = [tuple(rank for rank, other in enumerate(places) if place.is_with(other)) for place in places]
    for rank, mine in enumerate(seen):
        for other in mine:
            if seen[other] != mine:
                low, high = sorted((rank, other))
                doubt = (
                    f"ranks see different nodes: rank {low} sees {_listed(seen[low])} on its node, rank {high} sees "
                    f"{_listed(seen[high])}; pass ranks_per_node"
                )
                return Topology(_numbered([place.host for place in places]), doubt=doubt)
    return Topology(_numbered(seen))


def _numbered(keys: Sequence[object]) -> tuple[int, ...]:
    """Equal keys get equal numbers, in the order in which they come."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return tuple(numbers[key] for key in keys)


def _listed(ranks: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, ranks))}" if len(ranks) > 1 else f"rank {ranks[0]}"
