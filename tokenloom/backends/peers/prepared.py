"""Dispatches of one kind, prepared: all that repeats from call to call is looked up, checked and written down once.

A call then writes how many tokens it has, where they and its results are, and its number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from tokenloom.backends.handshake import dispatch_fields
from tokenloom.backends.peers.buffers import (
    BULK_BYTES,
    Buffers,
    aligned,
    require_aligned,
    require_bulk,
)
from tokenloom.backends.peers.copies import Copies
from tokenloom.backends.peers.handle import COUNTS, PeerHandle, ResultsLayout, ResultsMemory
from tokenloom.backends.peers.opening import HALVES, Half, Launched, Launcher, require_layout, require_no_host_read
from tokenloom.backends.seam import DispatchKind, DispatchOptions, DispatchOut, Sent, Tokens
from tokenloom.errors import CapacityOverflow, InvalidArgument
from tokenloom.kernels.common import Variant
from tokenloom.kernels.dispatch.launch import CALL_FIELDS, OUTPUTS, STAGED_FIELDS, DispatchVariant
from tokenloom.plan import Plan
from tokenloom.runtime.kernel_reports import HostCounts
from tokenloom.runtime.openings import CallKind, Fields
from tokenloom.runtime.symmetric_memory import SymmetricBuffer


class StagingBuffers(Protocol):
    """Where rows of staged dispatches arrive."""

    @property
    def fused(self) -> bool:
        """Whether they serve a MegaMoE."""

    def staged(self, dtype: torch.dtype, fields: Fields) -> SymmetricBuffer:
        """The buffer for rows of this dtype."""


@dataclass(eq=False, kw_only=True)
class Shared:
    """State and memory that all dispatches of a communicator use.

    Attributes:
        block_counts: int32, for counts that blocks of a kernel share.
        memory: for the words that calls leave.
        checked: the host reads the outcome of every call before it returns.
        overflow: a dropped row that a bounded dispatch has found and the next call raises.
    """

    plan: Plan
    launcher: Launcher
    buffers: StagingBuffers
    block_counts: torch.Tensor
    memory: ResultsMemory
    checked: bool
    overflow: CapacityOverflow | None = None

    def settle_checked(self, number: int) -> None:
        """Read the outcome of a call. A dropped row is for the next call to raise."""
        try:
            self.launcher.outcomes.settle_before(number + 1)
        except CapacityOverflow as too_many:
            self.overflow = too_many


@dataclass(eq=False, kw_only=True)
class SharedByDirect(Shared):
    """State and memory that direct dispatches use besides.

    Attributes:
        host_counts: where kernels leave counts for the host, with exact sizes.
    """

    buffers: Buffers
    copies: Copies
    host_counts: HostCounts


class SentDispatch:
    """A dispatch whose first kernel, or only one, is on the stream, and whose second half has something to do.

    Attributes:
        prepared: sent it. tokens, out: as given. half: the second half needs it; None: there is none.
        handle, rows: of the dispatch, at their full size until it is received.
    """

    __slots__ = ("half", "handle", "out", "prepared", "rows", "tokens")

    def __init__(
        self,
        prepared: PeerDispatch,
        tokens: Tokens,
        out: DispatchOut | None,
        handle: PeerHandle,
        rows: torch.Tensor,
        half: Half | None,
    ) -> None:
        self.prepared, self.tokens, self.out = prepared, tokens, out
        self.handle, self.rows, self.half = handle, rows, half

    def receive(self) -> tuple[PeerHandle, torch.Tensor]:
        if self.half is not None:
            self.prepared.launcher.finish(self.half)
        return self.prepared.finish(self)


class PeerDispatch:
    """Base of :class:`StagedDispatch` and of ``DirectDispatch`` (dispatch.py).

    Args:
        shared: of the communicator.
        kind: of all calls.
        repeats: rows go the way of an earlier dispatch, so an overflow has been told.
        user_options: options that the user asked for, where this dispatch is a part of that call.

    Attributes:
        is_stale: buffers have grown since, or too many kinds came.
        waits: the host waits for counts of each call.
        is_done_when_sent: the second half has nothing to do, unless there are two kernels or tensors of the caller's.
        lends_early: :meth:`lend` is to be called while the kernel runs.
        call_kind: the meaning of the calls to all ranks.
    """

    is_done_when_sent = lends_early = False

    def __init__(
        self, shared: Shared, kind: DispatchKind, repeats: bool = False, user_options: DispatchOptions | None = None
    ) -> None:
        self.shared, self.kind, self.options, self.is_stale = shared, kind, kind.options, False
        self.plan = shared.plan if kind.width is None else replace(shared.plan, hidden=kind.width)
        self.repeats, self.launcher, self.device = repeats, shared.launcher, shared.launcher.ranks.device
        self.waits = kind.options.sizes == "exact"
        self._host_reads = "sizes='exact'" if self.waits else "checked=True" if shared.checked else ""
        check(shared, kind)
        fields = dispatch_fields(self.launcher.num_calls, kind, user_options)
        self.call_kind = CallKind({**fields, **HALVES} if kind.split else fields)
        self.with_weights = kind.weights_dtype is not None

    def send(
        self, tokens: Tokens, out: DispatchOut | None = None, stream: int | None = None
    ) -> Sent[tuple[PeerHandle, torch.Tensor]]:
        """Put the kernel on the current stream; see :class:`tokenloom.backends.seam.PreparedDispatch`."""
        if self.receiving_kernel is not None:
            stream = None  # two kernels take the slow path
        if stream is None:
            self.require_now()
            if self.waits and not self.kind.sent_ahead:  # the host will wait, so it hears of earlier errors first
                self.launcher.settle(0)
        handle, rows, half = self.launch(tokens, out, stream)
        if self.lends_early:
            self.lend(handle, rows)
        if half is None and out is None and self.is_done_when_sent:
            return Launched(((handle, rows),))
        return SentDispatch(self, tokens, out, handle, rows, half)

    def require_now(self) -> None:
        """Raise for a call that cannot be made at this moment, such as one that a CUDA graph cannot capture."""
        if self._host_reads:
            require_no_host_read(True, self._host_reads)
        if self.options.strategy != "dedup":
            require_layout(self.options.strategy, self.options.layout)

    def launch(
        self, tokens: Tokens, out: DispatchOut | None = None, stream: int | None = None
    ) -> tuple[PeerHandle, torch.Tensor, Half | None]:
        """Put the kernel on the current stream: (handle, rows [places, H], second half), at their full size."""
        raise NotImplementedError

    def lend(self, handle: PeerHandle, rows: torch.Tensor) -> None:
        """Make outputs their caller's while the kernel runs, where the host need not know their size."""

    def forget_buffers(self) -> None:
        """Drop views of receive buffers, which are about to be released: holding this would hold them."""

    def finish(self, sent: SentDispatch) -> tuple[PeerHandle, torch.Tensor]:
        """Wait for counts that the host has to know, and give outputs their size and their owner."""
        raise NotImplementedError

    # -- kernels and their arguments ------------------------------------------------------------------------

    @property
    def quantize(self) -> str:
        """How rows become FP8 on their way, as variants name it."""
        if not self.options.to_fp8:
            return ""
        return "power of two" if self.options.power_of_two_scales else "any scale"

    def variant(self, part: str, *, staged: bool = False) -> Variant:
        """The form of the kernel; with ``split`` there are two, the halves."""
        options = self.options
        return DispatchVariant(
            plan=self.plan,
            layout=options.layout,
            x_dtype=self.kind.x_dtype,
            quantize=self.quantize,
            strategy=options.strategy,
            staged=staged,
            scale_layout=options.scale_layout,
            recipe=options.recipe,
            part=part,
        )

    def prepare_kernels(self, results: ResultsLayout, capacity: int, *, staged: bool = False) -> None:
        """Load the kernels, and write down the arguments that direct and staged ones share.

        Args:
            results: places of the words that calls leave. capacity: rows of the output, or of a slot.
        """
        self.results = results
        self._write = (STAGED_FIELDS if staged or self.options.layout == "slots" else CALL_FIELDS).write
        plan, launcher, shared = self.plan, self.launcher, self.shared
        parts = ("send", "receive") if self.kind.split else ("whole",)
        variants = [self.variant(part, staged=staged) for part in parts]
        self.kernel, *rest = (launcher.new_kernel(variant) for variant in variants)
        self.receiving_kernel = rest[0] if rest else None
        args, control = self.kernel.args, launcher.control.layout
        args.done_flags, args.row_flags = control.offset("done_flags"), control.offset("row_flags")
        args.block_counts = shared.block_counts.data_ptr()
        args.call.block_flags = args.block_counts
        args.max_tokens, args.capacity, args.alignment = plan.max_tokens_per_rank, capacity, self.options.alignment
        args.ids_are_int64 = self.kind.ids_dtype == torch.int64
        args.send_blocks = self.kernel.blocks
        if isinstance(variants[0], DispatchVariant):
            args.peer_blocks = variants[0].sending_blocks(self.kernel.blocks, launcher.rates)

    def set_arguments(
        self, tokens: Tokens, num_tokens: int, results: ResultsLayout, base: int, host_sequence: int, *outputs: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the arguments of one call: its tensors, and where its results go.

        Args:
            results: places of the words that the call leaves. base: address of these.
            outputs: addresses of OUTPUTS, of kernels that are staged or go to slots.

        Returns:
            x and topk_ids, or copies of them at addresses that the kernels take.
        """
        x, scales, topk_ids, weights = tokens
        x_at, ids_at = x.data_ptr(), topk_ids.data_ptr()
        if (x_at | ids_at) % BULK_BYTES:
            x, topk_ids = aligned(x), aligned(topk_ids)
            x_at, ids_at = x.data_ptr(), topk_ids.data_ptr()
        slots, all_counts, num_rows, source_counts, expert_counts, expert_offsets = results.argument_offsets
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
        """State for the receiving kernel, which keeps ``memory`` and ``written`` alive; None without halves."""
        if self.receiving_kernel is None:
            return None
        return Half((memory[0], written), memory[2] + self.results.at["epoch"], self.receiving_kernel)


def check(shared: Shared, kind: DispatchKind) -> None:
    """Raise for a dispatch that the kernels have no form for, or that cannot be captured."""
    options, plan = kind.options, shared.plan
    exact = options.sizes == "exact"
    require_layout(options.strategy, options.layout)
    if options.strategy == "all_gather" and kind.split:
        raise InvalidArgument("strategy 'all_gather' has no halves on backend nvlink; use 'dedup'")
    if options.strategy == "all_gather" and kind.row_dtype.itemsize == 1:
        raise InvalidArgument("strategy 'all_gather' moves no FP8 on backend nvlink; use 'dedup'")
    require_no_host_read(exact or shared.checked, "sizes='exact'" if exact else "checked=True")
    require_bulk(plan.hidden if kind.width is None else kind.width, kind.x_dtype)
    if shared.buffers.fused:
        raise InvalidArgument("this communicator is a MegaMoE's, which has its own calls; make another Communicator")
    if plan.worst_case_rows("expert", options.alignment) + options.alignment > 2**31:
        name, value = "max_tokens_per_rank", plan.max_tokens_per_rank
        if options.alignment > 1:
            name, value = "alignment", options.alignment
        raise InvalidArgument(f"{name} is {value}: places of rows would not fit 32 bits; pass a smaller one")


PARTS_OF_A_ROW = ("rows", "row_scales", "row_ids", "row_weights", "row_places", "row_tokens")
"""Parts of a row that arrive, by the names of regions and of kernel arguments."""
WRITTEN_ALONE = frozenset((*COUNTS, "slot_ranges"))
"""Results that the kernel's arguments name as the caller does."""
OUTPUT_WORDS = {
    "out_scales": "scales",
    "out_ids": "local_ids",
    "out_weights": "weights",
    "out_places": "row_places",
    "out_tokens": "row_tokens",
    "slot_ranges": "slot_ranges",
}
"""Parts of results that outputs other than rows are, by the names of arguments."""


def scale_words(plan: Plan, options: DispatchOptions, places: int) -> int:
    """Words of the scales of so many FP8 rows."""
    scales = plan.scales_by(options.recipe)
    return places * (-(-scales // 4) if options.scale_layout == "packed" else scales)


class StagedDispatch(PeerDispatch):
    """Staged dispatches of one kind."""

    def __init__(
        self, shared: Shared, kind: DispatchKind, repeats: bool = False, user_options: DispatchOptions | None = None
    ) -> None:
        super().__init__(shared, kind, repeats, user_options)
        options = kind.options
        self.is_done_when_sent = not shared.checked
        plan, layout = shared.plan, options.layout
        rows = plan.worst_case_rows("token") if options.capacity is None else options.capacity
        self._places = plan.experts_per_rank * rows if layout == "slots" else rows
        self._hidden = plan.hidden
        self._further = self.further_words()
        self._with_scales = kind.brings_scales
        results = self._layout_of_results(self._with_scales)
        self.prepare_kernels(results, rows, staged=True)
        self._without_scales = self._layout_of_results(False) if self._with_scales else results
        at = self.results.at
        self._outputs = [at.get(OUTPUT_WORDS[name], 0) for name in OUTPUTS[1:]]
        self._like = torch.empty(0, dtype=kind.row_dtype, device=self.device)
        # Last: it may make memory, which all ranks then do.
        self._buffer = shared.buffers.staged(kind.row_dtype, self.call_kind.fields_of(self.launcher.num_calls))
        args, regions = self.kernel.args, self._buffer.layout
        args.peers = self._buffer.peers.data_ptr()
        for name in PARTS_OF_A_ROW:
            setattr(args, name, regions.offset(f"{name}0"))
        args.turn_bytes = regions.offset("rows1") - regions.offset("rows0")
        args.stop_on_overflow, args.host_counts = False, 0

    def _layout_of_results(self, with_scales: bool) -> ResultsLayout:
        """All but rows lies in one tensor; scales, which are large, last, unless the caller gives room for them."""
        plan, options = self.shared.plan, self.options
        received = plan.worst_case_rows("rank")
        sizes = {"slot_ranges": 2 * plan.num_experts, "row_tokens": received}
        if options.layout == "token":  # what belongs to a place may be handed out up to the caller's capacity
            received = max(received, self._places)
        sizes |= {"local_ids": received * plan.top_k, "row_places": received * plan.top_k, **self._further}
        if self.with_weights:
            sizes["weights"] = received * plan.top_k
        if with_scales:
            sizes["scales"] = scale_words(plan, options, self._places)
        return ResultsLayout(
            plan,
            self.launcher,
            options,
            self._places,
            sizes,
            with_weights=self.with_weights,
            with_scales=self._with_scales,
        )

    def further_words(self) -> dict[str, int]:
        """Words that calls leave besides, by the names of arguments and results."""
        return {}

    def set_all_arguments(
        self, tokens: Tokens, num_tokens: int, results: ResultsLayout, base: int, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the arguments of one call, whose words lie at ``base``, and whose rows go to the address ``rows``.

        Returns:
            x and topk_ids, or copies of them at addresses that the kernel takes.
        """
        for name in self._further:
            setattr(self.kernel.args, name, base + results.at[name])
        out_scales, out_ids, out_weights, out_places, out_tokens, slot_ranges = self._outputs
        return self.set_arguments(
            tokens,
            num_tokens,
            results,
            base,
            0,
            rows,
            base + out_scales if self._with_scales else 0,
            base + out_ids,
            base + out_weights if self.with_weights else 0,
            base + out_places,
            base + out_tokens,
            base + slot_ranges,
        )

    def launch(
        self, tokens: Tokens, out: DispatchOut | None = None, stream: int | None = None
    ) -> tuple[PeerHandle, torch.Tensor, Half | None]:
        launcher = self.launcher
        if out is None or out.tokens is None:
            rows = self._like.new_empty(self._places, self._hidden)
        else:
            require_aligned(out.tokens, "out.tokens")
            rows = out.tokens
        results = self.results if out is None or out.scales is None else self._without_scales
        num_tokens = tokens.x.shape[0]
        memory = self.shared.memory.take(results, num_tokens, stream)
        _, topk_ids = self.set_all_arguments(tokens, num_tokens, results, memory[2], rows.data_ptr())
        if out is not None:
            self._write_to(out)
        call, half = launcher.num_calls, None
        if stream is None:
            half = self.half(memory, (rows, out))
            launcher.launch(self.kernel, self.call_kind, call, repeats=self.repeats, begins=half)
        else:
            launcher.launch_ready(self.kernel, self.call_kind, call, stream, repeats=self.repeats)
        handle = PeerHandle(results, memory, call, num_tokens, topk_ids)
        if out is not None:
            handle.hold_given(out)
        return handle, rows, half

    def finish(self, sent: SentDispatch) -> tuple[PeerHandle, torch.Tensor]:
        handle = sent.handle
        if self.shared.checked:
            self.shared.settle_checked(handle.number)
        if sent.out is not None:
            handle.write_ids(sent.out)
        return handle, sent.rows

    def _write_to(self, out: DispatchOut) -> None:
        """Let the kernel write to the caller's tensors. Ids of another dtype are converted when they are there."""
        args = self.kernel.args
        for name, tensor in vars(out).items():
            if tensor is not None and name in WRITTEN_ALONE:
                setattr(args, name, tensor.data_ptr())
        if out.topk_ids is not None and out.topk_ids.dtype == torch.int32:
            args.out_ids = out.topk_ids.data_ptr()
        if out.topk_weights is not None and self.with_weights:
            args.out_weights = out.topk_weights.data_ptr()
        if out.scales is not None:
            args.out_scales = out.scales.data_ptr()
