"""Dispatch: one kernel that sends every row to its place on the ranks that hold its experts."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from tokenloom.backends.base import DispatchInputs, DispatchOptions, Pending, RoutedCounts
from tokenloom.backends.handshake import dispatch_fields
from tokenloom.backends.nvlink import places
from tokenloom.backends.nvlink.buffers import Buffers, address_of, aligned, require_bulk
from tokenloom.backends.nvlink.copies import Copies
from tokenloom.backends.nvlink.handle import NvlinkHandle
from tokenloom.backends.nvlink.launcher import HALVES, Half, Launched, Launcher, require_layout, require_no_host_read
from tokenloom.backends.nvlink.staged import StagedDispatch
from tokenloom.errors import CapacityOverflow, InvalidArgument, TokenloomError, is_known_to_all
from tokenloom.kernels.dispatch.launch import MAX_BLOCKS, DispatchVariant, block_count_words
from tokenloom.ops import routing
from tokenloom.plan import Plan, align_up
from tokenloom.runtime.kernel_reports import HostCounts
from tokenloom.runtime.leftovers import keep_until_idle


class Dispatcher:
    """The dispatches of one communicator.

    Args:
        checked: the host reads the outcome of every call before it returns.

    Attributes:
        num_dispatches: made so far. The receive buffers take turns by it.
        overflow: a dropped row that a bounded dispatch has found and the next call raises.
    """

    def __init__(self, plan: Plan, launcher: Launcher, buffers: Buffers, copies: Copies, checked: bool) -> None:
        self.num_dispatches = 0
        self.overflow: CapacityOverflow | None = None
        self.plan, self.launcher, self._buffers, self._copies = plan, launcher, buffers, copies
        self._checked = checked
        device = launcher.ranks.device
        self._host_counts = HostCounts(device, 2 + plan.num_ranks + 2 * plan.experts_per_rank)
        self._block_counts = torch.zeros(block_count_words(plan), dtype=torch.int32, device=device)
        keep_until_idle(self, device, self._block_counts)

    def send(self, options: DispatchOptions, inputs: DispatchInputs) -> Pending[tuple[NvlinkHandle, torch.Tensor]]:
        """Launch the kernel, which sends and receives, or one that sends; see
        :meth:`tokenloom.backends.base.Backend.send_dispatch`.
        """
        _check(self.plan, options, inputs, self._checked, self._buffers.fused)
        if inputs.split and options.sizes == "exact":
            return ExactHalves(self, options, inputs)
        if self._buffers.is_staged(options):
            common = (self.plan, self.launcher, self._buffers, self._block_counts)
            return StagedDispatch(*common, options, inputs, self._settle_checked)
        row_dtype = inputs.x.dtype
        if options.sizes == "exact" and not inputs.ahead:  # whoever waits hears first of what earlier calls left
            self.launcher.settle(0)
        if options.to_fp8:
            row_dtype = torch.float8_e4m3fn
        room = self.plan.worst_case_rows("token")
        if options.layout == "expert":
            room = max(self._buffers.rows_for(row_dtype), self._buffers.bounded_rows(options))
        limit = room if options.capacity is None else min(options.capacity, room)
        handle, rows = self.start(options, inputs, limit)
        return PendingDispatch(self, handle, rows, options, inputs, limit)

    def start(
        self,
        options: DispatchOptions,
        inputs: DispatchInputs,
        capacity: int,
        repeats: bool = False,
    ) -> tuple[NvlinkHandle, torch.Tensor]:
        """Put the kernel on the current stream: (handle, rows [places, H]), at their full size.

        Args:
            capacity: places of the output; routes beyond it are dropped.
            repeats: the rows went the same way before, so an overflow has been told.
        """
        plan, launcher = self.plan, self.launcher
        x, topk_ids = aligned(inputs.x), aligned(inputs.topk_ids)
        num_tokens, local = x.shape[0], plan.experts_per_rank
        row_dtype = torch.float8_e4m3fn if options.to_fp8 else x.dtype
        number = launcher.num_calls
        fields = {**dispatch_fields(number, options, inputs), **(HALVES if inputs.split else {})}
        by_expert, by_rank = options.layout == "expert", options.layout == "rank"
        buffer = self._buffers.receive(row_dtype, self.num_dispatches, capacity if by_expert else 0, fields)
        results = (1, plan.num_ranks, local, local + 1, plan.num_ranks * (plan.num_ranks + plan.num_experts), 1)
        words = sum(results) + num_tokens * (plan.num_ranks + plan.top_k)
        own = torch.empty(words, dtype=torch.int32, device=x.device)
        num_rows, source_counts, expert_counts, expert_offsets, all_counts, epoch, slots = torch.split_with_sizes(
            own, [*results, words - sum(results)]
        )
        quantize = ""
        if options.to_fp8:
            quantize = "power of two" if options.power_of_two_scales else "any scale"
        variant = DispatchVariant(
            plan=plan,
            layout=options.layout,
            x_dtype=x.dtype,
            quantize=quantize,
            strategy=options.strategy,
            part="send" if inputs.split else "whole",
        )
        kernel = launcher.kernel(variant)
        num_places = plan.worst_case_rows("rank") if by_rank else capacity
        args = kernel.args
        args.x = x.data_ptr()
        args.scales = address_of(inputs.scales)
        args.topk_ids = topk_ids.data_ptr()
        args.topk_weights = address_of(inputs.topk_weights)
        args.done_flags = launcher.control.layout.offset("done_flags")
        args.row_flags = launcher.control.layout.offset("row_flags")
        args.block_counts = self._block_counts.data_ptr()
        args.slots_found = args.block_counts + 4 * (len(self._block_counts) - MAX_BLOCKS)
        args.peers = buffer.peers_address
        for name, offset in buffer.offsets:
            setattr(args, name, offset)
        args.slots, args.all_counts = slots.data_ptr(), all_counts.data_ptr()
        args.num_rows, args.source_counts = num_rows.data_ptr(), source_counts.data_ptr()
        args.expert_counts, args.expert_offsets = expert_counts.data_ptr(), expert_offsets.data_ptr()
        args.num_tokens, args.max_tokens = num_tokens, plan.max_tokens_per_rank
        args.capacity, args.alignment = num_places, options.alignment
        args.ids_are_int64 = topk_ids.dtype == torch.int64
        exact = options.sizes == "exact"
        args.stop_on_overflow = exact
        args.host_counts = self._host_counts.address if exact else 0
        args.host_sequence = self._host_counts.expect() if exact else 0
        args.gathered = self._copies.gather(x, fields) if options.strategy == "all_gather" else 0
        args.send_blocks = launcher.num_sms
        half = Half(epoch, fields) if inputs.split else None
        launcher.launch(kernel, fields, region=buffer.number, repeats=repeats, begins=half)
        self.num_dispatches += 1
        with_scales = inputs.scales is not None or options.to_fp8
        handle = NvlinkHandle(
            options=options,
            number=number,
            num_tokens=num_tokens,
            num_places=num_places,
            counts=RoutedCounts(num_rows[0], source_counts, expert_counts, expert_offsets if by_expert else None),
            scales=buffer.scales[:num_places] if with_scales else None,
            capacity=num_places,
            given_ids=topk_ids,
            slots=slots,
            all_counts=all_counts.view(plan.num_ranks, -1),
            local_ids=buffer.local_ids,
            row_places=buffer.row_places,
            weights=None if inputs.topk_weights is None else buffer.weights,
            row_tokens=buffer.row_tokens,
            counts_row=own[: sum(results[:4])],
            reused_after=self.num_dispatches + self._buffers.num_receive - 1,
            rank=launcher.ranks.rank,
            max_tokens=plan.max_tokens_per_rank,
        )
        if half is not None:
            handle.finish = partial(launcher.finish, replace(variant, part="receive"), half)
        return handle, buffer.rows[:num_places]

    def send_again(
        self, handle: NvlinkHandle, values: torch.Tensor, strategy: str = "dedup"
    ) -> Launched[torch.Tensor]:
        """Launch the kernel for other values; see :meth:`tokenloom.backends.base.Backend.send_again`."""
        if handle.options.layout != "expert" or handle.by_token:
            received = self.send_rows(handle, values).receive()
            where = (handle.positions(), handle.num_places)
            return Launched(routing.spread_gradient(received, *where, None, None, values.dtype)[0])
        options = DispatchOptions("expert", handle.options.alignment, "bounded", handle.capacity, strategy=strategy)
        inputs = DispatchInputs(values, None, handle.ids(), None, False, False, False)
        _, rows = self.start(options, inputs, handle.capacity, repeats=True)
        return Launched(rows[: handle.num_places])

    def send_rows(self, handle: NvlinkHandle, values: torch.Tensor, strategy: str = "dedup") -> Launched[torch.Tensor]:
        """Launch the kernel for one row per (token, rank), a view for the most rows there may be."""
        most = self.plan.worst_case_rows("token")
        options = DispatchOptions("token", 1, "bounded", most)
        inputs = DispatchInputs(values, None, handle.ids(), None, False, False, False)
        return Launched(self.start(options, inputs, most)[1])

    # -- the second half ------------------------------------------------------------------------------------

    def receive(self, pending: PendingDispatch) -> tuple[NvlinkHandle, torch.Tensor]:
        """Wait for what the host has to know, and give outputs their size."""
        if pending.options.sizes == "bounded":
            return self._receive_bounded(pending)
        handle, rows, own_outputs = pending.handle, pending.rows, pending.inputs.own_outputs
        counts = self.launcher.await_counts(self._host_counts)
        overflow = self._settled() if counts is None or self._checked else None
        if overflow is not None:
            capacity = pending.options.capacity
            by_expert = pending.options.layout == "expert"
            if not by_expert or (capacity is not None and overflow.needed > capacity):
                raise CapacityOverflow(overflow.needed, capacity or pending.limit, sent=False)
            return self._receive_by_token(pending)
        assert counts is not None, "settle has raised what the call found"
        rows = handle.cut_to_size(counts, rows)
        if own_outputs:
            handle.own()
            rows = rows.clone() if own_outputs is True else rows
        return handle, rows

    def _receive_bounded(self, pending: PendingDispatch) -> tuple[NvlinkHandle, torch.Tensor]:
        handle, rows, capacity = pending.handle, pending.rows, pending.options.capacity
        if handle.finish is not None:
            handle.finish()
            handle.finish = None
        self._settle_checked(handle.number)
        too_short = capacity is not None and len(rows) < capacity
        if too_short or pending.inputs.own_outputs is True:
            handle.own(capacity)
            rows = places.copied(rows, handle.num_places)
        elif pending.inputs.own_outputs:
            handle.own()
        if pending.inputs.out is not None:
            rows = handle.write_to(pending.inputs.out, rows)
        return handle, rows

    def _settle_checked(self, number: int) -> None:
        """Where the host reads every outcome: that of this call. A dropped row is for the next call to raise."""
        if self._checked:
            try:
                self.launcher.settle_before(number + 1)
            except CapacityOverflow as too_many:
                self.overflow = too_many

    def _settled(self) -> CapacityOverflow | None:
        """Settle every call; return what the last one lacks room for, and raise all else."""
        try:
            self.launcher.settle(1)  # what earlier calls left is not to be taken for this one's
        except Exception:
            with suppress(TokenloomError):  # the oldest error is the one to raise
                self.launcher.settle(0, own_fault=True)  # and of this call's own nobody shall hear later
            raise
        try:
            self.launcher.settle(0)
        except CapacityOverflow as overflow:
            return overflow
        return None

    def _receive_by_token(self, pending: PendingDispatch) -> tuple[NvlinkHandle, torch.Tensor]:
        """Layout "expert" of any size: rows arrive one per (token, rank), which always fits, and are spread here."""
        options = pending.options
        self.num_dispatches -= 1  # the refused one wrote nothing: so its buffer, and not that of the one before
        plain = replace(options, layout="token", alignment=1, capacity=None, strategy="dedup")
        try:
            handle, rows = self.start(plain, pending.inputs, self.plan.worst_case_rows("token"))
        except Exception as fault:
            if not is_known_to_all(fault):  # the others have begun it
                self.launcher.report_fault(fault, ["dispatch"])
                fault.known_to_all = True  # type: ignore[attr-defined]
            raise
        self.launcher.settle(0)
        return self.spread_by_expert(options, handle, handle.cut_to_size(handle.counts_row.tolist(), rows))

    def spread_by_expert(
        self, options: DispatchOptions, handle: NvlinkHandle, rows: torch.Tensor
    ) -> tuple[NvlinkHandle, torch.Tensor]:
        """Layout "expert" from rows of layout "token", of their exact size."""
        counts = handle.counts
        placement = places.by_expert(counts.source_counts, counts.expert_counts, options.alignment, handle.local_ids)

        def spread(rows: torch.Tensor) -> torch.Tensor:
            return routing.scatter_rows(rows, placement.positions, placement.num_places)

        offsets = torch.tensor(placement.offsets, dtype=torch.int32, device=rows.device)
        handle.own()
        handle = replace(
            handle,
            options=options,
            counts=replace(counts, num_rows=placement.num_rows, expert_offsets=offsets),
            scales=None if handle.scales is None else spread(handle.scales),
            num_places=placement.num_places,
            capacity=placement.num_places,
            host_offsets=placement.offsets,
            by_token=True,
            row_places=placement.positions.to(torch.int32),
        )
        return handle, spread(rows)


@dataclass
class PendingDispatch:
    """A dispatch whose kernel is on the stream."""

    dispatcher: Dispatcher
    handle: NvlinkHandle
    rows: torch.Tensor
    options: DispatchOptions
    inputs: DispatchInputs
    limit: int

    def receive(self) -> tuple[NvlinkHandle, torch.Tensor]:
        return self.dispatcher.receive(self)


class ExactHalves:
    """A dispatch with exact sizes in two halves: rows arrive where there is room for all, one per (token, rank), and
    the host reads their counts when it receives them."""

    def __init__(self, dispatcher: Dispatcher, options: DispatchOptions, inputs: DispatchInputs) -> None:
        self._dispatcher, self._options = dispatcher, options
        plan = dispatcher.plan
        layout = "token" if options.layout == "expert" else options.layout
        capacity = plan.worst_case_rows("token") if layout == "token" else None
        plain = replace(options, layout=layout, alignment=1, sizes="bounded", capacity=capacity, strategy="dedup")
        self._pending = dispatcher.send(plain, inputs)

    def receive(self) -> tuple[NvlinkHandle, torch.Tensor]:
        handle, rows = self._pending.receive()
        dispatcher, options = self._dispatcher, self._options
        dispatcher.launcher.settle_before(handle.number + 1)
        all_counts = handle.all_counts.tolist()
        needed = _most_rows(dispatcher.plan, options, all_counts)
        if options.capacity is not None and needed > options.capacity:
            raise CapacityOverflow(needed, options.capacity, sent=False)
        counts = torch.cat([each.view(-1) for each in _counts_of(handle)]).tolist()
        rows = handle.cut_to_size(counts, rows)
        if handle.reused_after is not None:
            handle.own()
            rows = rows.clone()
        if options.layout == "expert":
            return dispatcher.spread_by_expert(options, handle, rows)
        return replace(handle, options=options), rows


def _counts_of(handle: NvlinkHandle) -> list[torch.Tensor]:
    """What ``cut_to_size`` takes, but for offsets."""
    counts = handle.counts
    assert isinstance(counts.num_rows, torch.Tensor)
    return [counts.num_rows, counts.source_counts, counts.expert_counts]


def _most_rows(plan: Plan, options: DispatchOptions, all_counts: list[list[int]]) -> int:
    """Rows that the fullest rank has in its output."""
    if options.layout != "expert":
        return max(map(sum, zip(*(each[: plan.num_ranks] for each in all_counts), strict=True)))
    routes = [sum(each) for each in zip(*(each[plan.num_ranks :] for each in all_counts), strict=True)]
    padded = [align_up(each, options.alignment) for each in routes]
    local = plan.experts_per_rank
    return max(sum(padded[rank * local : (rank + 1) * local]) for rank in range(plan.num_ranks))


def _check(plan: Plan, options: DispatchOptions, inputs: DispatchInputs, checked: bool, fused: bool) -> None:
    """Raise for a dispatch that the kernels have no form for.

    Args:
        checked: the host reads the outcome of every call.
        fused: the communicator is a MegaMoE's.
    """
    if inputs.out is not None:
        raise InvalidArgument("backend nvlink writes no dispatch to tensors of the caller yet; leave out= away")
    x, exact = inputs.x, options.sizes == "exact"
    is_fp8 = options.to_fp8 or x.element_size() == 1
    require_layout(options.strategy, options.layout)
    if options.strategy == "all_gather" and is_fp8:
        raise InvalidArgument("strategy 'all_gather' moves no FP8 on backend nvlink; use 'dedup'")
    require_no_host_read(exact or checked, "sizes='exact'" if exact else "checked=True")
    require_bulk(x)
    if fused and (options.layout != "token" or not is_fp8):
        raise InvalidArgument("this communicator is a MegaMoE's, which receives FP8 in layout 'token' only")
    if options.alignment > 1 and plan.worst_case_rows("expert", options.alignment) + options.alignment > 2**31:
        raise InvalidArgument(f"alignment is {options.alignment}: places of rows would not fit 32 bits")
