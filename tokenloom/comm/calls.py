"""The calls of a communicator: one road for all of them.

A call is looked up by its kind: its options, the dtypes of its tensors, which tensors there are, and whether gradients
are wanted. A glance that was built for the kind says whether the tensors are right. Then the call is sent by what was
prepared for the kind, and received. The first call of a kind, and any call that fails the glance, is checked whole
before it is sent. Faults, streams, profiles and halves are around that road (engine.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, ClassVar, NamedTuple

import torch
from torch.nn import functional

from tokenloom.backends.seam import (
    STRATEGY_OF_MODE,
    CombineKind,
    CombineOptions,
    DispatchKind,
    DispatchOptions,
    DispatchOut,
    PreparedCombine,
    PreparedDispatch,
    Sent,
    Tokens,
    Upcoming,
    default_mode,
)
from tokenloom.comm import autograd, checks
from tokenloom.comm.checks import CombineArguments, CombineValues, DispatchArguments, DispatchValues
from tokenloom.comm.engine import COMBINE_RANGE, DISPATCH_RANGE, Engine, Pending, profiler_range
from tokenloom.comm.placed_slots import PlacedBatch
from tokenloom.comm.routed import Routed, alike_in
from tokenloom.errors import DtypeMismatch, InvalidArgument, NotDifferentiable, raised_by_all
from tokenloom.ops import routing
from tokenloom.plan import ROUTE_LAYOUTS, align_up
from tokenloom.runtime.torch_modes import PLAIN, as_in_first_half, require_no_tangent, settled

MAX_KINDS = 64
"""Kinds of calls that are remembered. A program has a few, unless it passes another capacity each time."""
WIDTH_UNIT = 4
"""Float32 values of which narrow rows have a multiple: every backend moves 16 bytes."""
is_grad_enabled = torch.is_grad_enabled
new_tuple: Any = tuple.__new__  # makes a named tuple in a third of the time


class KnownDispatch(NamedTuple):
    """Dispatches of a kind that was checked and prepared.

    Attributes:
        kind: of all of them.
        prepared: sends them.
        fits: the glance, see :func:`tokenloom.comm.checks.dispatch_glance`.
        alike: what their results have alike, see :func:`tokenloom.comm.routed.alike_in`.
    """

    kind: DispatchKind
    prepared: PreparedDispatch
    fits: Callable[[Any, Any, Any, Any, Any], bool]
    alike: dict[str, Any]


class KnownCombine(NamedTuple):
    """Combines of a kind that was checked and prepared; attributes as in :class:`KnownDispatch`."""

    kind: CombineKind
    prepared: PreparedCombine
    fits: Callable[[Any, Any, tuple[int, ...], int, Any], bool]


class Kinds:
    """The kinds of calls that one communicator has checked and prepared.

    Args:
        engine: of the communicator.

    Attributes:
        combines: known combines, by what :meth:`CombineCall.find` looks up.
        default_mode: order of the sums of a combine that names none; None: see :meth:`mode_of`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.combines: dict[object, KnownCombine] = {}
        self._sums_of_ranks = default_mode(engine.capabilities)
        self.default_mode = self._sums_of_ranks if engine.balance is None else None
        self._dispatches: dict[object, KnownDispatch] = {}

    def mode_of(self, routed: object) -> str:
        """The order of the sums of a combine that names none, where batches are split: one that does not show it."""
        return "per_route" if getattr(routed, "layout", None) in ROUTE_LAYOUTS else self._sums_of_ranks

    def find_dispatch(
        self,
        arguments: DispatchValues,
        mode: tuple[Any, ...],
        tokens: Tokens,
        out: Any = None,
    ) -> KnownDispatch | None:
        """Look a dispatch up, and glance at its tensors. None: it has to be checked.

        Args:
            arguments: options as the caller passed them.
            mode: fields of a :class:`DispatchKind` from ``x_needs_grad`` on.
            tokens: plain tensors. out: as the caller passed it.
        """
        _, alignment, _, capacity, to_fp8, powers, _, _, _ = arguments
        x, scales, topk_ids, weights = tokens
        # Other classes equal these, but mean something else: True is no number of rows, and 1 is not True.
        if not (alignment.__class__ is int and (capacity is None or capacity.__class__ is int)):
            return None
        if not (to_fp8.__class__ is powers.__class__ is bool):
            return None
        weights_dtype = None if weights is None else weights.dtype
        try:
            known = self._dispatches.get((arguments, mode, x.dtype, topk_ids.dtype, weights_dtype, scales is None))
        except TypeError:  # a list, say, cannot be looked up
            return None
        if known is None or known.prepared.is_stale:
            return None
        try:
            return known if known.fits(x, scales, topk_ids, weights, out) else None
        except (ValueError, RuntimeError):  # of one dimension, or a nested or sparse tensor
            return None

    def check_dispatch(
        self,
        arguments: DispatchValues,
        mode: tuple[Any, ...],
        x: Any,
        topk_ids: Any,
        weights: Any,
        out: Any = None,
    ) -> tuple[KnownDispatch, Tokens]:
        """Check a dispatch whole, and prepare its kind. Collective where that makes memory.

        Args:
            arguments, mode, out: as in :meth:`find_dispatch`.
            x, topk_ids, weights: as the caller passed them, x with its scales.

        Raises:
            TokenloomError: what ``Communicator.dispatch`` says of bad input.
        """
        engine = self.engine
        plan, able, device = engine.plan, engine.capabilities, engine.ranks.device
        options = checks.dispatch_options(plan, able, DispatchArguments(*arguments), engine.balance is not None)
        tokens, words = checks.dispatch_tokens(engine.caller_plan, able, device, options, x, topk_ids, weights)
        x, scales, topk_ids, weights = tokens
        weights_dtype = None if weights is None else weights.dtype
        kind = DispatchKind(options, x.dtype, topk_ids.dtype, weights_dtype, scales is not None, words, *mode)
        if out is not None:
            checks.dispatch_out(plan, kind, out, device)
        engine.require_room()  # before memory is made
        glance = checks.dispatch_glance(plan, able, device, kind, engine.caller_plan.num_experts)
        shape = tuple(checks.dispatch_results(plan, kind)["tokens"].shape) if options.sizes == "bounded" else None
        known = KnownDispatch(kind, engine.prepare_dispatch(kind), glance, alike_in(plan, kind, shape))
        if checks.can_glance(kind, able):
            if len(self._dispatches) >= MAX_KINDS:
                self._dispatches.clear()
            self._dispatches[arguments, mode, x.dtype, topk_ids.dtype, weights_dtype, scales is None] = known
        return known, tokens

    def find_or_check_dispatch(
        self, arguments: DispatchValues, mode: tuple[Any, ...], x: Any, topk_ids: Any, weights: Any
    ) -> tuple[KnownDispatch, Tokens]:
        """Find a prepared dispatch for a layer, or check and prepare one. Sends nothing."""
        are_plain = x.__class__ in PLAIN and topk_ids.__class__ in PLAIN and weights.__class__ in PLAIN
        tokens = Tokens(x, None, topk_ids, weights)
        known = self.find_dispatch(arguments, mode, tokens) if are_plain else None
        if known is not None:
            return known, tokens
        return self.check_dispatch(arguments, mode, x, topk_ids, weights)


