"""Dispatches of one kind, prepared: all that repeats from call to call is looked up, checked and written down once.

A call then writes how many tokens it has, where they and its results are, and its number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tokenloom.backends.base import DispatchInputs, DispatchOptions, DispatchOut
from tokenloom.backends.handshake import dispatch_fields
from tokenloom.backends.nvlink.buffers import (
    BULK_BYTES,
    RECEIVE_BUFFERS,
    Buffers,
    ReceiveBuffer,
    aligned,
    require_bulk,
)
from tokenloom.backends.nvlink.copies import Copies
from tokenloom.backends.nvlink.handle import NvlinkHandle
from tokenloom.backends.nvlink.launcher import HALVES, Half, Launcher, require_layout, require_no_host_read
from tokenloom.backends.nvlink.results import Results, ResultsMemory
from tokenloom.errors import InvalidArgument
from tokenloom.kernels.common import MAX_BLOCKS, Variant
from tokenloom.kernels.dispatch.launch import CALL_FIELDS, STAGED_FIELDS, DispatchVariant
from tokenloom.plan import Plan
from tokenloom.runtime.kernel_reports import HostCounts
from tokenloom.runtime.openings import CallKind, Fields
from tokenloom.runtime.symmetric_memory import SymmetricBuffer

FP8 = torch.float8_e4m3fn


class StagingBuffers(Protocol):
    """Where rows of staged dispatches arrive.

    Attributes:
        turns: regions that calls take turns in.
    """

    turns: int

    @property
    def fused(self) -> bool:
        """Whether they serve a MegaMoE."""

    def staged(self, dtype: torch.dtype, fields: Fields) -> SymmetricBuffer:
        """The buffer for rows of this dtype."""


@dataclass(frozen=True)
class Shared:
    """What all dispatches of a communicator use.

    Attributes:
        block_counts: int32, for counts that blocks of a kernel share.
        memory: for what calls leave.
        checked: the host reads the outcome of every call before it returns.
    """

    plan: Plan
    launcher: Launcher
    buffers: StagingBuffers
    block_counts: torch.Tensor
    memory: ResultsMemory
    checked: bool


@dataclass(frozen=True)
class SharedByDirect(Shared):
    """What direct ones use besides.

    Attributes:
        host_counts: where kernels leave counts for the host, with exact sizes.
    """

    buffers: Buffers
    copies: Copies
    host_counts: HostCounts


class PreparedDispatch:
    """What direct and staged dispatches of one kind have in common.

    Args:
        shared: of the communicator.
        options, inputs: of any call of the kind.
        repeats: rows go the way of an earlier dispatch, so an overflow has been told.
        meant: what the user asked for, where this is a part of it.

    Attributes:
        takes_out: the kernel writes to tensors of the caller's.
        options: of all calls of the kind.
        is_old: buffers have grown since, or too many kinds came.
        awaited, finish: as usual dispatches have them.
        kind: what they mean to all ranks.
        row_dtype: of the rows that travel.
    """

    takes_out = False
    awaited = False
    finish = None

    def __init__(
        self,
        shared: Shared,
        options: DispatchOptions,
        inputs: DispatchInputs,
        repeats: bool = False,
        meant: DispatchOptions | None = None,
    ) -> None:
        self.shared, self.options, self.is_old = shared, options, False
        self.repeats, self.split = repeats, inputs.split
        self.launcher, self.device = shared.launcher, inputs.x.device
        self.row_dtype = FP8 if options.to_fp8 else inputs.x.dtype
        exact = options.sizes == "exact"
        self._host_reads = "sizes='exact'" if exact else "checked=True" if shared.checked else ""
        check(shared, options, inputs)
        fields = dispatch_fields(self.launcher.num_calls, meant or options, inputs)
        self.kind = CallKind({**fields, **HALVES} if self.split else fields)
        self.with_weights = inputs.topk_weights is not None
        self.with_scales = inputs.scales is not None or options.to_fp8

    @property
    def is_stale(self) -> bool:
        """Whether calls cannot be made by this alone."""
        return self.is_old

    @property
    def quantize(self) -> str:
        """How rows become FP8 on their way, as variants name it."""
        if not self.options.to_fp8:
            return ""
        return "power of two" if self.options.power_of_two_scales else "any scale"

    def variant(self, inputs: DispatchInputs, part: str, *, staged: bool = False, eager: bool = False) -> Variant:
        """The form of the kernel; with ``split`` there are two, the halves."""
        options = self.options
        return DispatchVariant(
            plan=self.shared.plan,
            layout=options.layout,
            x_dtype=inputs.x.dtype,
            quantize=self.quantize,
            strategy=options.strategy,
            staged=staged,
            eager=eager,
            scale_layout=options.scale_layout,
            part=part,
        )

    def prepare_kernels(
        self, inputs: DispatchInputs, results: Results, num_places: int, *, staged: bool = False, eager: bool = False
    ) -> None:
        """Load what calls launch, and write down the arguments that direct and staged kernels share.

        Args:
            results: what calls leave in their words.
        """
        self.results = results
        self._write = (STAGED_FIELDS if staged else CALL_FIELDS).write
        plan, launcher, shared = self.shared.plan, self.launcher, self.shared
        parts = ("send", "receive") if self.split else ("whole",)
        variants = [self.variant(inputs, part, staged=staged, eager=eager) for part in parts]
        self.kernel, *rest = (launcher.new_kernel(variant) for variant in variants)
        self.receiving_kernel = rest[0] if rest else None
        args, control = self.kernel.args, launcher.control.layout
        args.done_flags, args.row_flags = control.offset("done_flags"), control.offset("row_flags")
        args.block_counts = shared.block_counts.data_ptr()
        args.slots_found = args.block_counts + 4 * (len(shared.block_counts) - MAX_BLOCKS)
        args.max_tokens, args.capacity, args.alignment = plan.max_tokens_per_rank, num_places, self.options.alignment
        args.ids_are_int64 = inputs.topk_ids.dtype == torch.int64
        args.send_blocks = launcher.num_sms

    def point(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        topk_ids: torch.Tensor,
        weights: torch.Tensor | None,
        num_tokens: int,
        results: Results,
        base: int,
        host_sequence: int,
        *outputs: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write what a call is given, and where its results are.

        Args:
            results: what the call leaves in its words. base: address of these.
            outputs: addresses of OUTPUTS, of staged kernels.

        Returns:
            x and topk_ids, or copies of them at addresses that the kernels take.
        """
        x_at, ids_at = x.data_ptr(), topk_ids.data_ptr()
        if (x_at | ids_at) % BULK_BYTES:
            x, topk_ids = aligned(x), aligned(topk_ids)
            x_at, ids_at = x.data_ptr(), topk_ids.data_ptr()
        slots, all_counts, num_rows, source_counts, expert_counts, expert_offsets = results.told
        self._write(
            self.kernel.args,
            CALL_FIELDS.offset,
            x_at,
            0 if scales is None else scales.data_ptr(),
            ids_at,
            0 if weights is None else weights.data_ptr(),
            base + slots,
            base + all_counts,
            base + num_rows,
            base + source_counts,
            base + expert_counts,
            base + expert_offsets,
            num_tokens,
            host_sequence,
            *outputs,
        )
        return x, topk_ids

    def half(self, memory: tuple[torch.Tensor, int, int], written: object = None) -> Half | None:
        """What the second half of a call will need, whose words have this memory, and which writes to that one."""
        if self.receiving_kernel is None:
            return None
        return Half((memory[0], written), memory[2] + self.results.at["epoch"], self.receiving_kernel)

    def require_now(self) -> None:
        """Raise for what a CUDA graph cannot capture."""
        if self._host_reads:
            require_no_host_read(True, self._host_reads)
        if self.options.strategy != "dedup":
            require_layout(self.options.strategy, self.options.layout)

    def launch(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        topk_ids: torch.Tensor,
        weights: torch.Tensor | None,
        num_tokens: int,
        out: DispatchOut | None = None,
        stream: int | None = None,
    ) -> tuple[NvlinkHandle, torch.Tensor, Half | None]:
        """Put the kernel on the current stream: (handle, rows [places, H], second half), at their full size.

        Args:
            num_tokens: T, rows of x.
            out: tensors of the caller's, which staged kernels write to. From others results are copied there.
            stream: what :meth:`Launcher.ready` has just given, or None.
        """
        raise NotImplementedError


