"""Rows inside a node by the kernels of backend "nvlink", which the ranks of each node have among themselves.

Handing out. The rows that came from one other node are one dispatch inside the node, in layout "token": each rank
sends those of the source on its rail, at most M, to the ranks that their flags name. What a rank receives lies in the
order (rail, token), which is the order (source rank, token) of that node. So the dispatches of all nodes, one behind
the other, give the order that is asked for. They go in a ring, as the rows come over the network, so that NVLink
carries what has come while the network brings the rest.

Adding. Sums of a node are the combine of that dispatch: in float32, over ranks ascending, rounded once.

Collecting. Rows that come together unchanged are a dispatch too, of rows with one destination each, which is the rank
that forwards for their source. For one other node a rank may have up to G * M of them, but a plan has room for M of
each rank. So they go in as many dispatches as M allows for the rank that has most: all ranks know all counts. One is
enough where no rank received more than M rows from that node. A plan with room for G * M rows of each rank would need
G times the memory.

A dispatch only copies, so rows of any content may pass for floating-point numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch

from tokenloom.backends import peers
from tokenloom.backends.exchange import Arriving, Here
from tokenloom.backends.nodes.hierarchical.inside import CollectivesInside, InsideNode, Legs, SentRows, add_collected
from tokenloom.backends.nodes.hierarchical.node_ranks import NodeRanks
from tokenloom.backends.nodes.hierarchical.paths import Block, Paths, arrange, columns
from tokenloom.backends.peers.backend import NvlinkBackend
from tokenloom.backends.peers.buffers import (
    BULK_BYTES,
    control_layout,
    data_layout,
    receive_rows,
    sends_before_opening,
    staged_layout,
    sums_in_turns_layout,
)
from tokenloom.backends.peers.handle import PeerHandle
from tokenloom.backends.registration import Availability, Request
from tokenloom.backends.seam import CombineKind, CombineOptions, DispatchKind, DispatchOptions, Tokens, Wait
from tokenloom.errors import CommunicatorBroken, PeerTimeout
from tokenloom.plan import FP8_BLOCK, MAX_TOP_K, Plan, align_up
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.rendezvous import agree
from tokenloom.runtime.topology import Topology

METADATA = 0
"""Key of the width of rows without a payload. Those of others are the bytes of a value."""
SUMMED = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that kernels add, in float32."""