class UserCall(ABC):
    """One call of a communicator, made once.

    Args:
        owner: the communicator.
        kinds: that it knows.

    Attributes:
        name: for errors: "dispatch", "combine", ...
        range_name: of the profiler.
        waits: whether the host waits for counts; :meth:`find` sets it.
        split: it is made in halves.
    """

    name: str
    range_name: ClassVar[str]
    waits = False
    split = False
    _sent: Sent[Any]

    def __init__(self, owner: object, kinds: Kinds) -> None:
        self.owner, self.kinds, self.engine = owner, kinds, kinds.engine

    def run(self) -> Any:
        """Make the whole call: its result."""
        engine = self.engine
        turn = engine.ranks.turn
        if not (engine.needs_no_sequence() and turn.take()):
            return self._run_in_sequence()
        try:
            is_known = self.find()
            stream = engine.ready_stream(self.waits)
            opened = engine.open_calls.count
            try:
                if not is_known:
                    self.check()
                    stream = None
                self.send(stream)
                return self.receive()
            except BaseException:
                # An open call needs no announcement: the other ranks see its fault.
                upcoming = self.calls()[engine.open_calls.count - opened :]
                with engine.sequence(*upcoming):
                    raise
        finally:
            turn.leave()

    def _run_in_sequence(self) -> Any:
        """The same where something is around the call: a profiler, another device, declared calls, another thread."""
        engine = self.engine
        engine.raise_known_errors()
        with profiler_range(self.range_name), engine.sequence(*self.calls()):
            if not self.find():
                self.check()
            self.send(None)
            return self.receive()

    def calls(self) -> list[Upcoming]:
        """The calls that the ranks open for it: itself, and what comes before."""
        return [self.upcoming()]

    @abstractmethod
    def upcoming(self) -> Upcoming:
        """The call as the ranks open it.

        Its options are those that can be told, as arguments may be wrong here: the others may make a buffer.
        """

    @abstractmethod
    def find(self) -> bool:
        """Look the call up by its kind, and glance at its tensors: whether it can be sent."""

    @abstractmethod
    def check(self) -> None:
        """Check the call whole, and prepare its kind.

        Raises:
            TokenloomError: bad input.
        """

    @abstractmethod
    def send(self, stream: int | None) -> None:
        """Open the call, and send its rows.

        Args:
            stream: what the engine's ``ready_stream`` has just given, or None.
        """

    @abstractmethod
    def receive(self) -> Any:
        """Receive the rows: the result as users see it."""


