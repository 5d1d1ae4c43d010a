"""Who forwards for whom, and in which order rows come.

Rank n * G + g is on node n and rail g. Rows between rank s and the ranks of node n pass through the rank of that node
on the rail of s: rank s itself on its own node. Where that one is absent, the next living rank of its node stands in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tokenloom.ops import routing
from tokenloom.runtime.topology import Topology

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
Block = tuple[Any, int]
"""Rows that lie together: whose they are, and how many."""


@dataclass(frozen=True)
class Paths:
    """The ways of one rank's rows, while some ranks take no part.

    Attributes:
        absent: those.
        forwarders: on each node, who forwards for this rank; None if the whole node is absent.
        served: for each living rank of this node, the living ranks that it forwards for, ascending.
        living: living ranks of each node.
    """

    absent: frozenset[int]
    forwarders: list[int | None]
    served: dict[int, list[int]]
    living: list[list[int]]


def find_paths(topology: Topology, rank: int, absent: frozenset[int]) -> Paths:
    """The paths of a rank."""
    living = [[each for each in ranks if each not in absent] for ranks in topology.nodes]
    node = topology.node_of[rank]
    served: dict[int, list[int]] = {each: [] for each in living[node]}
    for source in range(len(topology.node_of)):
        if source not in absent:
            served[_forwarder(topology, source, node, absent)].append(source)  # type: ignore[index]  # this rank lives
    forwarders = [_forwarder(topology, rank, each, absent) if there else None for each, there in enumerate(living)]
    return Paths(absent, forwarders, served, living)


def _forwarder(topology: Topology, source: int, node: int, absent: frozenset[int]) -> int | None:
    """Who forwards between a rank and a node."""
    ranks, rail = topology.nodes[node], source % topology.ranks_per_node
    return next((each for each in (*ranks[rail:], *ranks[:rail]) if each not in absent), None)


def arrange(rows: torch.Tensor, came: Sequence[Block], wanted: Sequence[Block]) -> torch.Tensor:
    """Bring blocks of rows into another order.

    Args:
        rows: [n, w], contiguous.
        came: the blocks as they lie.
        wanted: the blocks as they shall lie. Those that have not come are zero.
    """
    if list(came) == list(wanted):
        return rows
    ends = np.cumsum([0, *(count for _, count in came)])
    starts = {key: int(start) for (key, _), start in zip(came, ends[:-1], strict=True)}
    absent = any(count and key not in starts for key, count in wanted)
    nothing = len(rows)  # index of a row of zeros
    pieces = [
        np.arange(starts[key], starts[key] + count) if key in starts else np.full(count, nothing)
        for key, count in wanted
    ]
    index = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *pieces])).to(rows.device)
    if absent:
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return routing.gather_rows(rows, index)


def columns(rows: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Copy columns of contiguous uint8 [n, b], as words where they are some. The copy begins where any word may."""
    word = next(each for each in WORDS if not any(at % each.itemsize for at in (start, end, rows.shape[1])))
    part = rows.view(word)[:, start // word.itemsize : end // word.itemsize]
    return part.clone(memory_format=torch.contiguous_format).view(torch.uint8)
