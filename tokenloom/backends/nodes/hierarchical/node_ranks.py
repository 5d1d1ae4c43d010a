"""The ranks of one node as a group by themselves, for kernels that reach no other node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from tokenloom.errors import PeerTimeout
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.siblings import Siblings
from tokenloom.runtime.store_notes import StoreNotes


class NodeRanks(RankGroup):
    """The ranks of this rank's node, numbered from 0. Making one is collective over all nodes.

    It has no process group of its own: what it gathers, the whole group gathers. So ranks of all nodes call it alike,
    and hear of each other's faults.

    Args:
        whole: the group, whose topology says which ranks share a node.
    """

    def __init__(self, whole: RankGroup) -> None:
        node = whole.topology.node_of[whole.rank]
        self._whole, self._node_ranks = whole, whole.topology.nodes[node]
        self.process_group = None
        self.rank, self.num_ranks = self.members.index(whole.rank), len(self.members)
        self.device = whole.device
        self.timeout_s, self.open_timeout_s = whole.timeout_s, whole.open_timeout_s
        notes = StoreNotes(whole.notes.store, self.rank, self.num_ranks, joins=True)
        notes.move(f"{whole.notes.key(whole.notes.new_name('node'))}/{node}", step=0)
        self.prepare(notes, Siblings())

    @property
    def whole(self) -> RankGroup:
        return self._whole

    @property
    def members(self) -> Sequence[int]:
        return self._node_ranks

    def all_gather_object(self, value: Any, phase: str) -> list[Any]:
        by_rank = self.whole.all_gather_object(value, phase)
        return [by_rank[rank] for rank in self.members]

    def _start(
        self,
        start: Callable[[], dist.Work],
        result: torch.Tensor,
        phase: str,
        opens: bool = False,
        *,
        host_waits: bool = False,
    ) -> NoReturn:
        raise NotImplementedError(f"ranks of a node have no collectives of tensors, which {phase} asks for")

    def in_whole(self, timeout: PeerTimeout) -> PeerTimeout:
        """A timeout that a rank of this group has noticed, with the numbers that ranks have in the whole group."""
        peers = [self.members[peer] for peer in timeout.peers]
        nodes = self.whole.topology.which(peers)
        return PeerTimeout(self.whole.rank, peers, timeout.phase, timeout.epoch, timeout.cause, nodes)