class CallInHalves(UserCall):
    """A call that users may also make in halves."""

    def start(self) -> Pending[Any]:
        """Make the first half."""
        engine = self.engine
        self.split = True
        engine.raise_known_errors()
        self._modes = torch.is_inference_mode_enabled(), is_grad_enabled()
        with profiler_range(self.range_name), engine.sequence(*self.calls()):
            if not self.find():
                self.check()
            self.send(None)
            sent = self._sent
        self.forget()  # the pending may live for long

        def discard() -> None:
            with as_in_first_half(*self._modes), engine.sequence():
                sent.receive()

        return Pending(self._second_half, engine.open_calls, self.name, discard)

    def _second_half(self) -> Any:
        self.engine.ranks.require_alive()
        with as_in_first_half(*self._modes), profiler_range(self.range_name), self.engine.sequence():
            return self.receive()

    @abstractmethod
    def forget(self) -> None:
        """Let go of arguments that the second half does not need."""


class DispatchCall(CallInHalves):
    """One dispatch, as ``Communicator.dispatch`` explains it.

    Args:
        arguments: options as the caller passed them. others: tensors and options, the same.
    """

    name, range_name = "dispatch", DISPATCH_RANGE
    _known: KnownDispatch
    _tokens: Tokens | None
    _in_graph: tuple[torch.Tensor, torch.Tensor | None] | None = None
    _batch: PlacedBatch | None = None

    def __init__(
        self,
        owner: object,
        kinds: Kinds,
        arguments: DispatchValues,
        x: Any,
        topk_ids: Any,
        topk_weights: Any,
        copy: Any,
        out: DispatchOut | None,
    ) -> None:
        # UserCall's own lines, without one more Python call in each dispatch.
        self.owner, self.kinds, self.engine = owner, kinds, kinds.engine
        self._arguments, self._copy, self._out = arguments, copy, out
        self._x, self._topk_ids, self._topk_weights = x, topk_ids, topk_weights

    def upcoming(self) -> Upcoming:
        layout, _, sizes = self._arguments[:3]
        waits = not self.split and sizes != "bounded" and layout != "slots"
        engine, x = self.engine, self._x
        dtype = getattr(x[0] if isinstance(x, (tuple, list)) and x else x, "dtype", None)
        options = None
        with suppress(Exception):
            options = checks.dispatch_options(
                engine.plan, engine.capabilities, DispatchArguments(*self._arguments), engine.balance is not None
            )
        if options is None or dtype not in (*engine.capabilities.dtypes, torch.float8_e4m3fn):
            return Upcoming(self.name, awaited=waits, split=self.split)
        return Upcoming(self.name, options, 1 if options.to_fp8 else dtype.itemsize, waits, self.split)

    def calls(self) -> list[Upcoming]:
        return self.engine.with_counts([self.upcoming()])

    def find(self) -> bool:
        x, ids, weights = self._x, self._topk_ids, self._topk_weights
        scales = None
        if x.__class__ is tuple and len(x) == 2:
            x, scales = x
        if not (
            x.__class__ in PLAIN
            and ids.__class__ in PLAIN
            and (weights is None or weights.__class__ in PLAIN)
            and (scales is None or scales.__class__ in PLAIN)
        ):
            return False
        try:
            owner = checks.OWNER_OF_COPY[self._copy]
        except (KeyError, TypeError):  # no value of ``copy``
            return False
        mode: tuple[Any, ...] = (False, False, owner, self.split, False)
        if is_grad_enabled():
            mode = (x.requires_grad, weights is not None and weights.requires_grad, True, self.split, False)
        self._tokens = tokens = new_tuple(Tokens, (x, scales, ids, weights))
        known = self.kinds.find_dispatch(self._arguments, mode, tokens, self._out)
        if known is None:
            return False
        self._known, self.waits = known, known.prepared.waits
        return True

    def check(self) -> None:
        x, weights = self._x, settled(self._topk_weights)
        tokens = settled(x[0] if isinstance(x, (tuple, list)) and x else x)
        mode: tuple[Any, ...] = (False, False, checks.output_owner(self._copy), self.split, False)
        if is_grad_enabled():
            needs = (isinstance(each, torch.Tensor) and each.requires_grad for each in (tokens, weights))
            mode = (*needs, True, self.split, False)
        given = (x if isinstance(x, (tuple, list)) else tokens, self._topk_ids, weights)
        self._known, self._tokens = self.kinds.check_dispatch(self._arguments, mode, *given, self._out)

    def send(self, stream: int | None) -> None:
        engine, tokens, known = self.engine, self._tokens, self._known
        assert tokens is not None
        if engine.open_calls.halves:
            engine.require_room()
        kind = known.kind
        if kind.x_needs_grad or kind.weights_need_grad:
            x, weights = tokens.x, tokens.topk_weights
            if self.split:  # by the second half they may have got other values
                x, weights = autograd.ticket(x), None if weights is None else autograd.ticket(weights)
            self._in_graph = x, weights
        self._stream = stream
        if engine.slots is not None:
            batch = engine.place_batch(kind, tokens.topk_ids, stream)
            tokens, self._batch = tokens._replace(topk_ids=batch.slot_ids), batch
        self._sent = engine.opened(known.prepared.send(tokens, self._out, stream))

    def receive(self) -> Routed:
        handle, rows = self._sent.receive()
        weights, order = None, None
        if self._in_graph is not None:
            with nullcontext() if is_grad_enabled() else torch.enable_grad():  # as it was in the first half
                order = autograd.GradientOrder()
                rows, weights = autograd.dispatched(self.engine, handle, rows, order, *self._in_graph)
        routed = Routed(self._known.alike, self.owner, handle, rows, weights, self._out)
        if order is not None:
            routed.__dict__["_gradient_order"] = order
        if self._batch is not None:
            routed.keep_batch(self._batch)
        if self._stream is None and rows.is_cuda and torch.cuda.is_current_stream_capturing():
            _ = routed.topk_ids  # int64 ids converted later would be outside of the graph and never change
        return routed

    def forget(self) -> None:
        self._x = self._topk_ids = self._topk_weights = self._tokens = None


