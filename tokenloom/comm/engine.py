"""Where calls of one communicator open: faults that are told, streams, and which calls may be open at once.

``Communicator`` checks what users pass and then calls this; layers call it directly, with handles instead of
:class:`tokenloom.Routed`, and write their gradients by hand. Every method that sends is collective.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Calls
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

import torch
from torch.profiler import record_function

from tokenloom.backends.seam import (
    Backend,
    Capabilities,
    CombineKind,
    CombineOptions,
    DispatchKind,
    GathersCounts,
    Handle,
    OutputOwner,
    PreparedCombine,
    PreparedDispatch,
    ResendTo,
    Rows,
    Sent,
    Tokens,
    Upcoming,
    Wait,
)
from tokenloom.comm.balance import Balance, always_splits
from tokenloom.comm.placed_slots import PlacedBatch, PlacedSlots
from tokenloom.comm.placement import Placement, placement_terms, plan_of_slots, require_fits
from tokenloom.errors import BackendUnavailable, CommunicatorBroken, InvalidArgument, PeerTimeout, is_known_to_all
from tokenloom.ops import routing
from tokenloom.plan import Plan
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.rendezvous import agree
from tokenloom.runtime.streams import SideStream, on_device
from tokenloom.runtime.telling import Telling
from tokenloom.runtime.torch_modes import (
    FAKE,
    breaks_graph,
    current_mode,
    current_trace,
    current_transforms,
    require_eager,
)
from tokenloom.runtime.turns import Turn

T = TypeVar("T")

DISPATCH_RANGE = "tokenloom::dispatch"
COMBINE_RANGE = "tokenloom::combine"
"""Profiler ranges, named after the kernel: the gradient of a dispatch is a combine."""


NO_RANGE: AbstractContextManager[Any] = nullcontext()
profiler_listens = torch._C._autograd._profiler_enabled


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """A named range where a profiler listens. Elsewhere nothing, which costs the host less."""
    return record_function(name) if profiler_listens() else NO_RANGE


class Sequence(Telling):
    """A block in which declared calls are made; see :meth:`Engine.sequence`.

    Attributes:
        upcoming: declared calls that are not open yet.
        open: those that are open and not yet received.
        ends_in_transfers: behind the last of them the ranks wait for each other in no call.

    Raises:
        InvalidArgument: as it is entered, and then the others hear of it: another thread is in a call of this
            communicator, or torch transforms what is called.
    """

    def __init__(self, engine: Engine, upcoming: Iterable[Upcoming]) -> None:
        self.upcoming = list(upcoming)
        self.open: list[Sent[Any]] = []
        self.ends_in_transfers = False
        self._engine = engine

    def opened(self) -> None:
        """The next of the declared calls is open."""
        self.upcoming[:1] = []

    def __enter__(self) -> Sequence:
        engine, fault = self._engine, None
        self._turn = turn = engine.ranks.turn
        if not turn.take():
            engine.ranks.require_alive()
            fault = turn.enter(engine.ranks.open_timeout_s)
        self._outer, engine._sequence = engine._sequence, self
        self._device = on_device(engine.ranks.device)
        self._device.__enter__()
        try:
            if fault is not None:
                raise fault
            require_eager()
        except InvalidArgument as error:
            self.__exit__(InvalidArgument, error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if fault is not None:
                if isinstance(fault, Exception) and self.upcoming:
                    self._engine.open_calls.count += 1  # it failed, which is how every rank's call ends
                super().__exit__(kind, fault, trace)
        finally:
            self._engine._sequence = self._outer
            self._device.__exit__(None, None, None)
            self._turn.leave()

    def tell(self, fault: Exception) -> None:
        """Tell the others by the next of the declared calls, behind those that are open."""
        if self.ends_in_transfers and not self.upcoming:
            self._engine.ranks.abort(fault)  # there is no call by which to tell them
            return
        self._engine.report_fault(fault, self)

    def end(self, fault: BaseException) -> None:
        """End the group."""
        self._engine.ranks.abort(fault)


class Engine:
    """Opens the calls of one communicator, tells other ranks of faults, and counts open calls.

    Args:
        plan: sizes, whose experts are those that callers name.
        placement: where experts lie; None: expert e on rank ``e // experts_per_rank``.
        balance: when batches are split; None: never.

    Attributes:
        plan: sizes, whose experts are physical slots: what backends know. Without a placement they are the same.
        caller_plan: the same sizes, whose experts are those that callers name.
        slots: what is placed where, or None without a placement.
        balance: when batches are split, or None.
        restored: rank that holds each expert which was lost with masked ranks and loaded again.
        ranks: the group, for small collectives beside the calls. Not to be used between the halves of a call.
        capabilities: what the backend can do.
        side_stream: the communicator's own stream, for transfers beside computation.
        open_calls: those that users have sent and not yet received.
    """

    def __init__(
        self,
        plan: Plan,
        ranks: RankGroup,
        backend: Backend,
        placement: Placement | None = None,
        balance: Balance | None = None,
    ) -> None:
        self.plan, self.caller_plan = plan_of_slots(plan, placement), plan
        self.ranks = ranks
        self.side_stream = SideStream(ranks.device)
        self.open_calls = OpenCalls(ranks.turn)
        self._backend = backend
        self._sequence: Sequence | None = None
        self._device_index = ranks.device.index
        self.balance = balance
        self.slots: PlacedSlots | None = None
        self.restored: dict[int, int] = {}
        if placement is not None:
            self.slots = PlacedSlots(placement, ranks.rank, ranks.device, self.masked)

    @property
    def capabilities(self) -> Capabilities:
        return self._backend.capabilities

    def prepare_dispatch(self, kind: DispatchKind) -> PreparedDispatch:
        """Prepare dispatches; see :meth:`tokenloom.backends.seam.Backend.prepare_dispatch`."""
        return self._backend.prepare_dispatch(kind if self.slots is None else replace(kind, ids_dtype=torch.int32))

    def prepare_combine(self, kind: CombineKind, number: int) -> PreparedCombine:
        """Prepare combines; see :meth:`tokenloom.backends.seam.Backend.prepare_combine`."""
        return self._backend.prepare_combine(kind, number)

    def with_counts(self, calls: Calls[Upcoming]) -> list[Upcoming]:
        """The same calls, the first of which is a dispatch: behind one that exchanges counts, where batches are
        balanced."""
        if self.balance is None:
            return list(calls)
        return [replace(calls[0], name="counts of experts", awaited=False, split=False), *calls]

    def place_batch(self, kind: DispatchKind, topk_ids: torch.Tensor, stream: int | None = None) -> PlacedBatch:
        """Find the slots of a batch's routes, by which it is dispatched. Collective where batches are balanced.

        It is the beginning of the dispatch, which follows at once: a fault of another rank's dispatch is raised here.

        Args:
            kind: of the dispatch.
            topk_ids: int32 or int64 [T, K], experts.
            stream: what :meth:`ready_stream` has just given, or None.
        """
        if self.balance is None:
            return self.slots_of_now().place_routes(topk_ids, stream)

        def gather(counts: torch.Tensor) -> tuple[torch.Tensor, frozenset[int]]:
            return cast(GathersCounts, self._backend).gather_counts(kind, counts)

        return self.split_batch(topk_ids, gather, always_splits(kind.options), stream)

    def split_batch(
        self,
        topk_ids: torch.Tensor,
        gather: Callable[[torch.Tensor], tuple[torch.Tensor, frozenset[int]]],
        always: bool,
        stream: int | None,
    ) -> PlacedBatch:
        """Find the slots of a balanced batch's routes. Collective.

        Args:
            gather: opens the call that exchanges counts, see :class:`tokenloom.backends.seam.GathersCounts`.
            always: split it whether it pays or not.
            others: as in :meth:`place_batch`.
        """
        assert self.balance is not None
        assert self.slots is not None
        table, absent = gather(routing.count_experts(topk_ids, self.caller_plan.num_experts))
        self.open_calls.count += 1
        if self._sequence is not None:
            self._sequence.opened()
        self.slots.follow(absent)
        batch = self.slots.split_routes(topk_ids, table, self.balance.rows_per_pull, always, stream)
        assert batch.split is not None
        self.balance.add(batch.split.summary)
        return batch

    # -- errors ---------------------------------------------------------------------------------------------

    def needs_no_sequence(self) -> bool:
        """Whether a call that is made now needs nothing around it: its device is the current one, no profiler listens,
        torch transforms nothing, and no other calls have been declared."""
        index = self._device_index
        return (
            self._sequence is None
            and not profiler_listens()
            and (index is None or torch._C._cuda_getDevice() == index)
            and current_transforms() is None
            and current_trace() is None
            and current_mode(FAKE) is None
        )

    def ready_stream(self, waits: bool = False) -> int | None:
        """Raise errors that earlier calls left, as far as they are known; see
        :meth:`tokenloom.backends.seam.Backend.ready_stream`."""
        self.ranks.require_alive()
        return self._backend.ready_stream(waits)

    def raise_known_errors(self) -> None:
        """Raise errors that earlier calls left, as far as they are known without waiting."""
        self.ranks.require_alive()
        with on_device(self.ranks.device):
            self._backend.check("nothing")

    def check(self, wait: Wait) -> None:
        """Wait, then raise what earlier calls left behind.

        Raises:
            CapacityOverflow: a bounded dispatch dropped rows (raised once).
            PeerError, PlanMismatch, PeerTimeout: an earlier call failed.
            CommunicatorBroken: closed, or an earlier call timed out.
        """
        self.ranks.require_alive()
        with on_device(self.ranks.device):
            try:
                self._backend.check(wait)
            finally:
                self._follow_masks()

    def sequence(self, *upcoming: Upcoming) -> Sequence:
        """Declare the calls that all ranks are about to open, in their order, and make them inside.

        What fails here on this rank alone is told to the others at once: it joins, with a status, the calls that they
        open before they learn of it. They raise PeerError; this rank raises its own error.
        """
        return Sequence(self, upcoming)

    def report_fault(self, fault: Exception, sequence: Sequence) -> None:
        """Tell the others of a fault within a sequence; see :meth:`tokenloom.backends.seam.Backend.report_fault`."""
        for pending in list(sequence.open):  # counts that a kernel leaves for the host have to be taken
            try:
                pending.receive()
            except Exception as other:
                if is_known_to_all(other):
                    return  # somebody else failed too, and nobody goes on
        captured = self.ranks.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if sequence.upcoming and not captured:  # in a capture nothing runs, on no rank
            self.side_stream.join()  # calls on it come first
            with suppress(PeerTimeout, CommunicatorBroken):  # later calls say so, this one has its own error
                self._backend.report_fault(fault, sequence.upcoming)

    def require_room(self) -> None:
        """A call may open. Backward gets here without :meth:`begin`, maybe after the communicator was closed."""
        self.ranks.require_alive()
        self.open_calls.require_room()

    def opened(self, sent: Sent[T]) -> Sent[T]:
        """Count an opened call, and let its sequence track it until it is received."""
        self.open_calls.count += 1
        if self._sequence is None:
            return sent
        self._sequence.opened()
        return _Tracked(sent, self._sequence)

    # -- dispatch and combine -------------------------------------------------------------------------------

    def send_dispatch(self, prepared: PreparedDispatch, tokens: Tokens) -> Sent[tuple[Handle, torch.Tensor]]:
        """Open a dispatch and send. ``receive`` gives (handle, rows [places, H]), without a graph."""
        self.require_room()
        with profiler_range(DISPATCH_RANGE):
            return self.opened(prepared.send(tokens))

    def send_combine(
        self,
        handle: Handle,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        options: CombineOptions,
        out: torch.Tensor | None = None,
        alone: bool = False,
    ) -> Sent[torch.Tensor]:
        """Open a combine and send rows [places, H] home. ``receive`` gives [T, H], without a graph.

        Args:
            weights: received weights that multiply the rows, if ``options`` say so. None: those of the handle.
            out: [T, H] to write to, or None.
            alone: nothing is computed meanwhile, so the transfer may take more of the GPU.
        """
        self.require_room()
        with profiler_range(COMBINE_RANGE):
            kind = CombineKind(handle.options.layout, rows.dtype, options, alone)
            return self.opened(self._backend.prepare_combine(kind, handle.number).send(handle, rows, weights, out))

    def resend(
        self,
        handle: Handle,
        values: Rows,
        to: ResendTo = "places",
        strategy: str = "dedup",
        owner: OutputOwner = False,
        stream: int | None = None,
    ) -> Sent[Any]:
        """Send other values of the same tokens by the routes of a dispatch; see
        :meth:`tokenloom.backends.seam.Backend.resend`."""
        self.require_room()
        with profiler_range(DISPATCH_RANGE):
            return self.opened(self._backend.resend(handle, values, to, strategy, owner, stream))

    def send_weight_gradients(self, handle: Handle, grad: torch.Tensor) -> Sent[torch.Tensor]:
        """Send the gradient of the received weights home. ``receive`` gives [T, K]."""
        self.require_room()
        with profiler_range(COMBINE_RANGE):
            return self.opened(self._backend.send_weight_gradients(handle, grad))

    def combine_gradient(
        self,
        handle: Handle,
        grad: torch.Tensor,
        rows: torch.Tensor | None,
        weights: torch.Tensor | None,
        dtype: torch.dtype,
        strategy: str,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The gradient of a combine from that of its result, [T, H].

        Args:
            rows: [places, H] that were combined, if the weights want a gradient.
            weights: that multiplied them, or None.
            dtype: of the rows.
            strategy: what carries it, a dispatch's.

        Returns:
            Gradient of the rows, [places, H], and of the received weights [R, K] if ``rows`` is given.
        """
        fills_places = handle.options.sizes == "exact" and handle.options.layout != "rank"  # others must become zero
        if rows is None and weights is None and fills_places:
            return self.resend(handle, grad, "places", strategy).receive().to(dtype, copy=True), None
        received = self.resend(handle, grad, "rows", strategy).receive()
        positions = handle.positions()
        if weights is not None:  # exact sizes have as many received weights as rows
            positions = positions[: len(weights)]
        return routing.spread_gradient(received, positions, handle.num_places, weights, rows, dtype)

    def fused_layer(self, num_shared_experts: int, recipe: str) -> Any:
        """The calls of a fused layer, which has this communicator for itself from now on.

        Raises:
            BackendUnavailable: the backend has none.
        """
        if not self.capabilities.fused_layer:
            raise BackendUnavailable(f"backend {self.backend_name} has no fused layer; use backend='nvlink'")
        return self._backend.fused_layer(num_shared_experts, recipe)  # type: ignore[attr-defined]

    # -- the communicator's own -----------------------------------------------------------------------------

    @property
    def backend_name(self) -> str:
        """For people."""
        return self._backend.name

    @property
    def masked(self) -> frozenset[int]:
        """Ranks that take no part."""
        return self._backend.members.masked

    def mask(self, ranks: Collection[int]) -> None:
        """Leave out these ranks too, see :meth:`tokenloom.backends.seam.Members.mask`."""
        self.ranks.require_alive()
        with self.ranks.turn:
            self._backend.members.mask(ranks)
            self._follow_masks()

    def unmask(self, ranks: Collection[int]) -> None:
        """Take back ranks, see :meth:`tokenloom.backends.seam.Members.unmask`."""
        self.ranks.require_alive()
        with self.ranks.turn:
            self._backend.members.unmask(ranks)
            self._follow_masks()

    def agree_on_masked(self, phase: str) -> frozenset[int]:
        """Hear which ranks are masked until all name the same: of one that was late some learn before others.

        Args:
            phase: what is going on, for errors.
        """
        while True:
            first, *others = agree(self.ranks, lambda: ({}, self.masked), phase)
            if all(each == first for each in others):
                return first

    # -- placement ------------------------------------------------------------------------------------------

    def set_placement(self, placement: Placement) -> None:
        """Let another placement rule from the next dispatch on; see ``Communicator.set_placement``."""
        self.ranks.require_alive()
        with self.ranks.turn:
            agree(self.ranks, lambda: (self.terms_of_next(placement), None), "set_placement")
            self.place(placement)

    def place(self, placement: Placement) -> None:
        """Let it rule from the next dispatch on: all ranks have agreed on it."""
        assert self.slots is not None
        with on_device(self.ranks.device):
            self.slots.place(placement)
        self.ranks.terms |= placement_terms(placement)

    def terms_of_next(self, placement: Placement) -> dict[str, Any]:
        """Check a placement that is to rule, and name what all ranks must have alike in it."""
        self.require_between_calls()
        require_fits(placement, self.caller_plan, self.plan.experts_per_rank)
        return placement_terms(placement)

    def require_between_calls(self) -> None:
        """Raise InvalidArgument unless experts are placed here, and may be placed anew now."""
        require_eager()
        if self.slots is None:
            raise InvalidArgument(
                "this communicator was made without a placement; pass spare_slots=, or placement=tl.Placement.default("
                "num_experts, num_ranks, slots_per_rank), where it is made"
            )
        if self.open_calls.any_open():
            raise InvalidArgument("a pending call is open, whose rows lie by the placement of now; receive it first")
        if self.ranks.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InvalidArgument("a placement cannot change in a capture; change it between replays")

    def slots_of_now(self) -> PlacedSlots:
        """What is placed where, without the ranks that are masked by now."""
        self._follow_masks()
        assert self.slots is not None
        return self.slots

    def _follow_masks(self) -> None:
        """Take the slots of masked ranks out of the table. Whatever masks ranks, calls and checks come here behind."""
        if self.slots is not None:
            self.slots.follow(self.masked)

    def require_no_placement(self, what: str) -> None:
        """Raise InvalidArgument where experts are placed: ``what`` has its weights by expert."""
        if self.slots is not None:
            raise InvalidArgument(
                f"{what} keeps expert e on rank e // experts_per_rank; give it a communicator without placement="
            )

    def memory(self) -> list[str]:
        """Lines for people about buffers that outlive a call."""
        return self._backend.memory()

    def close(self) -> None:
        """Release the backend; later calls raise CommunicatorBroken. In a forked process nothing is the caller's."""
        if self.ranks.is_of_parent:
            return
        self.open_calls.clear()
        with on_device(self.ranks.device):
            self._backend.close()
        self.ranks.close()