class DirectDispatch(PreparedDispatch):
    """Dispatches of one kind whose rows go straight to their places in a receive buffer.

    Args:
        capacity: places of the output in layouts "token" and "expert"; routes beyond it are dropped. None: as many as
            ``options`` and the buffers allow.

    Attributes:
        capacity: the same, filled in.
    """

    shared: SharedByDirect

    def __init__(
        self,
        shared: SharedByDirect,
        options: DispatchOptions,
        inputs: DispatchInputs,
        capacity: int | None = None,
        repeats: bool = False,
        meant: DispatchOptions | None = None,
    ) -> None:
        super().__init__(shared, options, inputs, repeats, meant)
        plan = shared.plan
        self.capacity = self._most_rows() if capacity is None else capacity
        self.num_places = plan.worst_case_rows("rank") if options.layout == "rank" else self.capacity
        self._buffer_rows = self.capacity if options.layout == "expert" else 0
        weights_and_scales = {"with_weights": self.with_weights, "with_scales": self.with_scales}
        rank = self.launcher.ranks.rank
        results = Results(plan, rank, options, self.num_places, {}, **weights_and_scales)
        # One for each of those that dispatches take turns in, with its rows; made when first used.
        self._received: list[tuple[ReceiveBuffer, torch.Tensor] | None] = [None] * RECEIVE_BUFFERS
        self.prepare_kernels(inputs, results, self.num_places)
        self._exact = options.sizes == "exact"
        self.kernel.args.stop_on_overflow = self._exact
        self.kernel.args.host_counts = shared.host_counts.address if self._exact else 0

    @property
    def is_stale(self) -> bool:
        """Also while rows of an earlier dispatch are lent: those of this one have to be copied then."""
        return self.is_old or self.shared.buffers.any_lent

    def _most_rows(self) -> int:
        shared, options = self.shared, self.options
        room = shared.plan.worst_case_rows("token")
        if options.layout == "expert":
            room = max(shared.buffers.rows_for(self.row_dtype), shared.buffers.bounded_rows(options))
        return room if options.capacity is None else min(options.capacity, room)

    def _receive_buffer(self, number: int) -> tuple[ReceiveBuffer, torch.Tensor]:
        turn = number % len(self._received)
        found = self._received[turn]
        if found is None:
            fields = self.kind.fields_of(self.launcher.num_calls)
            buffer = self.shared.buffers.receive(self.row_dtype, number, self._buffer_rows, fields)
            found = self._received[turn] = buffer, buffer.rows[: self.num_places]
            args = self.kernel.args
            args.peers = buffer.peers_address
            for name, offset in buffer.offsets:
                setattr(args, name, offset)
        return found

    def _next_free(self, number: int) -> tuple[ReceiveBuffer, torch.Tensor]:
        """The receive buffer for this dispatch, or the next one if a caller holds its rows, which it then never does
        of both."""
        found = self._received[number % len(self._received)] or self._receive_buffer(number)
        loan = found[0].loan
        if not loan.is_held:
            loan.take_back(self.launcher)
            return found
        self.shared.buffers.num_dispatches += 1
        return self._next_free(number + 1)

    def launch(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        topk_ids: torch.Tensor,
        weights: torch.Tensor | None,
        num_tokens: int,
        out: DispatchOut | None = None,
        stream: int | None = None,
    ) -> tuple[NvlinkHandle, torch.Tensor, Half | None]:
        received, buffers = self._received, self.shared.buffers
        buffer, rows = self._next_free(buffers.num_dispatches)
        number = buffers.num_dispatches
        launcher, shared = self.launcher, self.shared
        memory = shared.memory.take(self.results, num_tokens, stream)
        base = memory[2]
        host_sequence = shared.host_counts.expect() if self._exact else 0
        x, topk_ids = self.point(x, scales, topk_ids, weights, num_tokens, self.results, base, host_sequence)
        if self.options.strategy == "all_gather":
            self.kernel.args.gathered = shared.copies.gather(x, self.kind.fields_of(launcher.num_calls))
        call = launcher.num_calls  # behind what makes memory, which is a call by itself
        half = None
        if stream is None:
            half = self.half(memory, buffer)
            launcher.launch(self.kernel, self.kind, call, region=buffer.number, repeats=self.repeats, begins=half)
        else:
            launcher.launch_ready(self.kernel, self.kind, call, stream, buffer.number, repeats=self.repeats)
        buffers.num_dispatches += 1
        reused_after = number + len(received)
        handle = NvlinkHandle(
            self.options, call, num_tokens, self.num_places, topk_ids, memory, self.results, buffer, reused_after
        )
        slots, all_counts = self.results.told[:2]
        if launcher.masked:
            handle.masked = launcher.masked
        handle.pointers = (buffer.places_address, buffer.tokens_address, base + slots, base + all_counts)
        return handle, rows, half