class CombineCall(CallInHalves):
    """One combine, as ``Communicator.combine`` explains it.

    Args:
        arguments: options as the caller passed them. others: tensors, the same.
        weights: float32 [T, K] of this rank's tokens, for backends that take them, or None.
        bias: tensors to add to the result, or None.
    """

    name, range_name = "combine", COMBINE_RANGE
    _known: KnownCombine

    def __init__(
        self,
        owner: object,
        kinds: Kinds,
        arguments: CombineValues,
        y: Any,
        routed: Any,
        out: torch.Tensor | None,
        weights: torch.Tensor | None,
        bias: tuple[Any, ...] | None = None,
    ) -> None:
        # UserCall's own lines, without one more Python call in each combine.
        self.owner, self.kinds, self.engine = owner, kinds, kinds.engine
        self._arguments, self._y, self._routed = arguments, y, routed
        self._out, self._weights, self._bias = out, weights, bias

    def upcoming(self) -> Upcoming:
        weighted, mode, wire_dtype, _ = self._arguments
        wire = getattr(self._y, "dtype", None) if wire_dtype is None else wire_dtype
        strategy = STRATEGY_OF_MODE.get(mode) if isinstance(mode, str) else None
        if strategy is None or not isinstance(wire, torch.dtype) or wire not in self.engine.capabilities.dtypes:
            return Upcoming(self.name, split=self.split)
        options = CombineOptions(bool(weighted), wire, wire, False, strategy, self._weights is not None)
        return Upcoming(self.name, options, wire.itemsize, split=self.split)

    def find(self) -> bool:
        y, routed, weights = self._y, self._routed, self._weights
        if not (routed.__class__ is Routed and routed._owner is self.owner and y.__class__ in PLAIN):
            return False
        if self._bias is not None:
            return False
        try:
            known = self.kinds.combines.get(self._key(y.dtype))
        except TypeError:  # a list, say, cannot be looked up
            return False
        if known is None or known.prepared.is_stale:
            return False
        self._known = known
        try:
            return known.fits(y, weights, routed._shape, routed._handle.num_tokens, self._out)
        except RuntimeError:  # a nested or sparse tensor
            return False

    def _key(self, y_dtype: torch.dtype) -> object:
        """The key of combines of one kind."""
        arguments, routed, grads = self._arguments, self._routed, (False, False)
        if is_grad_enabled():
            graph_weights = routed._graph_weights
            grads = self._y.requires_grad, graph_weights is not None and graph_weights.requires_grad
        types = arguments[0].__class__  # 1 is not True
        return routed.layout, routed._weighted, y_dtype, arguments, types, grads, self._weights is None, self.split

    def check(self) -> None:
        engine = self.engine
        plan, able, device = engine.plan, engine.capabilities, engine.ranks.device
        self._y = y = settled(self._y)
        routed, weights, arguments = self._routed, self._weights, self._arguments
        checks.require_routed(routed, self.owner)
        if self._bias is not None:
            arguments = self._check_bias(self._bias)
        require_no_tangent(y=y, topk_weights=weights)
        graph_weights = routed._graph_weights
        weights_need_grad = graph_weights is not None and graph_weights.requires_grad
        given = (y, routed._shape, routed.layout, routed._weighted, weights_need_grad, weights is not None)
        options = checks.combine_options(able, device, CombineArguments(*arguments), *given)
        handle = routed._handle
        if weights is not None:
            checks.weights_at_home(plan, weights, handle.num_tokens, device)
            if options.needs_grad or (is_grad_enabled() and weights.requires_grad):
                raise NotDifferentiable("topk_weights of a combine have no gradient; pass them to dispatch")
        if self._out is not None and self._bias is None:
            checks.combine_out(self._out, options, routed, y)
        engine.require_room()  # before memory is made
        kind = CombineKind(routed.layout, y.dtype, options, split=self.split)
        prepared = engine.prepare_combine(kind, handle.number)
        self._known = known = KnownCombine(kind, prepared, checks.combine_glance(plan, device, options))
        if self._bias is None:
            combines = self.kinds.combines
            if len(combines) >= MAX_KINDS:
                combines.clear()
            combines[self._key(y.dtype)] = known

    def _check_bias(self, bias: tuple[Any, ...]) -> CombineValues:
        """Check what is added to the result, and give the arguments of a sum that is not rounded before."""
        engine, y, out = self.engine, self._y, self._out
        device, shape = engine.ranks.device, (self._routed._handle.num_tokens, engine.plan.hidden)
        for index, each in enumerate(bias):
            checks.bias_at_home("bias" if len(bias) == 1 else f"bias[{index}]", each, shape, device)
        is_tensor = isinstance(y, torch.Tensor)
        self._out_dtype = self._arguments[3] or (y.dtype if is_tensor else torch.float32)
        if out is not None:
            checks.result_at_home(out, shape, self._out_dtype, device)
            weights = None if self._arguments[0] is False else self._routed._graph_weights
            wanted = (each.requires_grad for each in (y, weights, *bias) if isinstance(each, torch.Tensor))
            checks.require_no_gradient(out, is_grad_enabled() and any(wanted))
        if self._out_dtype not in engine.capabilities.dtypes:
            raise DtypeMismatch(f"out_dtype is {self._out_dtype}, which this backend does not have")
        self._has_graph = is_grad_enabled()
        wide = torch.float64 if is_tensor and y.dtype == torch.float64 else torch.float32
        return (*self._arguments[:3], wide)

    def send(self, stream: int | None) -> None:
        engine, routed, known = self.engine, self._routed, self._known
        if engine.open_calls.halves:
            engine.require_room()
        handle, options = routed._handle, known.kind.options
        if options.strategy == "all_to_all" and routed._gradient_order is not None:
            routed._gradient_order.per_route = True
        out = self._out if self._bias is None else None
        if options.needs_grad:
            weights = routed._weights if options.weighted else None
            rows = self._y if self._y.ndim == 2 else self._y.view(-1, engine.plan.hidden)
            self._sent = autograd.send_combine(engine, handle, known.prepared, rows, weights, options, stream)
            return
        weights = self._weights
        if weights is None and options.weighted:
            weights = routed._late_weights
        self._sent = engine.opened(known.prepared.send(handle, self._y, weights, out, stream))

    def receive(self) -> torch.Tensor:
        total = self._sent.receive()
        if self._bias is None:
            return total
        with torch.set_grad_enabled(self._has_graph):
            for bias in self._bias:  # the sum keeps its dtype, and narrower ones are widened on their way
                total = total + (bias if bias.itemsize < total.itemsize else bias.to(total.dtype))
            return total.to(self._out_dtype) if self._out is None else self._out.copy_(total)

    def forget(self) -> None:
        self._y = self._routed = self._weights = None


