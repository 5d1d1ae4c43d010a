"""Calls between nodes as tests make them: arguments, outputs and what these must be.

One process launches the kernels of all ranks, on the emulator, or of its own, on a GPU; see :class:`Nodes`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.cases import BF16, FP8, FP32, Case, Problem, expert_rows, same_bits, same_routed
from tokenloom import reference
from tokenloom.backends.peers.buffers import control_layout, staged_layout
from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.combine.launch import max_chunks
from tokenloom.kernels.combine.launch_network import HEADER_BYTES, CombineNetworkVariant
from tokenloom.kernels.common import CLAIMS, TURN_WORDS, TURNS, block_count_words
from tokenloom.kernels.common.rail import Regions, chunk_rows, region_bytes
from tokenloom.kernels.dispatch.launch_network import DispatchNetworkVariant
from tokenloom.plan import align_up
from tokenloom.runtime.symmetric_memory import BufferLayout

PARTS = ("rows", "row_scales", "row_ids", "row_weights", "row_places", "row_tokens")
DISPATCHES, COMBINES = 0, 1
CALL_WORDS = TURN_WORDS + 1 + CLAIMS
"""int32 words of a rank for its calls: epoch, masked ranks, blocks out, claims."""
NOWHERE = 1
"""Addresses of memory on other nodes: whoever touches it stops the process."""


@dataclass
class Own:
    """Addresses that kernels of one rank are told in every call; ``state`` of CALL_WORDS, ``rail`` of STATE_BYTES."""

    control: int
    state: int
    record: int
    fault: int
    fault_claimed: int
    comm: int
    window: int
    base: int
    rail: int


class Nodes(ABC):
    """Ranks whose kernels this process launches, in nodes of others.

    Args:
        problem: whose sizes they have, and by default whose tensors.
        ranks_per_node: of them.
        chunks: puts to each node.
        region: bytes of the largest region that is put.
        ranks: those of this process.
        device: of their memory.
        blocks: of each kernel.
        timeout_ns: of waits; open_timeout_ns, an attribute, is the same.
    """

    own: dict[int, Own]

    def __init__(
        self,
        problem: Problem,
        ranks_per_node: int,
        chunks: int,
        region: int,
        *,
        ranks: range,
        device: str,
        blocks: int,
        timeout_ns: int,
    ) -> None:
        plan = self.plan = problem.plan
        self.problem, self.ranks_per_node, self.ranks = problem, ranks_per_node, ranks
        self.device, self.blocks, self.timeout_ns, self.open_timeout_ns = device, blocks, timeout_ns, timeout_ns
        self.nodes, self.chunks = plan.num_ranks // ranks_per_node, chunks
        self.regions = Regions(self.nodes, region, chunks, chunk_rows(plan, chunks))
        self.layout = control_layout(plan)

    @abstractmethod
    def shared(self, num_bytes: int) -> dict[int, torch.Tensor]:
        """Memory of so many bytes on each rank, zeros or not.

        Returns:
            By rank of this process: int64 [W], where all ranks' memory is, or NOWHERE if that is on another node.
        """

    @abstractmethod
    def launch(self, rank: int, spec: KernelSpec, args: Any) -> None:
        """Put a kernel on the stream of a rank."""

    def stale(self, count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Memory that nobody has written, aligned as kernels need it."""
        return stale(count, dtype, self.device)

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy where kernels read it."""
        return tensor.to(self.device, copy=True)

    def open(self, args: Any, rank: int, traffic: int, variant: object) -> None:
        """Tell a kernel of the call, which means a variant to all ranks, and of the network."""
        own, call = self.own[rank], args.call
        call.peers, call.headers = own.control, self.layout.offset("headers")
        call.epoch, call.blocks_out = own.state, own.state + 4 * TURN_WORDS
        call.claimed = call.blocks_out + 4
        call.fault, call.fault_claimed, call.record = own.fault, own.fault_claimed, own.record
        call.open_timeout_ns, call.timeout_ns = self.open_timeout_ns, self.timeout_ns
        call.options_hash = int.from_bytes(hashlib.sha256(str(variant).encode()).digest()[:8], "little")
        call.rank = rank
        self.regions.fill(args.rail, traffic, comm=own.comm, window=own.window, base=own.base, state=own.rail)


@dataclass(frozen=True)
class Form:
    """Tokens, and how calls take them between nodes."""

    case: Case
    chunks: int = 1
    quantize: str = ""
    layout: str = "slots"

    def variants(
        self, problem: Problem, ranks_per_node: int, out_dtype: torch.dtype | None = None
    ) -> tuple[DispatchNetworkVariant, CombineNetworkVariant]:
        """The kernels; sums come home as ``out_dtype``, by default that of the wire."""
        wire, by_token = FP32 if self.case.dtype == FP32 else BF16, self.layout == "rank"
        dispatches = DispatchNetworkVariant(
            problem.plan, ranks_per_node, layout=self.layout, x_dtype=self.case.dtype, quantize=self.quantize
        )
        combines = CombineNetworkVariant(
            problem.plan,
            ranks_per_node,
            layout="rank" if by_token else "expert",
            y_dtype=wire,
            wire_dtype=wire,
            out_dtype=out_dtype or wire,
            weights="none" if by_token or problem.topk_weights is None else "received",
        )
        return dispatches, combines


class DispatchOfAll:
    """One dispatch on all ranks of this process, with inputs and outputs of its own."""

    def __init__(
        self,
        nodes: Nodes,
        variant: DispatchNetworkVariant,
        capacity: int | None = None,
        problem: Problem | None = None,
    ) -> None:
        self.nodes, self.variant, self.problem, self.plan = nodes, variant, problem or nodes.problem, nodes.plan
        assert self.problem.plan == self.plan
        self.in_slots = variant.layout == "slots"
        self.capacity = capacity or self.problem.rows_needed("slots") + 3
        if not self.in_slots:
            self.capacity = self.plan.worst_case_rows("rank")
        self.given = {rank: [nodes.moved(each) for each in _inputs(self.problem, rank)] for rank in nodes.ranks}
        self.out = {rank: self._outputs(rank) for rank in nodes.ranks}

    @property
    def num_places(self) -> int:
        """Of rows on a rank."""
        return self.plan.experts_per_rank * self.capacity if self.in_slots else self.capacity

    def _outputs(self, rank: int) -> SimpleNamespace:
        plan, nodes, problem, stale = self.plan, self.nodes, self.problem, self.nodes.stale
        local, received, places = plan.experts_per_rank, plan.worst_case_rows("rank"), self.num_places
        dtype, num_tokens = self.variant.near.row_dtype, len(problem.xs[rank])
        rows = nodes.nodes * plan.max_tokens_per_rank
        return SimpleNamespace(
            rows=stale(places * plan.hidden, dtype),
            scales=stale(places * plan.scales_per_token, torch.float32) if dtype == FP8 else None,
            ids=stale(received * plan.top_k),
            weights=None if problem.topk_weights is None else stale(received * plan.top_k, torch.float32),
            places=stale(received * plan.top_k),
            tokens=stale(received),
            ranges=stale(2 * plan.num_experts),
            counts=stale(2 + plan.num_ranks + 2 * local),
            all_counts=stale(plan.num_ranks * (plan.num_ranks + plan.num_experts)),
            slots=stale(max(1, num_tokens * (plan.num_ranks + plan.top_k))),
            node_rows=stale(max(1, num_tokens * nodes.nodes)),
            forwarded_slots=stale(rows * nodes.ranks_per_node),
            forwarded_rows=stale(nodes.nodes),
        )

    def replace(self, problem: Problem) -> None:
        """Another problem with as many tokens takes the place of this one, in the same memory."""
        for rank, tensors in self.given.items():
            for tensor, new in zip(tensors, _inputs(problem, rank), strict=True):
                tensor.copy_(new)
        self.problem = problem

    def launch(self, staging: Staging, ranks: Iterable[int] | None = None) -> None:
        """On these ranks, or on all."""
        for rank in self.nodes.ranks if ranks is None else ranks:
            self.nodes.launch(rank, self.variant.spec(), self._args(rank, staging))

    def _args(self, rank: int, staging: Staging) -> Any:
        plan, problem, out, nodes = self.plan, self.problem, self.out[rank], self.nodes
        args = self.variant.spec().args()
        nodes.open(args, rank, DISPATCHES, self.variant)

        def address(tensor: torch.Tensor | None) -> int:
            return 0 if tensor is None else tensor.data_ptr()

        x, ids, *others = map(address, self.given[rank])
        args.x, args.topk_ids = x, ids
        args.scales = others.pop(0) if problem.scales is not None else 0
        args.topk_weights = others.pop(0) if problem.topk_weights is not None else 0
        args.slots, args.all_counts, args.num_rows = address(out.slots), address(out.all_counts), address(out.counts)
        args.source_counts = args.num_rows + 4
        args.expert_counts = args.source_counts + 4 * plan.num_ranks
        args.expert_offsets = args.expert_counts + 4 * plan.experts_per_rank
        args.num_tokens = len(problem.xs[rank])
        args.out_rows, args.out_scales = address(out.rows), address(out.scales)
        args.out_ids, args.out_weights, args.out_places = address(out.ids), address(out.weights), address(out.places)
        args.out_tokens, args.slot_ranges = address(out.tokens), address(out.ranges)
        args.done_flags = nodes.layout.offset("done_flags")
        args.peers = address(staging.tables[rank])
        for name in PARTS:
            setattr(args, name, staging.layout.offset(f"{name}0"))
        args.turn_bytes = staging.layout.offset("rows1") - staging.layout.offset("rows0")
        args.block_counts = address(staging.block_counts[rank])
        args.call.block_flags = args.block_counts
        args.max_tokens, args.capacity, args.alignment = plan.max_tokens_per_rank, self.capacity, 1
        args.ids_are_int64, args.send_blocks = problem.topk_ids[rank].dtype == torch.int64, nodes.blocks
        args.node_rows, args.forwarded_slots = address(out.node_rows), address(out.forwarded_slots)
        args.forwarded_rows = address(out.forwarded_rows)
        return args

    def wanted(self) -> list[reference.Routed]:
        """What the reference gives on all ranks, also those of other processes."""
        options = {}
        if self.variant.quantize:
            options = {"to_fp8": True, "power_of_two_scales": self.variant.quantize == "power of two"}
        bounds = {"capacity": self.capacity, "bounded": True} if self.in_slots else {}
        return self.problem.dispatched(self.variant.layout, **bounds, **options)

    def check(self) -> None:
        """Every rank's outputs are the reference's, bit for bit."""
        plan, wanted = self.plan, self.wanted()
        local = plan.experts_per_rank
        for rank, out in self.out.items():
            num_rows, source_counts, expert_counts, _ = out.counts.split([1, plan.num_ranks, local, local + 1])
            first, second = (local, self.capacity) if self.in_slots else (plan.num_ranks, plan.max_tokens_per_rank)
            by_token = not self.in_slots
            got: Any = SimpleNamespace(
                layout=self.variant.layout,
                tokens=out.rows.view(first, second, plan.hidden),
                scales=None if out.scales is None else out.scales.view(first, second, -1),
                topk_ids=out.ids.view(first, second, -1) if by_token else None,
                topk_weights=out.weights.view(first, second, -1) if by_token and out.weights is not None else None,
                num_rows=num_rows.view(()) if self.in_slots else int(num_rows),
                source_counts=source_counts,
                expert_counts=expert_counts,
                expert_offsets=None,
                slot_ranges=out.ranges.view(local, plan.num_ranks, 2) if self.in_slots else None,
            )
            same_routed(got, wanted[rank], plan)


class CombineOfAll:
    """One combine on all ranks of this process.

    Args:
        dispatch: whose rows come home, when it is done.
        status: of each rank; others than 0 refuse the call.
    """

    def __init__(
        self, dispatch: DispatchOfAll, variant: CombineNetworkVariant, status: dict[int, int] | None = None
    ) -> None:
        nodes = self.nodes = dispatch.nodes
        self.dispatch, self.variant, self.plan, self.status = dispatch, variant, dispatch.plan, status or {}
        self._follow()
        self.given = {rank: nodes.moved(self.ys[rank]) for rank in nodes.ranks}
        self.outs = {rank: self._output(len(dispatch.problem.xs[rank])) for rank in nodes.ranks}

    def _follow(self) -> None:
        self.routed = self.dispatch.wanted()
        self.ys = expert_rows(self.dispatch.problem, self.routed, self.variant.y_dtype)

    def _output(self, num_tokens: int) -> torch.Tensor:
        hidden = self.plan.hidden
        memory = self.nodes.stale(max(1, num_tokens) * hidden, self.variant.out_dtype)
        return memory[: num_tokens * hidden].view(-1, hidden)

    def follow(self) -> None:
        """Take the rows of the problem that the dispatch has now, in the same memory."""
        self._follow()
        for rank, y in self.given.items():
            y.copy_(self.ys[rank])

    def launch(self, partials: Partials, ranks: Iterable[int] | None = None) -> None:
        """On these ranks, or on all."""
        for rank in self.nodes.ranks if ranks is None else ranks:
            self.nodes.launch(rank, self.variant.spec(), self._args(rank, partials))

    def _args(self, rank: int, partials: Partials) -> Any:
        plan, nodes, out = self.plan, self.nodes, self.dispatch.out[rank]
        args = self.variant.spec().args()
        nodes.open(args, rank, COMBINES, self.variant)
        args.call.status = self.status.get(rank, 0)
        args.y, args.row_places = self.given[rank].data_ptr(), out.places.data_ptr()
        args.row_tokens = out.tokens.data_ptr()
        args.slots, args.all_counts = out.slots.data_ptr(), out.all_counts.data_ptr()
        args.weights = 0 if out.weights is None else out.weights.data_ptr()
        args.out, args.num_tokens = self.outs[rank].data_ptr(), len(self.dispatch.problem.xs[rank])
        args.capacity, args.max_tokens = self.dispatch.num_places, plan.max_tokens_per_rank
        args.chunk_flags, args.max_chunks = nodes.layout.offset("chunk_flags"), max_chunks(plan)
        args.peers, args.combine_turns, args.send_blocks = partials.tables[rank].data_ptr(), TURNS, nodes.blocks
        args.partials_bytes, args.turn_bytes = partials.size, nodes.nodes * partials.size
        args.node_rows, args.forwarded_slots = out.node_rows.data_ptr(), out.forwarded_slots.data_ptr()
        args.forwarded_rows = out.forwarded_rows.data_ptr()
        return args

    def check(self) -> None:
        """Every rank's sums are the reference's, bit for bit."""
        problem, variant, size = self.dispatch.problem, self.variant, self.nodes.ranks_per_node
        wanted = reference.combine(
            self.plan,
            self.ys,
            self.routed,
            problem.topk_ids,
            problem.topk_weights if self.dispatch.in_slots else None,
            mode="per_node",
            wire_dtype=variant.wire_dtype,
            out_dtype=variant.out_dtype,
            nodes=[range(first, first + size) for first in range(0, self.plan.num_ranks, size)],
        )
        for rank, out in self.outs.items():
            same_bits(out, wanted[rank], f"sums of rank {rank}")


class Partials:
    """Where partial sums of a node meet, on all ranks."""

    def __init__(self, nodes: Nodes, variant: CombineNetworkVariant) -> None:
        self.size = align_up(variant.partials_rows * variant.record_bytes, 128)
        self.tables = nodes.shared(TURNS * nodes.nodes * self.size)


class Staging:
    """Where rows arrive over NVLink, on all ranks."""

    def __init__(self, nodes: Nodes, value_bytes: int) -> None:
        self.layout: BufferLayout = staged_layout(nodes.plan, value_bytes, 0)
        self.tables = nodes.shared(self.layout.total_bytes)
        words = block_count_words(nodes.plan)
        self.block_counts = {rank: torch.zeros(words, dtype=torch.int32, device=nodes.device) for rank in nodes.ranks}


def region_for(dispatch: DispatchNetworkVariant, combine: CombineNetworkVariant) -> int:
    """Bytes of a region that is put, for either."""
    return max(
        region_bytes(dispatch.plan, dispatch.header_bytes, dispatch.record_bytes),
        region_bytes(combine.plan, HEADER_BYTES, combine.record_bytes),
    )


def stale(count: int, dtype: torch.dtype = torch.int32, device: str = "cpu") -> torch.Tensor:
    """Memory that nobody has written, at a multiple of 128."""
    memory = torch.full((count * dtype.itemsize + 128,), 0x5A, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % 128
    return memory[start : start + count * dtype.itemsize].view(dtype)


def _inputs(problem: Problem, rank: int) -> list[torch.Tensor]:
    """x, ids, and what else there is of scales and weights."""
    others = [each[rank] for each in (problem.scales, problem.topk_weights) if each is not None]
    return [problem.xs[rank], problem.topk_ids[rank], *others]