class NvlinkInside:
    """Carries rows between the ranks of a node by kernels. Making one is collective over all nodes.

    A backend "nvlink" moves rows of one width. There is one for each of a few widths, made when a call first needs it,
    and narrower rows are padded.

    Args:
        plan, ranks: sizes and group, whose topology has rails.
        num_sms, checked: see backend "nvlink".
        dtype: of the tokens, where it is known.
    """

    transport = "nvlink"
    by_node = True

    def __init__(
        self, plan: Plan, ranks: RankGroup, num_sms: int, checked: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        self._plan, self._num_sms, self._checked = plan, num_sms, checked
        self._ranks, self._nodes = NodeRanks(ranks), ranks.topology.nodes
        self._node = ranks.topology.node_of[ranks.rank]
        self._plans = inner_plans(plan, self._ranks.num_ranks)
        self._backends: dict[int, NvlinkBackend] = {}
        self.sent = SentRows()
        try:
            # Now, so that it shows whether ranks can map each other's memory.
            self._backend((dtype or torch.bfloat16).itemsize)
        except Exception:
            self._ranks.close()
            raise

    # -- there ----------------------------------------------------------------------------------------------

    def hand_out(self, pieces: Sequence[Arriving], flags: slice, legs: Legs, paths: Paths) -> Arriving:
        assert not paths.absent, "no rank can be masked where kernels carry rows"
        place, out = self._ranks.rank, torch.empty(0, device="cpu")
        nothing = torch.tensor(-1, device=self._ranks.device)
        places = torch.arange(self._ranks.num_ranks, device=self._ranks.device)
        counts = [sum(legs.into_node[source][place] for source in node) for node in self._nodes]
        ends = list(accumulate(counts))
        handles: dict[int, PeerHandle] = {}
        for step, piece in enumerate(pieces):
            node = (self._node - step) % len(self._nodes)
            rows = piece.wait()
            if not handles:
                out = rows.new_empty(ends[-1], rows.shape[1])
            ids = torch.where(rows[:, flags].bool(), places, -1).to(torch.int32)
            handles[node], received, expired = self._dispatch(rows, ids)
            words = received[: counts[node]].view(torch.int64)[:, : rows.shape[1] // 8]
            # Where a wait has expired there are no ids, rather than what would lead out of bounds.
            room = out.view(torch.int64)[ends[node] - counts[node] : ends[node]]
            torch.where(expired, nothing, words, out=room)
            leaving = legs.into_node[self._nodes[node][place]]
            self.sent.inside_node += sum(leaving) - leaving[place]
        legs.handed_out = handles
        return Here(out)

    def _dispatch(self, rows: torch.Tensor, ids: torch.Tensor) -> tuple[PeerHandle, torch.Tensor, torch.Tensor]:
        """Send rows uint8 [F, b] to the ranks of this node that int32 [F, G] names.

        Returns:
            What remembers it; the received rows uint8 [G * M, at least b]; and a scalar on the device, whether a wait
            has expired. The rows are a view until the second next dispatch. Those behind the last one in use are
            unspecified.
        """
        key = min((key for key in self._plans if self._width(key) >= rows.shape[1]), key=self._width)
        x = _padded(rows, self._width(key)).view(_unit(key))
        options = DispatchOptions("token", 1, "bounded", self._plans[key].worst_case_rows("token"))
        kind = DispatchKind(options, x.dtype, ids.dtype, output_owner="but rows")
        with self._named_as_in_whole():
            backend = self._backend(key)
            handle, received = backend.prepare_dispatch(kind).send(Tokens(x, None, ids, None)).receive()
        return handle, received.view(torch.uint8), backend.launcher.outcomes.fault.claimed[0] != 0

    # -- back -----------------------------------------------------------------------------------------------

    def collect(self, rows: torch.Tensor, legs: Legs, paths: Paths) -> Iterator[tuple[torch.Tensor, list[Block]]]:
        assert not paths.absent, "no rank can be masked where kernels carry rows"
        ranks, place, most = range(self._ranks.num_ranks), self._ranks.rank, self._plan.max_tokens_per_rank
        for node, own in self._by_node(rows, legs):
            sources = self._nodes[node]
            counts = [legs.into_node[source] for source in sources]  # [rail, rank of this node]
            held = [sum(each[rank] for each in counts) for rank in ranks]
            begins = [sum(each[rank] for each in counts[:place]) for rank in ranks]  # of the rows for this rank
            ids = torch.full((len(own), len(ranks)), -1, dtype=torch.int32, device="cpu")
            ids[:, 0] = torch.from_numpy(np.repeat(np.arange(len(counts)), [each[place] for each in counts]))
            ids = ids.to(own.device)
            parts, came = [own[:0]], []
            # At least once, since ranks of other nodes may have rows, and make memory for them together with this one.
            for begin in range(0, max(1, *held), most):
                _, received, _ = self._dispatch(own[begin : begin + most], ids[begin : begin + most])
                for rank in ranks:
                    first, last = begins[rank], begins[rank] + counts[place][rank]
                    number = max(0, min(last, begin + most) - max(first, begin))
                    came.append(((rank, begin), number))
                here = received[: sum(number for _, number in came[-len(ranks) :])]
                parts.append(columns(here, 0, own.shape[1]))
            blocks = [((sources[place], self._ranks.members[rank]), counts[place][rank]) for rank in ranks]
            yield arrange(torch.cat(parts), came, sorted(came)), blocks

    def add(
        self, rows: torch.Tensor, tokens: torch.Tensor, legs: Legs, paths: Paths, dtype: torch.dtype
    ) -> Iterator[tuple[torch.Tensor, list[int]]]:
        if rows.dtype not in SUMMED or dtype != torch.float32:
            most, first = self._plan.max_tokens_per_rank, self._ranks.members[0]
            yield from add_collected(self, most, first, rows, tokens, legs, paths, dtype)
            return
        assert not paths.absent, "no rank can be masked where kernels carry rows"
        place, key, hidden = self._ranks.rank, rows.dtype.itemsize, rows.shape[1]
        rows = _padded(rows, self._width(key) // key)
        options = CombineOptions(False, wire_dtype=rows.dtype, out_dtype=rows.dtype, needs_grad=False)
        for node, own in self._by_node(rows, legs):
            with self._named_as_in_whole():
                handle = legs.handed_out[node]
                kind = CombineKind(handle.options.layout, own.dtype, options)
                sums = self._backend(key).prepare_combine(kind, handle.number).send(handle, own).receive()
            send = [0] * self._plan.num_ranks
            send[self._nodes[node][place]] = len(sums)
            yield sums[:, :hidden].contiguous(), send

    def _by_node(self, rows: torch.Tensor, legs: Legs) -> Iterator[tuple[int, torch.Tensor]]:
        """Each node, from the next one to the own one in a ring, and the rows [n, ...] for its ranks."""
        place = self._ranks.rank
        counts = [[legs.into_node[source][place] for source in node] for node in self._nodes]
        ends = list(accumulate(map(sum, counts)))
        for step in range(1, len(self._nodes) + 1):
            node = (self._node + step) % len(self._nodes)
            self.sent.inside_node += sum(counts[node]) - counts[node][place]
            yield node, rows[ends[node] - sum(counts[node]) : ends[node]]

    # -- backends and their memory --------------------------------------------------------------------------

    def _backend(self, key: int) -> NvlinkBackend:
        if key not in self._backends:
            self._backends[key] = NvlinkBackend(self._plans[key], self._ranks, self._num_sms, self._checked)
        return self._backends[key]

    def _width(self, key: int) -> int:
        """Bytes of a row."""
        return self._plans[key].hidden * _unit(key).itemsize

    @contextmanager
    def _named_as_in_whole(self) -> Iterator[None]:
        """Name a missing rank as the whole group knows it, and break the whole group."""
        try:
            yield
        except PeerTimeout as timeout:
            if self._ranks.whole.is_broken:  # which waited itself
                raise
            named = self._ranks.in_whole(timeout)
            self._ranks.whole.mark_broken(named)
            raise named from timeout

    def check(self, wait: Wait) -> None:
        with self._named_as_in_whole():
            for backend in self._backends.values():
                backend.check(wait)

    def memory(self) -> list[str]:
        lines = []
        for key, plan in self._plans.items():
            eager = (staged_layout, sums_in_turns_layout) if sends_before_opening(plan) else ()
            layouts = (data_layout, *eager)
            size = control_layout(plan).total_bytes
            size += sum(layout(plan, _unit(key).itemsize, receive_rows(plan)).total_bytes for layout in layouts)
            when = "" if key in self._backends else ", made at the first call that needs it"
            lines.append(f"inside the node, rows of {self._width(key)} bytes: {size / 1e6:.1f} MB{when}")
        return lines

    def close(self) -> None:
        for backend in self._backends.values():
            backend.close()
        self._ranks.close()


def inner_plans(plan: Plan, ranks_per_node: int) -> dict[int, Plan]:
    """Plans of what moves rows inside a node: an expert stands for a rank of it.

    Returns:
        By bytes of a value, a plan for rows of a payload with all that travels beside it; and one for that alone.
    """
    scales = 4 * (plan.hidden // FP8_BLOCK)

    def inner(key: int) -> Plan:
        beside = 4 * (1 + plan.top_k) + max(key, 4) * plan.top_k + ranks_per_node  # numbers, ids, weights, flags
        width = align_up(key * plan.hidden + (scales if key == 1 else 0) + beside, BULK_BYTES)
        sizes = (width // _unit(key).itemsize, ranks_per_node, plan.max_tokens_per_rank)
        return Plan(ranks_per_node, ranks_per_node, *sizes)

    return {key: inner(key) for key in (METADATA, 1, 2, 4, 8)}


def make_inside(request: Request, ranks: RankGroup) -> InsideNode:
    """Make what carries rows inside nodes: kernels where they work on all, else collectives. Collective on GPUs."""
    plan = request.plan
    assert plan is not None
    if ranks.device.type == "cpu":  # where a rank may come back alone, and find the others with what they have
        return CollectivesInside(ranks, plan.max_tokens_per_rank)
    why = why_not(request, ranks)
    if why:
        return CollectivesInside(ranks, plan.max_tokens_per_rank, why)
    kernels: InsideNode | None = None
    try:
        kernels = NvlinkInside(plan, ranks, request.fixed_sms, request.checked, request.dtype)
    except (PeerTimeout, CommunicatorBroken):
        raise
    except Exception as error:
        why = str(error) or type(error).__name__
    failed = [
        (rank, each) for rank, each in enumerate(ranks.all_gather_object(why, "making memory inside nodes")) if each
    ]
    if kernels is not None and not failed:
        return kernels
    if kernels is not None:
        kernels.close()
    rank, why = failed[0]
    return CollectivesInside(ranks, plan.max_tokens_per_rank, f"nvlink failed on rank {rank}: {why}")


def why_not(request: Request, ranks: RankGroup) -> str:
    """Why kernels cannot carry rows inside every node, "" if they can: the same on all ranks. Collective."""
    assert request.plan is not None
    if ranks.topology.ranks_per_node > MAX_TOP_K:  # ranks stand for experts of a token
        return f"nvlink serves at most {MAX_TOP_K} ranks, nodes have {ranks.topology.ranks_per_node}"
    inner = inner_plans(request.plan, ranks.topology.ranks_per_node)[2]
    wanted = replace(request, plan=inner, dtype=None, num_sms=request.fixed_sms)
    found = agree(ranks, lambda: ({}, peers.REGISTRATION.probe(wanted)), "looking for kernels inside nodes")
    return objection(found, ranks.topology)


def objection(by_rank: Sequence[Availability], topology: Topology) -> str:
    """Say why kernels cannot run inside some node; "" if they can."""
    for node, members in enumerate(topology.nodes):
        found = [by_rank[rank] for rank in members]
        failing = [(rank, each.why) for rank, each in enumerate(found) if not each.works]
        for rank, why in failing or peers.REGISTRATION.objections(found):
            return f"nvlink does not work on rank {rank} of the {len(members)} of node {node}: {why}"
    return ""


def _unit(key: int) -> torch.dtype:
    """The dtype that rows of this width pass for. They share its memory."""
    return torch.float32 if key > 2 else torch.bfloat16


def _padded(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Rows of at least this width, contiguous."""
    if rows.shape[1] == width:
        return rows.contiguous()
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))