# -- follow-ups of a dispatch ----------------------------------------------------------------------------------


class ResendCall(UserCall):
    """Other rows to the places of a dispatch, as ``Communicator.dispatch_again`` explains it."""

    name, range_name = "rows again", DISPATCH_RANGE
    _scale_words: int | None = None

    def __init__(self, owner: object, kinds: Kinds, x: Any, routed: Any, copy: Any) -> None:
        super().__init__(owner, kinds)
        self._x, self._routed, self._copy = x, routed, copy

    def upcoming(self) -> Upcoming:
        x, routed = self._x, self._routed
        x = x[0] if isinstance(x, (tuple, list)) and x else x
        if not (isinstance(routed, Routed) and isinstance(x, torch.Tensor)):
            return Upcoming(self.name)
        handle = routed._handle
        layout = "token" if routed.layout == "slots" else routed.layout  # rows of slots go once to each rank
        options = DispatchOptions(layout, handle.options.alignment, "bounded", handle.options.capacity)
        return Upcoming(self.name, options, x.itemsize)

    def find(self) -> bool:
        x, routed, engine = self._x, self._routed, self.engine
        if routed.__class__ is not Routed or routed._owner is not self.owner:
            return False
        self._values, handle = x, routed._handle
        try:
            is_right = checks.fits_rows_again(
                engine.plan, engine.capabilities, engine.ranks.device, x, handle.num_tokens, handle.options
            )
        except (AttributeError, RuntimeError):  # no tensor, or a nested or sparse one
            return False
        return is_right and (self._copy is True or self._copy == "if_needed")

    def check(self) -> None:
        engine, routed = self.engine, self._routed
        checks.require_routed(routed, self.owner)
        _require_no_grad("x", self._x)
        plan, handle = engine.plan, routed._handle
        if self._copy not in (True, "if_needed"):
            raise InvalidArgument(f"copy is {self._copy!r}, expected True or 'if_needed'")
        values, self._scale_words = checks.unpacked(plan, self._x, "rows", handle.options.recipe)
        checks.rows_again(plan, engine.capabilities, engine.ranks.device, values, handle.num_tokens, handle.options)
        self._values = values.detach() if isinstance(values, torch.Tensor) else tuple(values)

    def send(self, stream: int | None) -> None:
        owner = checks.OWNER_OF_COPY[self._copy]
        self._sent = self.engine.resend(self._routed._handle, self._values, "places", "dedup", owner, stream)

    def receive(self) -> Any:
        routed, words = self._routed, self._scale_words
        found = self._sent.receive()
        _read_outcome(self.engine)
        if isinstance(found, torch.Tensor):
            return routed._by_place(found)
        rows, scales = found
        if words is not None:
            scales = scales.view(torch.int32)[:, :words].contiguous()
        scales = routed._by_place(scales)
        of_rows = routed._handle.options.recipe == "row"
        return routed._by_place(rows), scales.squeeze(-1) if of_rows else scales


