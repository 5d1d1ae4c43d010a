"""Staged dispatches of rank 0 of two, over buffers that stay: what it is given, what it leaves, what it sends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from tests.kernels.one_gpu import DEVICE
from tests.kernels.played_peer import counts_of, sent_rows
from tests.kernels.silent_peer import ABSENT, BLOCKS, NAN_THAT_TRAVELS, STALE, Rank0, int32, signed
from tests.support.cases import FP8, Problem, same_bytes, same_routed
from tokenloom.backends.peers.buffers import ARRIVING, arriving_part, staged_layout
from tokenloom.kernels.common import H200, HEADER_WORDS, TURN_WORDS, TURNS, block_count_words
from tokenloom.kernels.dispatch.launch import DispatchVariant
from tokenloom.runtime.kernel_reports import CallOutcome

PARTS_OF_A_ROW = ("rows", "row_scales", "row_ids", "row_weights", "row_places", "row_tokens")


@dataclass(frozen=True)
class Staged:
    """Options of staged dispatches.

    Attributes:
        layout, quantize, scale_layout: as DispatchVariant has them.
        halves: two kernels.
        capacity: None is a little more than is needed.
        alignment: of layout "expert".
        blocks: of every rank's kernels.
        eager: rows leave before other ranks have opened the call, as those of combines may.
    """

    eager: ClassVar[bool] = True

    layout: str
    quantize: str = ""
    scale_layout: str = "rows"
    halves: bool = False
    capacity: int | None = None
    alignment: int = 1
    blocks: int = BLOCKS


def stale(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A tensor on the device, all of whose words are STALE."""
    count = int(torch.Size(shape).numel())
    words = torch.full((-(-count * dtype.itemsize // 4),), STALE, dtype=torch.int32, device=DEVICE)
    return words.view(torch.uint8)[: count * dtype.itemsize].view(dtype).view(shape)


class StagedBuffers:
    """Where staged dispatches arrive, on both ranks, and what rank 1's is expected to hold."""

    def __init__(self, rank0: Rank0, row_dtype: torch.dtype) -> None:
        plan = rank0.plan
        self.rank0, self.row_dtype = rank0, row_dtype
        self.layout = staged_layout(plan, max(row_dtype.itemsize, 2), 0)
        self.memory = rank0.stale(self.layout, ABSENT)
        self.expected = self.memory[1].cpu()
        self.peers = rank0.addresses(self.memory)
        (first, size), (second, _) = (arriving_part(self.layout, ARRIVING[staged_layout], turn) for turn in range(2))
        rank0.arrivals[0] = torch.tensor([self.memory[0].data_ptr() + first, second - first, size])
        self.block_counts = int32([0] * block_count_words(plan))

    def part(self, name: str, memory: torch.Tensor, turn: int, source: int) -> torch.Tensor:
        """What a source fills of a region: [M, ...]."""
        plan = self.rank0.plan
        widths = {
            "rows": (plan.hidden, self.row_dtype),
            "row_scales": (plan.scales_per_token, torch.float32),
            "row_weights": (plan.top_k, torch.float32),
            "row_tokens": (1, torch.int32),
        }
        width, dtype = widths.get(name, (plan.top_k, torch.int32))
        offset, first = self.layout.offset(f"{name}{turn}"), source * plan.max_tokens_per_rank * width * dtype.itemsize
        size = plan.max_tokens_per_rank * width * dtype.itemsize
        return memory.view(torch.uint8)[offset + first : offset + first + size].view(dtype).view(-1, width)

    def put(self, memory: torch.Tensor, problem: Problem, options: Staged, source: int, rank: int, turn: int) -> None:
        """Fill the part of a source in a region of a rank, with what it sends."""
        sent = sent_rows(problem, source, rank, options.quantize)
        for name in PARTS_OF_A_ROW:
            values = getattr(sent, name)
            if values is None or len(values) == 0:
                continue
            part = self.part(name, memory, turn, source)[: len(values)]
            if name in ("row_ids", "row_places"):  # -1 says that a word is absent
                values = values + 1
            words = values.view(len(values), -1).view(torch.int32)
            part.view(torch.int32).copy_(torch.where(words == ABSENT, NAN_THAT_TRAVELS, words))


class StagedCall:
    """One dispatch. Kernels are compiled when it is made.

    Args:
        problem: tensors of both ranks, with the plan of the buffers.
        epoch: of the call; by default the next.
    """

    def __init__(self, buffers: StagedBuffers, problem: Problem, options: Staged, epoch: int | None = None) -> None:
        rank0, plan = buffers.rank0, problem.plan
        assert plan == rank0.plan
        self.buffers, self.problem, self.options, self.rank0 = buffers, problem, options, rank0
        self.epoch = rank0.epoch if epoch is None else epoch
        capacity = options.capacity
        if capacity is None:
            capacity = problem.rows_needed(options.layout, options.alignment) + 3
        local, received = plan.experts_per_rank, plan.worst_case_rows("rank")
        self.capacity = capacity
        self.places = local * capacity if options.layout == "slots" else capacity
        weights = problem.topk_weights
        self.x = problem.xs[0].to(DEVICE)
        self.x_scales = None if problem.scales is None else problem.scales[0].to(DEVICE)
        self.topk_ids = problem.topk_ids[0].to(DEVICE)
        self.topk_weights = None if weights is None else weights[0].to(DEVICE)
        self.tokens = stale(self.places, plan.hidden, dtype=buffers.row_dtype)
        self.scales = self._new_scales() if buffers.row_dtype == FP8 else None
        self.ids, self.route_places = stale(received, plan.top_k), stale(received, plan.top_k)
        self.weights = None if weights is None else stale(received, plan.top_k, dtype=torch.float32)
        self.row_tokens = stale(received)
        self.counts = stale(1 + plan.num_ranks + local + local + 1)
        self.slot_ranges = stale(local, plan.num_ranks, 2)
        self.all_counts = stale(plan.num_ranks, plan.num_ranks + plan.num_experts)
        self.slots = stale(len(self.x) * (plan.num_ranks + plan.top_k))
        self.half_epoch = int32([0] * TURN_WORDS)
        variant = DispatchVariant(
            plan,
            layout=options.layout,
            x_dtype=self.x.dtype,
            quantize=options.quantize,
            staged=True,
            scale_layout=options.scale_layout,
        )
        parts = ("send", "receive") if options.halves else ("whole",)
        self.kernels = [self._kernel(replace(variant, part=part)) for part in parts]

    def _new_scales(self) -> torch.Tensor:
        plan, blocks = self.problem.plan, self.problem.plan.scales_per_token
        if self.options.scale_layout == "rows":
            return stale(self.places, blocks, dtype=torch.float32)
        words, dtype = blocks, torch.float32
        if self.options.scale_layout == "packed":
            words, dtype = -(-blocks // 4), torch.int32
        return stale(plan.experts_per_rank, words, self.capacity, dtype=dtype).transpose(1, 2)

    def _kernel(self, variant: DispatchVariant) -> Any:
        plan, buffers = self.problem.plan, self.buffers
        kernel = self.rank0.kernel(variant, self.half_epoch)
        args, layout, control = kernel.args, buffers.layout, self.rank0.layout

        def address(tensor: torch.Tensor | None) -> int:
            return 0 if tensor is None else tensor.data_ptr()

        args.x, args.scales = address(self.x), address(self.x_scales)
        args.topk_ids, args.topk_weights = address(self.topk_ids), address(self.topk_weights)
        args.done_flags, args.row_flags = control.offset("done_flags"), control.offset("row_flags")
        args.peers = buffers.peers
        for name in PARTS_OF_A_ROW:
            setattr(args, name, layout.offset(f"{name}0"))
        args.turn_bytes = layout.offset("rows1") - layout.offset("rows0")
        args.block_counts = address(buffers.block_counts)
        args.call.block_flags = args.block_counts
        args.slots, args.all_counts = address(self.slots), address(self.all_counts)
        args.num_rows, args.source_counts = address(self.counts), address(self.counts) + 4
        args.expert_counts = args.source_counts + 4 * plan.num_ranks
        args.expert_offsets = args.expert_counts + 4 * plan.experts_per_rank
        args.slot_ranges = address(self.slot_ranges)
        args.out_rows, args.out_scales = address(self.tokens), address(self.scales)
        args.out_ids, args.out_weights = address(self.ids), address(self.weights)
        args.out_places, args.out_tokens = address(self.route_places), address(self.row_tokens)
        args.num_tokens, args.max_tokens = len(self.x), plan.max_tokens_per_rank
        args.capacity = self.capacity if self.options.layout == "slots" else self.places
        args.alignment, args.ids_are_int64 = self.options.alignment, self.topk_ids.dtype == torch.int64
        args.peer_blocks = variant.sending_blocks(self.options.blocks, H200)
        return kernel

    # -- rank 1 ---------------------------------------------------------------------------------------------

    def open_by_rank_1(self, **header: int) -> None:
        """Say what it sends, or what is wrong with it."""
        self.rank0.open_by_rank_1(counts_of(self.problem, 1), epoch=self.epoch, **header)

    def send_by_rank_1(self, but_last: int = 0) -> None:
        """Put its rows into the region of this call, but for so many of the last words."""
        turn, memory = self.epoch % TURNS, self.buffers.memory[0]
        self.buffers.put(memory, self.problem, self.options, 1, 0, turn)
        if but_last:
            last = len(sent_rows(self.problem, 1, 0).row_tokens) - 1
            self.buffers.part("rows", memory, turn, 1)[last].view(torch.int32)[-but_last:] = ABSENT

    # -- rank 0 ---------------------------------------------------------------------------------------------

    def send(self) -> CallOutcome | None:
        """The first half, or all of the call."""
        assert self.epoch == self.rank0.epoch
        return self.rank0.run(self.kernels[0], self.options.blocks)

    def receive(self) -> CallOutcome | None:
        """The second half."""
        return self.rank0.run(self.kernels[1], self.options.blocks, opens=False)

    def routed(self) -> Any:
        """The outputs, as Routed has them."""
        plan, layout = self.problem.plan, self.options.layout
        shape = (plan.experts_per_rank, -1) if layout == "slots" else (-1,)
        num_rows, source_counts, expert_counts, offsets = torch.split_with_sizes(
            self.counts, [1, plan.num_ranks, plan.experts_per_rank, plan.experts_per_rank + 1]
        )
        scales = self.scales
        if scales is not None and scales.dim() == 2:
            scales = scales.view(*shape, scales.shape[-1])
        return SimpleNamespace(
            layout=layout,
            tokens=self.tokens.view(*shape, plan.hidden),
            scales=scales,
            topk_ids=None,
            topk_weights=None,
            num_rows=num_rows.view(()),
            source_counts=source_counts,
            expert_counts=expert_counts,
            expert_offsets=offsets if layout == "expert" else None,
            slot_ranges=self.slot_ranges if layout == "slots" else None,
        )

    def check_received(self) -> None:
        """The outputs are those of the reference."""
        options = self.options
        given: dict[str, Any] = {"layout": options.layout, "alignment": options.alignment, "capacity": self.capacity}
        if options.quantize:
            given |= {"to_fp8": True, "power_of_two_scales": options.quantize == "power of two"}
        want = self.problem.dispatched(**given, bounded=True, scale_layout=options.scale_layout)[0]
        same_routed(self.routed(), want, self.problem.plan, bounded=True)
        self.check_set_back()

    def check_set_back(self) -> None:
        """What has come is absent again."""
        first, size = arriving_part(self.buffers.layout, ARRIVING[staged_layout], self.epoch % TURNS)
        assert (self.buffers.memory[0].view(torch.uint8)[first : first + size] == 0xFF).all()

    def check_sent(self) -> None:
        """What rank 0 has sent rank 1: the header with its counts, and its rows with all that belongs to them. Nothing
        else of rank 1's memory was touched.
        """
        buffers, rank0, plan = self.buffers, self.rank0, self.problem.plan
        buffers.put(buffers.expected, self.problem, self.options, 0, 1, self.epoch % TURNS)
        parts = [name for name in PARTS_OF_A_ROW if name != "row_scales" or plan.scales_per_token]
        for turn in range(TURNS):
            for source in range(2):
                for name in parts:
                    got, want = (
                        buffers.part(name, memory, turn, source) for memory in (buffers.memory[1], buffers.expected)
                    )
                    same_bytes(got, want, f"{name} of source {source} in region {turn} of rank 1")
        same_bytes(buffers.memory[1], buffers.expected, "rank 1's memory")
        counts = counts_of(self.problem, 0)
        header, epochs = rank0.header(0, 1, self.epoch)[: HEADER_WORDS + len(counts)].T.tolist()
        assert (header[:2], header[HEADER_WORDS:]) == ([0, 0], counts)
        assert set(epochs) == {signed(self.epoch)}
