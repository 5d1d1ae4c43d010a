"""Dispatch: one kernel that sends every row to its place on the ranks that hold its experts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from tokenloom.backends.base import DispatchInputs, DispatchOptions, OwnOutputs, Pending, Rows, UsualDispatch
from tokenloom.backends.nvlink import places
from tokenloom.backends.nvlink.again import UsualAgain
from tokenloom.backends.nvlink.buffers import Buffers, ReceiveBuffer
from tokenloom.backends.nvlink.copies import Copies
from tokenloom.backends.nvlink.exact import ExactHalves, spread_by_expert
from tokenloom.backends.nvlink.handle import NvlinkHandle
from tokenloom.backends.nvlink.launcher import Half, Launched, Launcher
from tokenloom.backends.nvlink.prepared import DirectDispatch, PreparedDispatch, SharedByDirect, check
from tokenloom.backends.nvlink.results import ResultsMemory
from tokenloom.backends.nvlink.staged import StagedDispatch
from tokenloom.errors import CapacityOverflow, InvalidArgument, TokenloomError, is_known_to_all
from tokenloom.kernels.dispatch.launch import block_count_words
from tokenloom.ops import routing
from tokenloom.plan import Plan
from tokenloom.runtime.deferred_release import keep_until_idle
from tokenloom.runtime.kernel_reports import HostCounts

MOST_KINDS = 64
"""Kinds of calls that are kept prepared. A program has a few, unless it passes another capacity each time."""


class Dispatcher:
    """The dispatches of one communicator.

    Args:
        checked: the host reads the outcome of every call before it returns.

    Attributes:
        overflow: a dropped row that a bounded dispatch has found and the next call raises.
    """

    def __init__(self, plan: Plan, launcher: Launcher, buffers: Buffers, copies: Copies, checked: bool) -> None:
        self.overflow: CapacityOverflow | None = None
        self.plan, self.launcher, self._buffers = plan, launcher, buffers
        self._checked = checked
        device = launcher.ranks.device
        self._host_counts = HostCounts(device, 2 + plan.num_ranks + 2 * plan.experts_per_rank)
        block_counts = torch.zeros(block_count_words(plan), dtype=torch.int32, device=device)
        keep_until_idle(self, device, block_counts)
        memory = ResultsMemory(device)
        self._shared = SharedByDirect(
            plan, launcher, buffers, block_counts, memory, checked, copies, self._host_counts
        )
        self._prepared: dict[tuple[object, ...], PreparedDispatch] = {}
        buffers.when_grown.append(self._forget)

    def send(
        self, options: DispatchOptions, inputs: DispatchInputs, meant: DispatchOptions | None = None
    ) -> Pending[tuple[NvlinkHandle, torch.Tensor]]:
        """Launch the kernel, which sends and receives, or one that sends; see
        :meth:`tokenloom.backends.base.Backend.send_dispatch`.
        """
        exact = options.sizes == "exact"
        if (inputs.split or inputs.ahead or inputs.own_outputs == "but rows") and not self._buffers.is_staged(options):
            self._require_none_lent()
        if exact and inputs.split:
            check(self._shared, options, inputs)
            return ExactHalves(self, options, inputs)
        prepared = self._prepare(options, inputs, meant=meant)
        prepared.require_now()
        if exact and not inputs.ahead:  # whoever waits hears first of what earlier calls left
            self.launcher.settle(0)
        return PendingDispatch(self, prepared, inputs, *prepared.launch(*given(inputs), inputs.out))

    def _require_none_lent(self) -> None:
        """Raise where two dispatches may be open at once, but a caller holds one of the two receive buffers."""
        if self._buffers.any_lent:
            raise InvalidArgument(
                'rows of a dispatch with copy="if_needed" are still held, and no second dispatch can be open beside '
                "them; let go of them before, or pass copy=True there"
            )

    def usual(self, options: DispatchOptions, inputs: DispatchInputs) -> UsualDispatch | None:
        """See :meth:`tokenloom.backends.base.Backend.usual_dispatch`."""
        if self._checked or options.strategy != "dedup" or inputs.own_outputs == "but rows":
            return None
        prepared = self._prepare(options, inputs)
        if not isinstance(prepared, DirectDispatch):
            return prepared
        if options.sizes == "exact" or inputs.own_outputs or prepared.num_places < (options.capacity or 0):
            return UsualWithFinish(self, prepared, inputs.own_outputs)
        return prepared

    def _forget(self) -> None:
        """What was prepared knows where buffers were."""
        for each in self._prepared.values():
            each.is_old = True
        self._prepared.clear()

    def _prepare(
        self,
        options: DispatchOptions,
        inputs: DispatchInputs,
        capacity: int | None = None,
        repeats: bool = False,
        meant: DispatchOptions | None = None,
    ) -> PreparedDispatch:
        """What was prepared for such calls, now or for an earlier one; see :class:`DirectDispatch`."""
        if len(self._prepared) > MOST_KINDS:
            self._forget()
        weights = inputs.topk_weights
        key = (
            options,
            inputs.x.dtype,
            inputs.scales is None,
            inputs.scale_words,
            inputs.topk_ids.dtype,
            None if weights is None else weights.dtype,
            inputs.x_needs_grad,
            inputs.weights_need_grad,
            inputs.split,
            capacity,
            repeats,
            meant,
        )
        found = self._prepared.get(key)
        if found is None:
            if capacity is None and self._buffers.is_staged(options):
                found = StagedDispatch(self._shared, options, inputs, repeats, meant)
            else:
                found = DirectDispatch(self._shared, options, inputs, capacity, repeats, meant)
            self._prepared[key] = found
        return found

    def start(
        self, options: DispatchOptions, inputs: DispatchInputs, capacity: int, repeats: bool = False
    ) -> tuple[NvlinkHandle, torch.Tensor]:
        """Put the kernel on the current stream: (handle, rows [places, H]), at their full size.

        Args:
            capacity: places of the output; routes beyond it are dropped.
            repeats: the rows went the same way before, so an overflow has been told.
        """
        return self._prepare(options, inputs, capacity, repeats).launch(*given(inputs))[:2]

    def send_again(
        self, handle: NvlinkHandle, values: Rows, strategy: str = "dedup", own: OwnOutputs = False
    ) -> Launched[Rows]:
        """Launch the kernel for other values; see :meth:`tokenloom.backends.base.Backend.send_again`."""
        self.launcher.require_known(handle.number)
        layout = handle.options.layout
        if layout == "slots" or handle.by_token or handle.masked != self.launcher.masked:
            where = (handle.positions(), handle.num_places)
            received = self._send_rows(handle, values)
            return Launched(_each(lambda rows: routing.scatter_rows(rows, *where), received))
        capacity, options = handle.capacity, _options_again(handle)
        options = replace(options, strategy=strategy) if layout == "expert" else options
        again, rows = self.start(options, _repeated(handle, values), capacity, repeats=True)
        copy, num_places = self._copier(again, own), handle.num_places
        if num_places > capacity:
            copy = partial(places.copied, least=num_places)
        found = rows if again.scales is None else (rows, again.scales)
        return Launched(_each(lambda rows: copy(rows[:num_places]), found))

    def usual_again(self, handle: NvlinkHandle, values: Rows, own: OwnOutputs) -> UsualAgain | None:
        """See :meth:`tokenloom.backends.base.MakesUsualCalls.usual_again`."""
        if self._checked or handle.options.layout == "slots" or handle.by_token:
            return None
        prepared = self._prepare(_options_again(handle), _repeated(handle, values), handle.capacity, repeats=True)
        assert isinstance(prepared, DirectDispatch), "rows come to places of receive buffers"
        return UsualAgain(prepared, self._copier, own)

    def send_rows(self, handle: NvlinkHandle, values: torch.Tensor, strategy: str = "dedup") -> Launched[torch.Tensor]:
        """Launch the kernel for one row per (token, rank), a view for the most rows there may be."""
        self.launcher.require_known(handle.number)
        rows = self._send_rows(handle, values)
        assert isinstance(rows, torch.Tensor)
        return Launched(rows)

    def _send_rows(self, handle: NvlinkHandle, values: Rows) -> Rows:
        most, inputs = self.plan.worst_case_rows("token"), _repeated(handle, values)
        if handle.masked == self.launcher.masked:
            again, rows = self.start(DispatchOptions("token", 1, "bounded", most), inputs, most)
        else:  # with others' rows missing, rows would lie elsewhere than theirs did
            again, rows = self.start(DispatchOptions("rank", 1, "bounded", None), inputs, most, repeats=True)
        copy = self._copier(again, False)
        found = _each(copy, rows if again.scales is None else (rows, again.scales))
        if handle.masked == self.launcher.masked:
            return found
        received = handle.all_counts[:, handle.results.rank].to(torch.int64)
        where = (received, self.plan.max_tokens_per_rank, self.launcher.masked)
        return _each(lambda rows: places.without_sources(rows, *where), found)

    # -- the second half ------------------------------------------------------------------------------------

    def receive(self, pending: PendingDispatch) -> tuple[NvlinkHandle, torch.Tensor]:
        """Launch the second kernel if there is one, and do what :meth:`finish` does."""
        if pending.half is not None:
            self.launcher.finish(pending.half)
        return self.finish(pending.prepared, pending.handle, pending.rows, pending.inputs)

    def finish(
        self, prepared: PreparedDispatch, handle: NvlinkHandle, rows: torch.Tensor, inputs: DispatchInputs
    ) -> tuple[NvlinkHandle, torch.Tensor]:
        """Wait for what the host has to know, and give outputs their size and their owner."""
        if isinstance(prepared, DirectDispatch) and prepared.options.sizes == "exact":
            return self._finish_exact(prepared, handle, rows, inputs)
        if self._checked:
            self._settle_checked(handle.number)
        if isinstance(prepared, DirectDispatch):
            return self._finish_bounded(handle, rows, inputs)
        handle.write_ids(inputs.out)
        return handle, rows

    def _finish_exact(
        self, prepared: DirectDispatch, handle: NvlinkHandle, rows: torch.Tensor, inputs: DispatchInputs
    ) -> tuple[NvlinkHandle, torch.Tensor]:
        options = prepared.options
        counts = self.launcher.outcomes.await_counts(self._host_counts)
        overflow = self._settled_with(handle) if counts is None or self._checked else None
        if overflow is not None:
            handle.lent = None  # the rows come to the same buffer
            capacity = options.capacity
            if options.layout != "expert" or (capacity is not None and overflow.needed > capacity):
                raise CapacityOverflow(overflow.needed, capacity or prepared.capacity, sent=False)
            return self._receive_by_token(options, inputs)
        assert counts is not None, "settle has raised what the call found"
        if handle.lent is not None:
            return handle, handle.take_lent(counts)
        return handle, self._owned(handle, handle.cut_to_size(counts, rows), inputs.own_outputs)

    def _finish_bounded(
        self, handle: NvlinkHandle, rows: torch.Tensor, inputs: DispatchInputs
    ) -> tuple[NvlinkHandle, torch.Tensor]:
        capacity = handle.options.capacity
        if capacity is not None and handle.num_places < capacity:
            handle.own(capacity)
            rows = places.copied(rows, handle.num_places)
        else:
            rows = self._owned(handle, rows, inputs.own_outputs)
        if inputs.out is not None:
            rows = handle.write_to(inputs.out, rows)
        return handle, rows

    def _owned(self, handle: NvlinkHandle, rows: torch.Tensor, owner: OwnOutputs) -> torch.Tensor:
        """The rows as their owner gets them, and with them what came beside them."""
        if owner == "but rows":
            handle.own()
            return rows
        copy = self._copier(handle, owner)
        if copy is not _view:
            handle.own(copy=copy)
        return copy(rows)

    def lend_early(self, handle: NvlinkHandle, rows: torch.Tensor) -> None:
        """Make outputs their caller's while the kernel runs, and the host need not know their size: rows that can be
        lent, and what came beside them."""
        copy = self._copier(handle, "if needed")
        if copy is torch.clone:
            return
        scales = handle.scales
        handle.lent = copy(rows), None if scales is None else copy(scales)
        handle.own_beside()

    def _copier(self, handle: NvlinkHandle, owner: OwnOutputs) -> Callable[[torch.Tensor], torch.Tensor]:
        """What gives a caller rows of the receive buffer: views, copies, or the very rows, which are theirs then."""
        buffer = handle.buffer
        assert isinstance(buffer, ReceiveBuffer), "only rows of direct dispatches lie in receive buffers"
        if not owner and not self._buffers.any_lent:
            return _view
        lends = owner == "if needed" and self._buffers.can_lend(buffer, handle.reused_after)
        return buffer.loan.lend if lends and not self.launcher.current()[1] else torch.clone

    def _settle_checked(self, number: int) -> None:
        """Read the outcome of this call. A dropped row is for the next call to raise."""
        try:
            self.launcher.outcomes.settle_before(number + 1)
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

    def _settled_with(self, handle: NvlinkHandle) -> CapacityOverflow | None:
        """Do what :meth:`_settled` does. Who keeps an error, which keeps this dispatch, holds no rows of it."""
        try:
            return self._settled()
        except Exception:
            handle.lent = None
            raise

    def _receive_by_token(self, options: DispatchOptions, inputs: DispatchInputs) -> tuple[NvlinkHandle, torch.Tensor]:
        """Layout "expert" of any size: rows arrive one per (token, rank), which always fits, and are spread here."""
        self._buffers.num_dispatches -= (
            1  # the refused one wrote nothing: so its buffer, and not that of the one before
        )
        plain = replace(options, layout="token", alignment=1, capacity=None, strategy="dedup")
        try:
            handle, rows = self.start(plain, inputs, self.plan.worst_case_rows("token"))
        except Exception as fault:
            if not is_known_to_all(fault):  # the others have begun it
                self.launcher.report_fault(fault, ["dispatch"])
                fault.known_to_all = True  # type: ignore[attr-defined]
            raise
        self.launcher.settle(0)
        return spread_by_expert(options, handle, handle.cut_to_size(handle.all_sizes(), rows))


class UsualWithFinish:
    """Direct dispatches of one kind, behind whose launch there is something left to do: wait for counts, or copy.

    Args:
        dispatcher, prepared: what makes them.
        own_outputs: of all of them.
    """

    takes_out = False

    def __init__(self, dispatcher: Dispatcher, prepared: DirectDispatch, own_outputs: OwnOutputs) -> None:
        self.awaited, self.launch = prepared.options.sizes == "exact", prepared.launch
        self._dispatcher, self._prepared, self._own_outputs = dispatcher, prepared, own_outputs
        self._lends_early = self.awaited and own_outputs == "if needed"

    @property
    def is_stale(self) -> bool:
        return self._prepared.is_old

    def finish(
        self,
        handle: NvlinkHandle,
        rows: torch.Tensor,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        topk_ids: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> tuple[NvlinkHandle, torch.Tensor]:
        if self._lends_early:
            self._dispatcher.lend_early(handle, rows)
        inputs = DispatchInputs(x, scales, topk_ids, weights, False, False, self._own_outputs)
        return self._dispatcher.finish(self._prepared, handle, rows, inputs)


class PendingDispatch:
    """A dispatch whose first kernel, or only one, is on the stream."""

    __slots__ = ("dispatcher", "half", "handle", "inputs", "prepared", "rows")

    def __init__(
        self,
        dispatcher: Dispatcher,
        prepared: PreparedDispatch,
        inputs: DispatchInputs,
        handle: NvlinkHandle,
        rows: torch.Tensor,
        half: Half | None,
    ) -> None:
        self.dispatcher, self.prepared, self.inputs = dispatcher, prepared, inputs
        self.handle, self.rows, self.half = handle, rows, half

    def receive(self) -> tuple[NvlinkHandle, torch.Tensor]:
        return self.dispatcher.receive(self)


def given(
    inputs: DispatchInputs,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None, int]:
    """What a prepared dispatch is given first: x, scales, topk_ids, weights, tokens."""
    return inputs.x, inputs.scales, inputs.topk_ids, inputs.topk_weights, inputs.x.shape[0]


def _options_again(handle: NvlinkHandle) -> DispatchOptions:
    """Of other rows that come to the places of a dispatch."""
    layout = handle.options.layout
    capacity = None if layout == "rank" else handle.capacity
    return DispatchOptions(layout, handle.options.alignment, "bounded", capacity)


def _repeated(handle: NvlinkHandle, values: Rows) -> DispatchInputs:
    """Other values by the routes of a dispatch."""
    x, scales = values if isinstance(values, tuple) else (values, None)
    return DispatchInputs(x, scales, handle.ids(), None, False, False, False)


def _each(function: Callable[[torch.Tensor], torch.Tensor], values: Rows) -> Rows:
    """The function of the rows, and of their scales if they have some."""
    return (function(values[0]), function(values[1])) if isinstance(values, tuple) else function(values)


def _view(rows: torch.Tensor) -> torch.Tensor:
    return rows
