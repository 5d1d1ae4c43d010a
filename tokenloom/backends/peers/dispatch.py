"""Dispatch: one kernel that sends every row to its place on the ranks that hold its experts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from tokenloom.backends.peers.buffers import RECEIVE_BUFFERS, Buffers, ReceiveBuffer
from tokenloom.backends.peers.copies import Copies
from tokenloom.backends.peers.handle import (
    PeerHandle,
    ResultsLayout,
    ResultsMemory,
    copied_with_room,
    place_by_expert,
    rows_without_sources,
)
from tokenloom.backends.peers.opening import Half, Launched, Launcher, require_no_host_read
from tokenloom.backends.peers.prepared import (
    OUTPUT_WORDS,
    PeerDispatch,
    SentDispatch,
    SharedByDirect,
    StagedDispatch,
    check,
    scale_words,
)
from tokenloom.backends.seam import (
    DispatchKind,
    DispatchOptions,
    DispatchOut,
    OutputOwner,
    PreparedDispatch,
    ResendTo,
    Rows,
    Sent,
    Tokens,
)
from tokenloom.errors import CapacityOverflow, InvalidArgument, TokenloomError
from tokenloom.kernels.common import block_count_words
from tokenloom.kernels.dispatch.launch import OUTPUTS
from tokenloom.ops import routing
from tokenloom.plan import ROUTE_LAYOUTS, Plan, align_up
from tokenloom.runtime.deferred_release import keep_until_idle
from tokenloom.runtime.kernel_reports import HostCounts
from tokenloom.runtime.telling import Telling

MAX_KINDS = 64
"""Kinds of calls that are kept prepared. A program has a few, unless it passes another capacity each time."""


class Dispatcher:
    """The dispatches of one communicator.

    Args:
        checked: the host reads the outcome of every call before it returns.

    Attributes:
        shared: by all prepared dispatches.
    """

    def __init__(self, plan: Plan, launcher: Launcher, buffers: Buffers, copies: Copies, checked: bool) -> None:
        self.plan, self.launcher, self._buffers = plan, launcher, buffers
        device = launcher.ranks.device
        block_counts = torch.zeros(block_count_words(plan), dtype=torch.int32, device=device)
        keep_until_idle(self, device, block_counts)
        self.shared = SharedByDirect(
            plan=plan,
            launcher=launcher,
            buffers=buffers,
            block_counts=block_counts,
            memory=ResultsMemory(device),
            checked=checked,
            copies=copies,
            host_counts=HostCounts(device, 2 + plan.num_ranks + 2 * plan.experts_per_rank),
        )
        self._prepared: dict[tuple[object, ...], PeerDispatch] = {}
        self._resends: dict[tuple[object, ...], PeerDispatch] = {}
        buffers.when_grown.append(self._forget)

    def prepare(self, kind: DispatchKind) -> PreparedDispatch:
        """Prepare dispatches; see :meth:`tokenloom.backends.seam.Backend.prepare_dispatch`."""
        if kind.split and kind.options.sizes == "exact":
            check(self.shared, kind)
            return ExactHalves(self, kind)
        return self.find_or_prepare(kind)

    def _forget(self) -> None:
        """Prepare all anew: what was prepared knows where buffers were."""
        for each in self._prepared.values():
            each.is_stale = True
            each.forget_buffers()
        self._prepared.clear()
        self._resends.clear()

    def find_or_prepare(
        self,
        kind: DispatchKind,
        capacity: int | None = None,
        repeats: bool = False,
        user_options: DispatchOptions | None = None,
    ) -> PeerDispatch:
        """Dispatches of one kind, prepared now or for an earlier call; see :class:`DirectDispatch`."""
        if len(self._prepared) > MAX_KINDS:
            self._forget()
        key = (kind, capacity, repeats, user_options)
        found = self._prepared.get(key)
        if found is None:
            if capacity is None and self._buffers.is_staged(kind.options):
                found = StagedDispatch(self.shared, kind, repeats, user_options)
            else:
                found = DirectDispatch(self, kind, capacity, repeats, user_options)
            self._prepared[key] = found
        return found

    # -- other rows of the same tokens ----------------------------------------------------------------------

    def resend(
        self,
        handle: PeerHandle,
        values: Rows,
        to: ResendTo = "places",
        strategy: str = "dedup",
        owner: OutputOwner = False,
        stream: int | None = None,
    ) -> Launched[Rows]:
        """Launch the kernel for other values; see :meth:`tokenloom.backends.seam.Backend.resend`."""
        self.launcher.require_known(handle.number)
        if to == "rows":  # a view for the most rows there may be
            return Launched((self._send_rows(handle, values),))
        layout = handle.options.layout
        if layout == "slots" or handle.by_token or handle.masked != self.launcher.masked:
            where = (handle.positions(), handle.num_places)
            received = self._send_rows(handle, values)
            return Launched((_each(lambda rows: routing.scatter_rows(rows, *where), received),))
        capacity = handle.capacity
        alignment = handle.options.alignment
        options = (layout, alignment, "bounded", None if layout == "rank" else capacity)
        strategy = strategy if layout == "expert" else "dedup"
        again, rows = self._resend(handle, values, options, capacity, True, strategy, stream)
        copy, num_places = copier(self._buffers, again, owner), handle.num_places
        if num_places > capacity:
            copy = partial(copied_with_room, least=num_places)
        found = rows if again.scales is None else (rows, again.scales)
        return Launched((_each(lambda rows: copy(rows[:num_places]), found),))

    def _send_rows(self, handle: PeerHandle, values: Rows) -> Rows:
        most = self.plan.worst_case_rows("token")
        if handle.masked == self.launcher.masked:
            again, rows = self._resend(handle, values, ("token", 1, "bounded", most), most, False)
        else:  # with others' rows missing, rows would lie elsewhere than theirs did
            again, rows = self._resend(handle, values, ("rank", 1, "bounded", None), most, True)
        copy = copier(self._buffers, again, False)
        found = _each(copy, rows if again.scales is None else (rows, again.scales))
        if handle.masked == self.launcher.masked:
            return found
        received = handle.all_counts[:, handle.results.rank].to(torch.int64)
        where = (received, self.plan.max_tokens_per_rank, self.launcher.masked)
        return _each(lambda rows: rows_without_sources(rows, *where), found)

    def _resend(
        self,
        handle: PeerHandle,
        values: Rows,
        options: tuple[str, int, str, int | None],
        capacity: int,
        repeats: bool,
        strategy: str = "dedup",
        stream: int | None = None,
    ) -> tuple[PeerHandle, torch.Tensor]:
        """Launch the kernel for other values by the routes of a dispatch: (handle, rows) at their full size."""
        x, scales = values if isinstance(values, tuple) else (values, None)
        tokens = Tokens(x, scales, handle.ids(), None)
        # As the kind, but quicker to make.
        recipe = handle.options.recipe
        key = (options, strategy, recipe, capacity, x.dtype, x.shape[1], tokens.topk_ids.dtype, scales is None)
        prepared = self._resends.get(key)
        if prepared is None:
            kind = DispatchKind(
                DispatchOptions(*options, strategy=strategy, recipe=recipe),
                x.dtype,
                tokens.topk_ids.dtype,
                with_scales=scales is not None,
                width=None if x.shape[1] == self.plan.hidden else x.shape[1],
            )
            prepared = self.find_or_prepare(kind, capacity, repeats)
            self._resends[key] = prepared
        return prepared.launch(tokens, None, stream)[:2]


class DirectDispatch(PeerDispatch):
    """Dispatches of one kind whose rows go straight to their places in a receive buffer.

    Args:
        capacity: places of the output in layouts "token" and "expert", of each expert in layout "slots"; routes beyond
            it are dropped. None: as many as the options and the buffers allow.

    Attributes:
        capacity: the same, filled in.
    """

    shared: SharedByDirect

    def __init__(
        self,
        dispatcher: Dispatcher,
        kind: DispatchKind,
        capacity: int | None = None,
        repeats: bool = False,
        user_options: DispatchOptions | None = None,
    ) -> None:
        shared, options = dispatcher.shared, kind.options
        super().__init__(shared, kind, repeats, user_options)
        self._dispatcher = dispatcher
        plan, buffers = self.plan, shared.buffers
        self._buffers = buffers
        self._count = buffers if kind.width is None else buffers.narrow
        self.capacity = self._most_rows() if capacity is None else capacity
        of_slots = options.layout == "slots"
        self.num_places = plan.worst_case_rows("rank") if options.layout == "rank" else self.capacity
        if of_slots:
            self.num_places *= plan.experts_per_rank
        # Senders drop by it what does not fit elsewhere, and leave a call without a word where it is exact.
        self.call_kind = self.call_kind.also("rows of the output", self.num_places)
        self._buffer_rows = self.num_places if options.layout in ROUTE_LAYOUTS else 0
        results = ResultsLayout(
            plan,
            self.launcher,
            options,
            self.num_places,
            self._words_of_slots() if of_slots else {},
            with_weights=self.with_weights,
            with_scales=kind.brings_scales,
            dispatches=self._count,
        )
        # One for each of those that dispatches take turns in, with its rows; made when first used.
        self._received: list[tuple[ReceiveBuffer, torch.Tensor] | None] = [None] * RECEIVE_BUFFERS
        self.prepare_kernels(results, self.capacity if of_slots else self.num_places)
        # What this layout does not have lies nowhere.
        self._outputs = [results.at.get(OUTPUT_WORDS.get(name, ""), 0) for name in OUTPUTS] if of_slots else []
        self.kernel.args.stop_on_overflow = self.waits
        self.kernel.args.host_counts = shared.host_counts.address if self.waits else 0
        self.lends_early = self.waits and kind.output_owner == "if needed" and not (kind.split or kind.sent_ahead)
        # Two such dispatches may be open at once.
        self._wants_both_buffers = kind.split or kind.sent_ahead or kind.output_owner == "but rows"
        self._gathers = options.strategy == "all_gather"
        self._is_short = options.sizes == "bounded" and self.num_places < (options.capacity or 0)
        self._copies_nothing = not (self.waits or kind.output_owner or self._is_short or shared.checked)
        self._receive_buffer(self._count.num_dispatches)  # last: it may make memory, which all ranks then do

    def _most_rows(self) -> int:
        shared, options = self.shared, self.options
        room = shared.plan.worst_case_rows("token")
        if options.layout == "slots":
            assert options.capacity is not None, "users may leave it out, options do not"
            return options.capacity
        if options.layout == "expert":
            room = max(shared.buffers.rows_for(self.kind.row_dtype), shared.buffers.bounded_rows(options))
        return room if options.capacity is None else min(options.capacity, room)

    def _words_of_slots(self) -> dict[str, int]:
        """Ranges of sources, and scales that do not lie beside rows, have words of their own."""
        words = {"slot_ranges": 2 * self.plan.num_experts}
        if self.kind.brings_scales and self.options.scale_layout != "rows":
            words["scales"] = scale_words(self.plan, self.options, self.num_places)
        return words

    def require_now(self) -> None:
        if self._wants_both_buffers and self._buffers.any_lent:
            raise InvalidArgument(
                'rows of a dispatch with copy="if_needed" are still held, and no second dispatch can be open beside '
                "them; let go of them before, or pass copy=True there"
            )
        super().require_now()

    @property
    def is_done_when_sent(self) -> bool:  # type: ignore[override]
        # With halves others may lend rows before the second one; see finish.
        return self._copies_nothing and not (self._buffers.may_be_lent or self._wants_both_buffers)

    def lend(self, handle: PeerHandle, rows: torch.Tensor) -> None:
        """Lend rows, if they can be lent, and copy the rest."""
        copy = copier(self._buffers, handle, "if needed")
        if copy is torch.clone:
            return
        scales = handle.scales
        handle.lent = copy(rows), None if scales is None else copy(scales)
        handle.own_route_words()

    def forget_buffers(self) -> None:
        self._received = [None] * RECEIVE_BUFFERS

    # -- the launch -----------------------------------------------------------------------------------------

    def _receive_buffer(self, number: int) -> tuple[ReceiveBuffer, torch.Tensor]:
        turn = number % len(self._received)
        found = self._received[turn]
        if found is None:
            fields = self.call_kind.fields_of(self.launcher.num_calls)
            given = (self.kind.row_dtype, number, self._buffer_rows, fields)
            buffer = self._buffers.receive(*given, width=self.kind.width)
            found = self._received[turn] = buffer, buffer.rows[: self.num_places]
            args = self.kernel.args
            args.peers = buffer.peers_address
            for name, offset in buffer.offsets:
                setattr(args, name, offset)
        return found

    def _next_free(self, number: int) -> tuple[ReceiveBuffer, torch.Tensor]:
        """The next receive buffer that no caller holds. At most one of the two is held."""
        found = self._received[number % len(self._received)] or self._receive_buffer(number)
        loan = found[0].loan
        if not loan.was_lent:
            return found
        if not loan.is_held:
            loan.take_back(self.launcher)
            return found
        self._count.num_dispatches += 1
        return self._next_free(number + 1)

    def launch(
        self, tokens: Tokens, out: DispatchOut | None = None, stream: int | None = None
    ) -> tuple[PeerHandle, torch.Tensor, Half | None]:
        launcher, shared, results, count = self.launcher, self.shared, self.results, self._count
        buffer, rows = self._next_free(count.num_dispatches)
        num_tokens = tokens.x.shape[0]
        memory = shared.memory.take(results, num_tokens, stream)
        host_sequence = shared.host_counts.expect() if self.waits else 0
        base = memory[2]
        outputs = [base + at for at in self._outputs] if self._outputs else ()
        x, topk_ids = self.set_arguments(tokens, num_tokens, results, base, host_sequence, *outputs)
        if self._gathers:
            self.kernel.args.gathered = shared.copies.gather(x, self.call_kind.fields_of(launcher.num_calls))
            stream = None  # copies take the slow path
        call = launcher.num_calls  # behind what makes memory, which is a call by itself
        half = None
        if stream is None:
            half = self.half(memory, buffer)
            launcher.launch(self.kernel, self.call_kind, call, region=buffer.number, repeats=self.repeats, begins=half)
        else:
            launcher.launch_ready(self.kernel, self.call_kind, call, stream, buffer.number, repeats=self.repeats)
        reused_after = count.num_dispatches + RECEIVE_BUFFERS
        count.num_dispatches += 1
        return PeerHandle(results, memory, call, num_tokens, topk_ids, buffer, reused_after), rows, half

    # -- the second half ------------------------------------------------------------------------------------

    def finish(self, sent: SentDispatch) -> tuple[PeerHandle, torch.Tensor]:
        handle, rows, owner = sent.handle, sent.rows, self.kind.output_owner
        if self._copies_nothing and sent.out is None and not (self._buffers.may_be_lent and self._buffers.any_lent):
            return handle, rows
        if self.waits:
            return self._finish_exact(sent)
        if self.shared.checked:
            self.shared.settle_checked(handle.number)
        if self._is_short:
            handle.own(self.options.capacity)
            rows = copied_with_room(rows, handle.num_places)
        else:
            rows = self._owned(handle, rows, owner)
        if sent.out is not None:
            rows = handle.write_to(sent.out, rows)
            if self._outputs and sent.out.tokens is not None:  # slots may be combined when their buffer is reused
                handle.own_route_words()
                handle.reused_after = None
        return handle, rows

    def _finish_exact(self, sent: SentDispatch) -> tuple[PeerHandle, torch.Tensor]:
        handle, options, shared = sent.handle, self.options, self.shared
        counts = self.launcher.outcomes.await_counts(shared.host_counts)
        overflow = self._settled_with(handle) if counts is None or shared.checked else None
        if overflow is not None:
            handle.lent = None  # the rows come to the same buffer
            capacity = options.capacity
            if options.layout != "expert" or (capacity is not None and overflow.needed > capacity):
                raise CapacityOverflow(overflow.needed, capacity or self.capacity, sent=False)
            return self._receive_by_token(sent.tokens)
        assert counts is not None, "settle has raised what the call found"
        if handle.lent is not None:
            return handle, handle.take_lent(counts)
        return handle, self._owned(handle, handle.cut_to_size(counts, sent.rows), self.kind.output_owner)

    def _owned(self, handle: PeerHandle, rows: torch.Tensor, owner: OutputOwner) -> torch.Tensor:
        """The rows as their owner gets them, and with them the rest of the outputs."""
        if owner == "but rows":
            handle.own()
            return rows
        copy = copier(self._buffers, handle, owner)
        if copy is not _view:
            handle.own(copy=copy)
        return copy(rows)

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

    def _settled_with(self, handle: PeerHandle) -> CapacityOverflow | None:
        """Do what :meth:`_settled` does. Who keeps an error, which keeps this dispatch, holds no rows of it."""
        try:
            return self._settled()
        except Exception:
            handle.lent = None
            raise

    def _receive_by_token(self, tokens: Tokens) -> tuple[PeerHandle, torch.Tensor]:
        """Layout "expert" of any size: rows arrive one per (token, rank), which always fits, and are spread here."""
        self._count.num_dispatches -= 1  # the refused one wrote nothing: its buffer, not that of the one before
        plain = replace(self.options, layout="token", alignment=1, capacity=None, strategy="dedup")
        most = self.shared.plan.worst_case_rows("token")
        others_wait = Telling(lambda fault: self.launcher.report_fault(fault, ["dispatch"]), self.launcher.ranks.abort)
        with others_wait:  # they have begun it
            kind = replace(self.kind, options=plain)
            handle, rows, _ = self._dispatcher.find_or_prepare(kind, most).launch(tokens)
        self.launcher.settle(0)
        return spread_by_expert(self.options, handle, handle.cut_to_size(handle.all_sizes(), rows))


def copier(buffers: Buffers, handle: PeerHandle, owner: OutputOwner) -> Callable[[torch.Tensor], torch.Tensor]:
    """Choose how a caller gets rows of the receive buffer: as views, as copies, or on loan."""
    buffer = handle.buffer
    assert isinstance(buffer, ReceiveBuffer), "only rows of direct dispatches lie in receive buffers"
    if not owner and not buffers.any_lent:
        return _view
    lends = owner == "if needed" and buffers.can_lend(buffer, handle.reused_after)
    if not lends or buffers.is_captured():
        return torch.clone
    buffers.may_be_lent = True
    return buffer.loan.lend


def _each(function: Callable[[torch.Tensor], torch.Tensor], values: Rows) -> Rows:
    """The function of the rows, and of their scales if they have some."""
    return (function(values[0]), function(values[1])) if isinstance(values, tuple) else function(values)


def _view(rows: torch.Tensor) -> torch.Tensor:
    return rows


class Prepares(Protocol):
    """Prepares the dispatches of a communicator."""

    @property
    def plan(self) -> Plan: ...

    @property
    def launcher(self) -> Launcher: ...

    def find_or_prepare(self, kind: DispatchKind, *, user_options: DispatchOptions) -> PreparedDispatch:
        """Dispatches of one kind, as parts of calls with the options that the user asked for."""


class ExactHalves:
    """Dispatches with exact sizes in two halves: rows arrive where there is room for all, one per (token, rank), and
    the host reads their counts when it receives them.

    Args:
        dispatcher: prepares the bounded dispatches that these consist of.
        kind: of all calls.
    """

    waits = True

    def __init__(self, dispatcher: Prepares, kind: DispatchKind) -> None:
        self.dispatcher, self._kind, self.options = dispatcher, kind, kind.options
        plan, options = dispatcher.plan, kind.options
        layout = "token" if options.layout == "expert" else options.layout
        capacity = plan.worst_case_rows("token") if layout == "token" else None
        plain = replace(options, layout=layout, alignment=1, sizes="bounded", capacity=capacity, strategy="dedup")
        self._prepared = dispatcher.find_or_prepare(replace(kind, options=plain), user_options=options)

    @property
    def is_stale(self) -> bool:
        return self._prepared.is_stale

    def send(self, tokens: Tokens, out: DispatchOut | None = None, stream: int | None = None) -> SentExactHalf:
        assert out is None, "results of an exact size have no room of the caller's"
        require_no_host_read(True, "sizes='exact'")
        if not (self._kind.split or self._kind.sent_ahead):  # the host will wait, so it hears of earlier errors first
            self.dispatcher.launcher.settle(0)
        return SentExactHalf(self, self._prepared.send(tokens))


class SentExactHalf:
    """A dispatch of :class:`ExactHalves` whose rows are on their way."""

    def __init__(self, prepared: ExactHalves, sent: Sent[tuple[PeerHandle, torch.Tensor]]) -> None:
        self._prepared, self._sent = prepared, sent

    def receive(self) -> tuple[PeerHandle, torch.Tensor]:
        """Wait for the counts, and cut outputs to them.

        Raises:
            CapacityOverflow: more rows came than the caller has allowed, on this rank or another.
        """
        handle, rows = self._sent.receive()
        dispatcher, options, room = self._prepared.dispatcher, self._prepared.options, len(rows)
        dispatcher.launcher.outcomes.settle_before(handle.number + 1)
        needed = _most_rows(dispatcher.plan, options, handle.all_counts.tolist())
        if options.capacity is not None and needed > options.capacity:
            raise CapacityOverflow(needed, options.capacity, sent=False)
        rows = handle.cut_to_size(handle.all_sizes(), rows)
        if handle.reused_after is not None:
            handle.own()
            rows = rows.clone()
        elif 2 * len(rows) < room and options.layout != "expert":  # which makes rows of its own
            rows = rows.clone()
        if options.layout == "expert":
            return spread_by_expert(options, handle, rows)
        handle.options = options
        return handle, rows


def spread_by_expert(
    options: DispatchOptions, handle: PeerHandle, rows: torch.Tensor
) -> tuple[PeerHandle, torch.Tensor]:
    """Layout "expert" from rows of layout "token", of their exact size: (handle, rows)."""
    counts = handle.counts
    placement = place_by_expert(counts.source_counts, counts.expert_counts, options.alignment, handle.local_ids)

    def spread(rows: torch.Tensor) -> torch.Tensor:
        return routing.scatter_rows(rows, placement.positions, placement.num_places)

    handle.spread(options, placement)
    if handle.scales is not None:
        handle.scales = spread(handle.scales)
    return handle, spread(rows)


def _most_rows(plan: Plan, options: DispatchOptions, all_counts: list[list[int]]) -> int:
    """Rows that the fullest rank has in its output."""
    if options.layout != "expert":
        return max(map(sum, zip(*(each[: plan.num_ranks] for each in all_counts), strict=True)))
    routes = [sum(each) for each in zip(*(each[plan.num_ranks :] for each in all_counts), strict=True)]
    padded = [align_up(each, options.alignment) for each in routes]
    local = plan.experts_per_rank
    return max(sum(padded[rank * local : (rank + 1) * local]) for rank in range(plan.num_ranks))