class _Tracked(Generic[T]):
    """A pending call that its sequence knows of."""

    def __init__(self, pending: Sent[T], sequence: Sequence) -> None:
        self._pending, self._calls = pending, sequence
        sequence.open.append(self)

    def receive(self) -> T:
        self._calls.open.remove(self)
        return self._pending.receive()


# -- calls in two halves, as users hold them ----------------------------------------------------------------------


class Pending(Generic[T]):
    """A call whose first half has run: what ``send_dispatch`` or ``send_combine`` returned.

    The tensors that were sent may be overwritten by later work on the same stream; a combine whose weights want a
    gradient needs y unchanged until backward, as ever. On backends "nvlink", "gin" and "padded" nothing of tokenloom
    runs on the GPU until ``receive``; on "padded" NCCL may carry rows meanwhile.

    Halves are calls: all ranks make the same calls in the same order. A call may open in one piece or in halves, in
    backward or in a layer. When it does, every call but the one before it must have been received. So two
    micro-batches can take turns, and the two that are open may be received in either order, the same on all ranks. A
    call that raised an error counts as well, and so does each call of a CUDA graph that is replayed: between the
    halves of a call outside of graphs, replay none that calls this communicator. A pending must not be dropped
    unreceived.
    """

    def __init__(self, finish: Callable[[], T], calls: OpenCalls, name: str, discard: Callable[[], object]) -> None:
        """Made by the communicator.

        Args:
            finish: runs the second half.
            calls: of the communicator.
            name: "dispatch" or "combine", for errors.
            discard: runs what other ranks need of the second half, if nobody wants its result any more.
        """
        self._finish: Callable[[], T] | None = finish
        self._calls = calls
        self._number = calls.keep(self, name, discard)

    @breaks_graph
    def receive(self) -> T:
        """Run the second half: wait for what the host has to know, and give what the call in one piece returns.

        It runs on the current stream, which should be that of the first half. With gradients enabled when the call
        was sent, the result has a graph, whatever is enabled now.

        Raises:
            InvalidArgument: it was received before. Or another thread is in a call of the communicator, or torch
                transforms what is called: then it is still to be received.
            TokenloomError: what the call in one piece raises.
        """
        finish = self._finish
        if finish is None:
            raise InvalidArgument("this call was received before; receive() gives the result of a pending call once")
        require_eager()
        with self._calls.turn:
            self._finish = None
            self._calls.received(self._number)
            return finish()