class ValuesHomeCall(UserCall):
    """Values of rows on their way home, as ``Communicator.combine_weights`` explains it.

    Where a row is a token, they are a combine of narrow rows. Where it is a route, each value has a place at home.
    """

    range_name = COMBINE_RANGE

    def __init__(self, owner: object, kinds: Kinds, values: Any, routed: Any) -> None:
        super().__init__(owner, kinds)
        self._values, self._routed = values, routed
        self._by_route = isinstance(routed, Routed) and routed.layout in ROUTE_LAYOUTS
        self.name = "gradient of weights" if self._by_route else "combine"

    def upcoming(self) -> Upcoming:
        return Upcoming(self.name)

    def find(self) -> bool:
        engine, routed, values = self.engine, self._routed, self._values
        if routed.__class__ is not Routed or routed._owner is not self.owner:
            return False
        shape = routed._shape[:-1] if self._by_route else (*routed._shape[:-1], engine.plan.top_k)
        try:
            is_right = checks.fits_like(values, shape, torch.float32, engine.ranks.device)
        except RuntimeError:  # a nested tensor
            return False
        may_go = self._by_route or (engine.capabilities.weights_apart and routed._handle.masked == engine.masked)
        return is_right and may_go

    def check(self) -> None:
        engine, routed = self.engine, self._routed
        if not self._by_route:
            _require_weights_apart(engine)
        checks.require_routed(routed, self.owner)
        _require_no_grad("values", self._values)
        shape = routed._shape[:-1] if self._by_route else (*routed._shape[:-1], engine.plan.top_k)
        checks.values_of_rows(self._values, shape, engine.ranks.device)
        if not self._by_route:
            _require_same_ranks(routed, engine)

    def send(self, stream: int | None) -> None:
        engine, handle, values = self.engine, self._routed._handle, self._values.detach()
        if self._by_route:
            like = torch.empty(handle.positions().shape, dtype=torch.float32, device=values.device)
            routes = handle.route_gradients(values.flatten(), like)
            self._sent = engine.send_weight_gradients(handle, routes)
            return
        top_k = engine.plan.top_k
        width = align_up(top_k, WIDTH_UNIT)
        rows = functional.pad(values.view(-1, top_k), (0, width - top_k)) if width > top_k else values
        strategy, fp32 = STRATEGY_OF_MODE[self.kinds.mode_of(None)], torch.float32
        options = CombineOptions(False, fp32, fp32, False, strategy)
        kind = CombineKind(self._routed.layout, fp32, options, width=width)
        engine.require_room()
        prepared = engine.prepare_combine(kind, handle.number)
        self._sent = engine.opened(prepared.send(handle, rows, None, None, stream))

    def receive(self) -> torch.Tensor:
        home = self._sent.receive()
        _read_outcome(self.engine)
        top_k = self.engine.plan.top_k
        return home if home.shape[1] == top_k else home[:, :top_k].contiguous()


