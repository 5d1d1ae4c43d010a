"""Dispatch: one kernel that sends every row to its place on the ranks that hold its experts."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from tokenloom.backends.base import DispatchInputs, DispatchOptions, RoutedCounts
from tokenloom.backends.handshake import dispatch_fields
from tokenloom.backends.nvlink import places
from tokenloom.backends.nvlink.buffers import Buffers, address_of, aligned, require_bulk, version_of
from tokenloom.backends.nvlink.copies import Copies
from tokenloom.backends.nvlink.launcher import Launched, Launcher, require_layout, require_no_host_read
from tokenloom.errors import CapacityOverflow, InvalidArgument, TokenloomError, is_known_to_all
from tokenloom.kernels.dispatch.launch import MAX_BLOCKS, DispatchVariant, block_count_words
from tokenloom.ops import routing
from tokenloom.plan import Plan
from tokenloom.runtime.kernel_reports import HostCounts
from tokenloom.runtime.leftovers import keep_until_idle

BY_ROW = ("weights", "local_ids", "row_places", "row_tokens")
"""Tensors of a handle that lie in a receive buffer, with a value for each received row."""


@dataclass
class NvlinkHandle:
    """A dispatch as this rank remembers it. R: received rows, in the order (source rank, token).

    Attributes:
        options, number, num_tokens, num_places, counts, scales: as of every handle.
        capacity: places that a row may have; routes beyond it were dropped.
        given_ids: topk_ids as given, which routes gradients the same way.
        ids_version: how often they had been changed in place by then; None where torch does not count.
        slots: int32 [T * W (+ T * K)]: which of the rows to rank r each token is, or -1.
        all_counts: int32 [W, W + E]: rows per rank and routes per expert of every source.
        local_ids, row_places: int32 [>= R, K]: local expert, and place, of each route of a received row.
        weights: float32 [>= R, K] received weights, or None.
        row_tokens: int32 [>= R]: the token at home that a received row is (layout "expert").
        counts_row: int32, num_rows, source_counts, expert_counts and expert_offsets as they lie side by side.
        by_token: rows came one per (token, rank) and were spread here, on all ranks alike.
        host_offsets: expert_offsets on the host, with exact sizes in layout "expert".
        reused_after: number of the dispatch after which the receive buffer is overwritten; None for own tensors.
    """

    options: DispatchOptions
    number: int
    num_tokens: int
    num_places: int
    counts: RoutedCounts
    scales: torch.Tensor | None
    capacity: int
    given_ids: torch.Tensor
    slots: torch.Tensor
    all_counts: torch.Tensor
    local_ids: torch.Tensor
    row_places: torch.Tensor
    weights: torch.Tensor | None
    row_tokens: torch.Tensor
    counts_row: torch.Tensor
    reused_after: int | None
    rank: int
    max_tokens: int
    ids_version: int | None = None
    host_offsets: list[int] | None = None
    by_token: bool = False

    def __post_init__(self) -> None:
        self.ids_version = version_of(self.given_ids)

    @property
    def topk_ids(self) -> torch.Tensor:
        return self.local_ids if self.options.layout == "expert" else self.local_ids[: self.num_places]

    @property
    def topk_weights(self) -> torch.Tensor | None:
        if self.weights is None or self.options.layout == "expert":
            return self.weights
        return self.weights[: self.num_places]

    def ids(self) -> torch.Tensor:
        """The ids that were given.

        Raises:
            InvalidArgument: they were changed in place since, so routes would go elsewhere than their rows did.
        """
        if version_of(self.given_ids) != self.ids_version:
            raise InvalidArgument(
                "topk_ids was changed in place after its dispatch, whose routes are still needed; dispatch a clone"
            )
        return self.given_ids

    def positions(self) -> torch.Tensor:
        received = self.all_counts[:, self.rank].to(torch.int64)
        return places.of_received_rows(
            self.options.layout, self.row_places, received, self.max_tokens, self.capacity, self.given_ids.shape[1]
        )

    def cut_to_size(self, counts: list[int], rows: torch.Tensor) -> torch.Tensor:
        """Give outputs their exact size; the rows that there are.

        Args:
            counts: ``counts_row``, on the host.
            rows: [places, H].
        """
        num_ranks = len(self.counts.source_counts)
        num_rows, received = counts[0], sum(counts[1 : 1 + num_ranks])
        self.counts = replace(self.counts, num_rows=num_rows)
        if self.options.layout == "rank":
            return rows
        if self.options.layout == "expert":
            self.host_offsets = counts[1 + num_ranks + len(self.counts.expert_counts) :]
        self.num_places = num_rows
        if self.scales is not None:
            self.scales = self.scales[:num_rows]
        for name in BY_ROW:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor[:received])
        return rows[:num_rows]

    def own(self, num_places: int | None = None) -> None:
        """Copy what views the receive buffer; outputs get ``num_places`` places if given."""
        if num_places is not None:
            self.num_places = max(num_places, self.num_places)
        if self.scales is not None:
            self.scales = places.copied(self.scales, self.num_places)
        by_place = () if self.options.layout == "expert" else ("local_ids", "weights")
        for name in BY_ROW:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, places.copied(tensor, self.num_places if name in by_place else 0))
        self.reused_after = None


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
        self._plan, self._launcher, self._buffers, self._copies = plan, launcher, buffers, copies
        self._checked = checked
        device = launcher.ranks.device
        self._host_counts = HostCounts(device, 2 + plan.num_ranks + 2 * plan.experts_per_rank)
        self._block_counts = torch.zeros(block_count_words(plan), dtype=torch.int32, device=device)
        keep_until_idle(self, device, self._block_counts)

    def send(self, options: DispatchOptions, inputs: DispatchInputs) -> PendingDispatch:
        """Launch the kernel, which sends and receives; see :meth:`tokenloom.backends.base.Backend.send_dispatch`."""
        _check(self._plan, options, inputs, self._checked, self._buffers.fused)
        row_dtype = inputs.x.dtype
        if options.sizes == "exact" and not inputs.ahead:  # whoever waits hears first of what earlier calls left
            self._launcher.settle(0)
        if options.to_fp8:
            row_dtype = torch.float8_e4m3fn
        room = self._plan.worst_case_rows("token")
        if options.layout == "expert":
            room = max(self._buffers.rows_for(row_dtype), self._buffers.bounded_rows(options))
        limit = room if options.capacity is None else min(options.capacity, room)
        handle, rows = self.start(options, inputs, limit)
        return PendingDispatch(self, handle, rows, options, inputs, limit)

    def start(
        self, options: DispatchOptions, inputs: DispatchInputs, capacity: int, repeats: bool = False
    ) -> tuple[NvlinkHandle, torch.Tensor]:
        """Put the kernel on the current stream: (handle, rows [places, H]), at their full size.

        Args:
            capacity: places of the output; routes beyond it are dropped.
            repeats: the rows went the same way before, so an overflow has been told.
        """
        plan, launcher = self._plan, self._launcher
        x, topk_ids = aligned(inputs.x), aligned(inputs.topk_ids)
        num_tokens, local = x.shape[0], plan.experts_per_rank
        row_dtype = torch.float8_e4m3fn if options.to_fp8 else x.dtype
        number = launcher.num_calls
        fields = dispatch_fields(number, options, inputs)
        by_expert, by_rank = options.layout == "expert", options.layout == "rank"
        buffer = self._buffers.receive(row_dtype, self.num_dispatches, capacity if by_expert else 0, fields)
        results = (1, plan.num_ranks, local, local + 1, plan.num_ranks * (plan.num_ranks + plan.num_experts))
        words = sum(results) + num_tokens * (plan.num_ranks + plan.top_k)
        own = torch.empty(words, dtype=torch.int32, device=x.device)
        num_rows, source_counts, expert_counts, expert_offsets, all_counts, slots = torch.split_with_sizes(
            own, [*results, words - sum(results)]
        )
        quantize = ""
        if options.to_fp8:
            quantize = "power of two" if options.power_of_two_scales else "any scale"
        kernel = launcher.kernel(
            DispatchVariant(
                plan=plan, layout=options.layout, x_dtype=x.dtype, quantize=quantize, strategy=options.strategy
            )
        )
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
        launcher.launch(kernel, fields, region=buffer.number, repeats=repeats)
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
        most = self._plan.worst_case_rows("token")
        options = DispatchOptions("token", 1, "bounded", most)
        inputs = DispatchInputs(values, None, handle.ids(), None, False, False, False)
        return Launched(self.start(options, inputs, most)[1])

    # -- the second half ------------------------------------------------------------------------------------

    def receive(self, pending: PendingDispatch) -> tuple[NvlinkHandle, torch.Tensor]:
        """Wait for what the host has to know, and give outputs their size."""
        if pending.options.sizes == "bounded":
            return self._receive_bounded(pending)
        handle, rows, own_outputs = pending.handle, pending.rows, pending.inputs.own_outputs
        counts = self._launcher.await_counts(self._host_counts)
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
        if self._checked:
            try:
                self._launcher.settle(0)
            except CapacityOverflow as too_many:
                self.overflow = too_many  # the dispatch itself is done; the next call raises
        too_short = capacity is not None and len(rows) < capacity
        if too_short or pending.inputs.own_outputs is True:
            handle.own(capacity)
            rows = places.copied(rows, handle.num_places)
        elif pending.inputs.own_outputs:
            handle.own()
        return handle, rows

    def _settled(self) -> CapacityOverflow | None:
        """Settle every call; return what the last one lacks room for, and raise all else."""
        try:
            self._launcher.settle(1)  # what earlier calls left is not to be taken for this one's
        except Exception:
            with suppress(TokenloomError):  # the oldest error is the one to raise
                self._launcher.settle(0, own_fault=True)  # and of this call's own nobody shall hear later
            raise
        try:
            self._launcher.settle(0)
        except CapacityOverflow as overflow:
            return overflow
        return None

    def _receive_by_token(self, pending: PendingDispatch) -> tuple[NvlinkHandle, torch.Tensor]:
        """Layout "expert" of any size: rows arrive one per (token, rank), which always fits, and are spread here."""
        options = pending.options
        self.num_dispatches -= 1  # the refused one wrote nothing: so its buffer, and not that of the one before
        plain = replace(options, layout="token", alignment=1, capacity=None, strategy="dedup")
        try:
            handle, rows = self.start(plain, pending.inputs, self._plan.worst_case_rows("token"))
        except Exception as fault:
            if not is_known_to_all(fault):  # the others have begun it
                self._launcher.report_fault(fault, ["dispatch"])
                fault.known_to_all = True  # type: ignore[attr-defined]
            raise
        self._launcher.settle(0)
        rows = handle.cut_to_size(handle.counts_row.tolist(), rows)
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


def require_one_call(split: bool) -> None:
    """Raise InvalidArgument for a call in two halves."""
    if split:
        raise InvalidArgument("backend nvlink has no calls in two halves yet; use dispatch and combine")


def _check(plan: Plan, options: DispatchOptions, inputs: DispatchInputs, checked: bool, fused: bool) -> None:
    """Raise for a dispatch that the kernels have no form for.

    Args:
        checked: the host reads the outcome of every call.
        fused: the communicator is a MegaMoE's.
    """
    require_one_call(inputs.split)
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