@dataclass(frozen=True)
class SentHalf:
    """A call that was sent and not yet received.

    Attributes:
        number: of the call.
        name: for errors.
        owner: what its user holds.
        discard: runs its second half without a result.
    """

    number: int
    name: str
    owner: weakref.ref[Pending[Any]]
    discard: Callable[[], object]


class OpenCalls:
    """The calls of one communicator that users have sent and not yet received.

    Attributes:
        turn: which thread may make calls.
        halves: those that are sent and not yet received, or were dropped.
        count: how many were opened so far, or failed while all ranks made them.
    """

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.count = 0
        self.halves: list[SentHalf] = []

    def any_open(self) -> bool:
        """Whether there is one, or one was dropped."""
        return bool(self.halves)

    def keep(self, pending: Pending[Any], name: str, discard: Callable[[], object]) -> int:
        """Remember a pending of the call that was opened last; its number."""
        self.halves.append(SentHalf(self.count, name, weakref.ref(pending), discard))
        return self.count

    def received(self, number: int) -> None:
        """Forget a call, which its user receives now."""
        self.halves = [half for half in self.halves if half.number != number]

    def require_room(self) -> None:
        """Raise unless another call may be opened. Calls that were dropped are received first.

        Raises:
            InvalidArgument: a pending was dropped unreceived, or one older than the last call is still open.
        """
        if not self.halves:
            return
        dropped = [half for half in self.halves if half.owner() is None]
        for half in dropped:
            self.received(half.number)
            with suppress(Exception):  # what is raised next matters more, and a broken communicator says so itself
                half.discard()
        if dropped:
            names = " and a ".join(half.name for half in dropped)
            raise InvalidArgument(
                f"the pending of an earlier {names} was dropped unreceived; keep what send_dispatch and send_combine "
                "return, and call receive() on it"
            )
        late = [half for half in self.halves if half.number != self.count]
        if late:
            raise InvalidArgument(
                f"a third pending call: a {late[0].name} sent {self.count - late[0].number + 1} calls ago is still "
                "open; receive it before this call, since only the call just before may be open"
            )

    def clear(self) -> None:
        """Forget all calls: the communicator closes."""
        self.halves = []