class ReweightCall(UserCall):
    """Other weights by the routes of a dispatch, as ``Communicator.reweighted`` explains it.

    Each token's weights travel once to each rank, in a narrow row beside its ids, which tell whose weights they are.

    Args:
        without_lost: rows of ranks that were masked since the dispatch get weights of 0.
    """

    name, range_name = "rows again", DISPATCH_RANGE

    def __init__(self, owner: object, kinds: Kinds, routed: Any, weights: Any, without_lost: bool = False) -> None:
        super().__init__(owner, kinds)
        self._routed, self._weights, self._without_lost = routed, weights, without_lost

    def upcoming(self) -> Upcoming:
        plan = self.engine.plan
        if self._without_lost and not self.engine.capabilities.weights_apart:
            return Upcoming("combine")  # the call that others make where this one is none
        options = DispatchOptions("token", 1, "bounded", plan.worst_case_rows("token"))
        width = align_up(2 * plan.top_k, WIDTH_UNIT)
        return Upcoming(self.name, options, torch.float32.itemsize, width=None if width == plan.hidden else width)

    def find(self) -> bool:
        return False

    def check(self) -> None:
        engine, routed, weights = self.engine, self._routed, self._weights
        _require_weights_apart(engine)
        checks.require_routed(routed, self.owner)
        _require_no_grad("topk_weights", weights)
        handle = routed._handle
        checks.weights_at_home(engine.plan, weights, handle.num_tokens, engine.ranks.device)
        if not (self._without_lost and handle.masked <= engine.masked):
            _require_same_ranks(routed, engine)

    def send(self, stream: int | None) -> None:
        engine, handle, weights = self.engine, self._routed._handle, self._weights.detach()
        ids = handle.ids().to(torch.int32).view(torch.float32)  # bits, which nobody computes with
        missing = -2 * engine.plan.top_k % WIDTH_UNIT
        rows = torch.cat([weights, ids, *[weights.new_zeros(len(weights), missing)] * bool(missing)], 1)
        self._sent = engine.resend(handle, rows, "rows")

    def receive(self) -> Routed:
        engine, routed = self.engine, self._routed
        plan, handle = engine.plan, routed._handle
        found = self._sent.receive()
        weights, ids = found[:, : plan.top_k], found[:, plan.top_k : 2 * plan.top_k].view(torch.int32)
        first = engine.ranks.rank * plan.experts_per_rank
        late = torch.where((ids >= first) & (ids < first + plan.experts_per_rank), weights, 0)
        if routed.layout not in ROUTE_LAYOUTS:
            positions = handle.positions()[: len(late)]
            late = routing.scatter_rows(late[: len(positions)].contiguous(), positions, handle.num_places)
        _read_outcome(engine)
        if self._without_lost:  # a part of the combine that follows, which counts
            engine.open_calls.count -= 1
        return routed._with_weights(late)


def _require_weights_apart(engine: Engine) -> None:
    """Raise where weights travel with rows only."""
    if not engine.capabilities.weights_apart:
        raise InvalidArgument("here weights travel with rows only; give topk_weights to dispatch")


def _require_same_ranks(routed: Routed, engine: Engine) -> None:
    """Raise where ranks were masked since a dispatch. All ranks do."""
    if routed._handle.masked != engine.masked:
        raise raised_by_all(
            InvalidArgument("ranks were masked since the dispatch, so rows have other places now; dispatch again")
        )


def _read_outcome(engine: Engine) -> None:
    """Raise what the call found, where the host reads it of every call."""
    if engine.capabilities.reads_on_host:
        engine.check("calls")


def _require_no_grad(name: str, tensor: object) -> None:
    require_no_tangent(**{name: tensor})
    if isinstance(tensor, torch.Tensor) and is_grad_enabled() and tensor.requires_grad:
        raise NotDifferentiable(f"{name} requires grad, which this call has none for; detach it")