def check(shared: Shared, options: DispatchOptions, inputs: DispatchInputs) -> None:
    """Raise for a dispatch that the kernels have no form for, or that cannot be captured."""
    x, plan, exact = inputs.x, shared.plan, options.sizes == "exact"
    is_fp8 = options.to_fp8 or x.element_size() == 1
    require_layout(options.strategy, options.layout)
    if options.strategy == "all_gather" and inputs.split:
        raise InvalidArgument("strategy 'all_gather' has no halves on backend nvlink; use 'dedup'")
    if options.strategy == "all_gather" and is_fp8:
        raise InvalidArgument("strategy 'all_gather' moves no FP8 on backend nvlink; use 'dedup'")
    require_no_host_read(exact or shared.checked, "sizes='exact'" if exact else "checked=True")
    require_bulk(plan.hidden, x.dtype)
    if shared.buffers.fused:
        raise InvalidArgument("this communicator is a MegaMoE's, which has its own calls; make another Communicator")
    if plan.worst_case_rows("expert", options.alignment) + options.alignment > 2**31:
        name, value = "max_tokens_per_rank", plan.max_tokens_per_rank
        if options.alignment > 1:
            name, value = "alignment", options.alignment
        raise InvalidArgument(f"{name} is {value}: places of rows would not fit 32 bits; pass a smaller one")
