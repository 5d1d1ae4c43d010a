"""Combines of rank 0 of two whose buffers take turns: what it is given, what it leaves, what it sends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.kernels.one_gpu import DEVICE
from tests.kernels.played_peer import Homeward, counts_of, num_chunks, received_by_rank_0, sent_home
from tests.kernels.silent_peer import ABSENT, BLOCKS, NAN_THAT_TRAVELS, STALE, Rank0, int32, signed
from tests.kernels.staged_calls import stale
from tests.support.cases import BF16, Problem, expert_rows, same_bits, same_bytes
from tokenloom import reference
from tokenloom.backends.peers.buffers import routes_in_turns_layout, sums_in_turns_layout
from tokenloom.kernels.combine.launch import CombineVariant, max_chunks
from tokenloom.kernels.common import H200, HEADER_WORDS, TURN_WORDS, TURNS
from tokenloom.plan import ROUTE_LAYOUTS
from tokenloom.runtime.kernel_reports import CallOutcome


@dataclass(frozen=True)
class Summed:
    """Options of combines.

    Attributes:
        layout, alignment, capacity: of the dispatch. capacity None fits.
        mode, weighted, eager: as CombineVariant has them.
        y_dtype, wire_dtype, out_dtype: of the rows given, of those sent home, of the result.
        halves: two kernels.
        blocks: of rank 0's kernels.
    """

    layout: str
    mode: str = "per_rank"
    weighted: bool = False
    eager: bool = True
    halves: bool = False
    capacity: int | None = None
    alignment: int = 1
    y_dtype: torch.dtype = BF16
    wire_dtype: torch.dtype = BF16
    out_dtype: torch.dtype = BF16
    blocks: int = BLOCKS


class CombineBuffers:
    """Where rows come home, on both ranks. Of eager calls each word is absent."""

    def __init__(self, rank0: Rank0, options: Summed) -> None:
        self.rank0, self.dtype = rank0, options.wire_dtype
        make = routes_in_turns_layout if options.mode == "per_route" else sums_in_turns_layout
        self.layout = make(rank0.plan, options.wire_dtype.itemsize, 0)
        self.memory = rank0.stale(self.layout, ABSENT if options.eager else STALE)
        self.expected = self.memory[1].cpu()
        self.peers = rank0.addresses(self.memory)
        if options.eager:
            (first, size), (second, _) = (self.layout.places[f"combine_recv{turn}"] for turn in range(2))
            rank0.arrivals[0] = torch.tensor([self.memory[0].data_ptr() + first, second - first, size])

    def rows(self, memory: torch.Tensor, turn: int) -> torch.Tensor:
        """One of the buffers that take turns, [places, H]."""
        offset, size = self.layout.places[f"combine_recv{turn}"]
        return memory.view(torch.uint8)[offset : offset + size].view(self.dtype).view(-1, self.rank0.plan.hidden)


class CombineCall:
    """One combine. Kernels are compiled when it is made.

    Args:
        problem: whose dispatch it belongs to, with the plan of the buffers.
        epoch: of the call; by default the next.
    """

    def __init__(self, buffers: CombineBuffers, problem: Problem, options: Summed, epoch: int | None = None) -> None:
        rank0, plan = buffers.rank0, problem.plan
        assert plan == rank0.plan
        self.buffers, self.problem, self.options, self.rank0 = buffers, problem, options, rank0
        self.epoch = rank0.epoch if epoch is None else epoch
        self.turns = TURNS if options.eager else 2
        given: dict[str, Any] = {"alignment": options.alignment}
        if options.layout != "rank":
            needed = problem.rows_needed(options.layout, options.alignment)
            given["capacity"] = needed + 2 if options.capacity is None else options.capacity
        self._routed = problem.dispatched(options.layout, **given, bounded=True)
        self._ys = expert_rows(problem, self._routed, options.y_dtype)
        self._weights = problem.topk_weights if options.weighted else None
        received = received_by_rank_0(problem, options.layout, options.alignment, given.get("capacity"))
        self._received = {name: value.to(DEVICE) for name, value in vars(received).items()}
        self.y, self.topk_ids = self._ys[0].to(DEVICE), problem.topk_ids[0].to(DEVICE)
        self.out = stale(len(self.topk_ids), plan.hidden, dtype=options.out_dtype)
        self.half_epoch = int32([0] * TURN_WORDS)
        variant = CombineVariant(
            plan,
            layout="expert" if options.layout in ROUTE_LAYOUTS else options.layout,
            y_dtype=options.y_dtype,
            wire_dtype=options.wire_dtype,
            out_dtype=options.out_dtype,
            mode=options.mode,
            weights="received" if options.weighted else "none",
            eager=options.eager,
        )
        self._lone_rows = dict(variant.spec().shape)["lone_rows"]
        parts = ("send", "receive") if options.halves else ("whole",)
        self.kernels = [self._kernel(replace(variant, part=part)) for part in parts]

    def _kernel(self, variant: CombineVariant) -> Any:
        plan, layout = self.problem.plan, self.buffers.layout
        kernel = self.rank0.kernel(variant, self.half_epoch)
        args = kernel.args
        args.y, args.out, args.topk_ids = self.y.data_ptr(), self.out.data_ptr(), self.topk_ids.data_ptr()
        for name in ("row_places", "row_tokens", "slots", "all_counts"):
            setattr(args, name, self._received[name].data_ptr())
        args.weights = self._received["row_weights"].data_ptr() if self.options.weighted else 0
        args.chunk_flags, args.max_chunks = self.rank0.layout.offset("chunk_flags"), max_chunks(plan)
        args.peers, args.combine_recv = self.buffers.peers, layout.offset("combine_recv0")
        args.turn_bytes = layout.offset("combine_recv1") - args.combine_recv
        args.combine_turns, args.send_blocks = self.turns, self.options.blocks
        args.push_blocks = variant.sending_blocks(self.options.blocks, H200)
        args.num_tokens, args.max_tokens = len(self.topk_ids), plan.max_tokens_per_rank
        args.capacity = self.y.numel() // plan.hidden
        args.ids_are_int64 = self.topk_ids.dtype == torch.int64
        return kernel

    def _home(self, rank: int, home: int) -> Homeward:
        dtypes: dict[str, Any] = {"mode": self.options.mode, "wire_dtype": self.options.wire_dtype}
        return sent_home(self.problem, self._ys, self._routed, self._weights, rank, home, **dtypes)

    def _num_flags(self, num_rows: int) -> int:
        """Of one rank for another: one for each chunk; none where rows say by themselves that they are here."""
        return 0 if self.options.eager else num_chunks(num_rows, self._lone_rows)

    # -- rank 1 ---------------------------------------------------------------------------------------------

    def open_by_rank_1(self, **header: Any) -> None:
        """Say that it has begun, or what is wrong."""
        self.rank0.open_by_rank_1([], epoch=self.epoch, **header)

    def send_by_rank_1(self, but_last: int = 0) -> None:
        """Put its rows into this call's buffer, and raise its flags: but for so many of the last, of eager calls words
        instead of flags."""
        sent = self._home(1, 0)
        rows = self.buffers.rows(self.buffers.memory[0], self.epoch % self.turns)
        words = sent.rows.view(torch.int32)
        words = torch.where(words == ABSENT, NAN_THAT_TRAVELS, words) if self.options.eager else words
        rows[sent.places] = words.view(sent.rows.dtype).to(DEVICE)
        if self.options.eager and but_last:
            rows.view(torch.uint8)[sent.places[-1], -4 * but_last :] = 0xFF
        first = max_chunks(self.problem.plan)
        last = first + self._num_flags(counts_of(self.problem, 0)[1])
        self.rank0.words("chunk_flags")[first : last - but_last] = signed(self.epoch)

    # -- rank 0 ---------------------------------------------------------------------------------------------

    def send(self) -> CallOutcome | None:
        """The first half, or all of the call."""
        assert self.epoch == self.rank0.epoch
        return self.rank0.run(self.kernels[0], self.options.blocks)

    def receive(self) -> CallOutcome | None:
        """The second half."""
        return self.rank0.run(self.kernels[1], self.options.blocks, opens=False)

    def check_received(self) -> None:
        """The result is that of the reference."""
        own_ids = [self.problem.topk_ids[0], self.problem.topk_ids[1][:0]]
        options = self.options
        dtypes = {"mode": options.mode, "wire_dtype": options.wire_dtype, "out_dtype": options.out_dtype}
        want = reference.combine(self.problem.plan, self._ys, self._routed, own_ids, self._weights, **dtypes)[0]
        same_bits(self.out, want, "out")
        self.check_set_back()

    def check_set_back(self) -> None:
        """What has come in an eager call is absent again."""
        if self.options.eager:
            rows = self.buffers.rows(self.buffers.memory[0], self.epoch % self.turns).view(torch.uint8)
            assert (rows == 0xFF).all()

    def sent_places(self) -> list[int]:
        """Where its rows lie in the buffer of rank 1."""
        return self._home(0, 1).places

    def check_sent(self) -> None:
        """What rank 0 has sent rank 1: its rows, flags of their chunks, and that it has begun. Nothing else."""
        buffers, turn, sent = self.buffers, self.epoch % self.turns, self._home(0, 1)
        got = buffers.rows(buffers.memory[1].cpu(), turn)[sent.places]
        same_bits(got, sent.rows, "rows for rank 1")
        buffers.rows(buffers.expected, turn)[sent.places] = got  # NaNs may differ in their bits
        same_bytes(buffers.memory[1], buffers.expected, "rank 1's memory")
        flags = torch.zeros(2 * max_chunks(self.problem.plan), dtype=torch.int32)
        flags[: self._num_flags(counts_of(self.problem, 1)[0])] = signed(self.epoch)
        mine = self.rank0.words("chunk_flags", 1)[: len(flags)].cpu()
        same_bytes(torch.where(mine == signed(self.epoch), mine, 0), flags, "rank 1's flags of chunks")
        assert (self.rank0.header(0, 1, self.epoch)[:HEADER_WORDS, 1] == signed(self.epoch)).all()
