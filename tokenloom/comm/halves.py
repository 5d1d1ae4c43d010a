"""What runs in each half of a dispatch and of a combine, with or without a pending between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, ClassVar

import torch

from tokenloom.backends.base import CombineOptions, DispatchInputs, DispatchOptions, DispatchOut, Upcoming
from tokenloom.backends.base import Pending as Sent
from tokenloom.comm import autograd, outputs, validation, validation_beside
from tokenloom.comm.engine import COMBINE_RANGE, DISPATCH_RANGE, Engine, profiler_range
from tokenloom.comm.pending import Pending
from tokenloom.comm.routed import Routed
from tokenloom.comm.strategy import STRATEGY_OF_MODE
from tokenloom.comm.torch_modes import as_in_first_half, require_no_tangent, settled
from tokenloom.errors import NotDifferentiable


class Call(ABC):
    """One call of a communicator, made once: in one piece by :meth:`run`, or in halves by :meth:`send`.

    Attributes:
        name: "dispatch" or "combine".
        range_name: of the profiler.
        engine: of the communicator.
    """

    name: ClassVar[str]
    range_name: ClassVar[str]
    engine: Engine

    def run(self) -> Any:
        """Make the whole call: its result."""
        engine, turn = self.engine, self.engine.ranks.turn
        if not (engine.is_plain() and turn.take()):
            engine.begin()
            with profiler_range(self.range_name), engine.sequence(self._upcoming()):
                self._send(split=False)
                return self._receive()
        try:
            engine.begin(plain=True)
            opened = engine.open_calls.count
            try:
                self._send(split=False)
                return self._receive()
            except BaseException:
                # As the sequence would know: whether the call was open, behind which nothing fails but receiving.
                upcoming = [] if engine.open_calls.count > opened else [self._upcoming()]
                with engine.sequence(*upcoming):
                    raise
        finally:
            turn.leave()

    def send(self) -> Pending[Any]:
        """Make the first half."""
        engine = self.engine
        engine.begin()
        self._modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        with profiler_range(self.range_name), engine.sequence(self._upcoming(split=True)):
            sent = self._send(split=True)
        self._forget()  # the pending may live for long

        def discard() -> None:
            with as_in_first_half(*self._modes), engine.sequence():
                sent.receive()

        return Pending(self._second_half, engine.open_calls, self.name, discard)

    def _second_half(self) -> Any:
        engine = self.engine
        engine.ranks.require_alive()
        with as_in_first_half(*self._modes), profiler_range(self.range_name), engine.sequence():
            return self._receive()

    @abstractmethod
    def _upcoming(self, split: bool = False) -> Upcoming:
        """The call as the ranks open it, in halves or not.

        Its options are what can be told of them, as what was given may be wrong here: the others may make a buffer.
        """

    @abstractmethod
    def _forget(self) -> None:
        """Let go of what was given, but for what the second half needs."""

    @abstractmethod
    def _send(self, split: bool) -> Sent[Any]:
        """Check what was given and send it: what the engine gave for it."""

    @abstractmethod
    def _receive(self) -> Any:
        """Receive what was sent: the result as users see it."""


class DispatchCall(Call):
    """One dispatch, as ``Communicator.dispatch`` explains it.

    Args:
        owner: the communicator.
        tensors: x, topk_ids and topk_weights, as they were given.
        options: what follows ``able`` in :func:`tokenloom.comm.validation.dispatch_options`.
        copy, out: as they were given.

    Attributes:
        options: what the options mean, once they were checked.
        inputs: the checked tensors, while they are kept.
    """

    name, range_name = "dispatch", DISPATCH_RANGE
    options: DispatchOptions
    inputs: DispatchInputs | None

    def __init__(
        self,
        owner: object,
        engine: Engine,
        tensors: tuple[Any, Any, Any],
        options: tuple[Any, ...],
        copy: bool | str,
        out: DispatchOut | None,
    ) -> None:
        self.engine, self._owner, self._tensors, self._options = engine, owner, tensors, options
        self._copy, self._out = copy, out

    def _upcoming(self, split: bool = False) -> Upcoming:
        layout, _, sizes = self._options[:3]
        awaited = not split and sizes != "bounded" and layout != "slots"
        x = self._tensors[0]
        dtype = getattr(x[0] if isinstance(x, (tuple, list)) and x else x, "dtype", None)
        options = None
        with suppress(Exception):
            options = self.engine.dispatch_options(*self._options)
        if options is None or dtype not in (*self.engine.capabilities.dtypes, torch.float8_e4m3fn):
            return Upcoming(self.name, awaited=awaited, split=split)
        return Upcoming(self.name, options, 1 if options.to_fp8 else dtype.itemsize, awaited, split)

    def _forget(self) -> None:
        self._tensors, self.inputs = (None, None, None), None

    def _send(self, split: bool) -> Sent[Any]:
        engine, (x, ids, weights) = self.engine, self._tensors
        plan, able, device = engine.plan, engine.capabilities, engine.ranks.device
        options = self.options = engine.dispatch_options(*self._options)
        x, self._scale_words = validation_beside.unpacked(plan, x, options.scale_layout)
        reads_ids = validation.reads_ids(able, device)
        require_no_tangent(x=x, topk_weights=weights)
        inputs = self.inputs = validation.dispatch_inputs(
            plan, able, device, x, ids, weights, self._copy, reads_ids, options.to_fp8, options.scale_layout, split
        )
        inputs.scale_words = self._scale_words
        if self._out is not None:
            inputs.out = outputs.of_dispatch(plan, options, inputs, self._out)
        self._ids_dtype, self._weighted = inputs.topk_ids.dtype, weights is not None
        self._in_graph: tuple[torch.Tensor, torch.Tensor | None] | None = None
        if inputs.x_needs_grad or inputs.weights_need_grad:
            x, weights = inputs.x, inputs.topk_weights
            if split:  # by the second half they may have got other values
                x, weights = autograd.ticket(x), None if weights is None else autograd.ticket(weights)
            self._in_graph = x, weights
        self._sent = engine.send_dispatch(options, inputs)
        return self._sent

    def _receive(self) -> Routed:
        handle, rows = self._sent.receive()
        made = (self._owner, self.engine.plan, handle)
        if self._in_graph is None:
            routed = Routed(*made, rows, None, self._weighted, self._ids_dtype, self._out)
        else:
            with torch.enable_grad():  # as it was in the first half
                rows, weights = autograd.dispatched(self.engine, handle, rows, *self._in_graph)
                routed = Routed(*made, rows, weights, self._weighted, self._ids_dtype)
        if self._scale_words is not None:
            vars(routed)["_scale_words"] = self._scale_words
        if self._ids_dtype != torch.int32 and rows.is_cuda and torch.cuda.is_current_stream_capturing():
            _ = routed.topk_ids  # converted later, they would be outside of the graph and never change
        return routed


class CombineCall(Call):
    """One combine, as ``Communicator.combine`` explains it.

    Args:
        owner: the communicator.
        y, routed: as they were given.
        options: weighted, mode, wire_dtype and out_dtype as they were given.
        out: as it was given.
        home_weights: weights [T, K] of this rank's tokens, for backends that take them.

    Attributes:
        options: what the options mean, once they were checked.
    """

    name, range_name = "combine", COMBINE_RANGE
    options: CombineOptions

    def __init__(
        self,
        owner: object,
        engine: Engine,
        y: torch.Tensor,
        routed: Routed,
        options: tuple[Any, ...],
        out: torch.Tensor | None,
        home_weights: torch.Tensor | None = None,
    ) -> None:
        self.engine, self._owner = engine, owner
        self._y, self._routed, self._options, self._out = y, routed, options, out
        self._home_weights = home_weights

    def _upcoming(self, split: bool = False) -> Upcoming:
        weighted, mode, wire_dtype, _ = self._options
        wire = getattr(self._y, "dtype", None) if wire_dtype is None else wire_dtype
        strategy = STRATEGY_OF_MODE.get(mode) if isinstance(mode, str) else None
        if strategy is None or not isinstance(wire, torch.dtype) or wire not in self.engine.capabilities.dtypes:
            return Upcoming(self.name, split=split)
        options = CombineOptions(bool(weighted), wire, wire, False, strategy, self._home_weights is not None)
        return Upcoming(self.name, options, wire.itemsize, split=split)

    def _forget(self) -> None:
        del self._y, self._routed, self._out, self._home_weights

    def _send(self, split: bool) -> Sent[torch.Tensor]:
        engine, y, routed, out, home = self.engine, settled(self._y), self._routed, self._out, self._home_weights
        validation.require_routed(routed, self._owner)
        handle, weights, has_weights = routed._handle, routed._graph_weights, routed._weighted
        require_no_tangent(y=y, topk_weights=home)
        options = self.options = validation.combine_options(
            engine.capabilities,
            engine.ranks.device,
            y,
            routed._shape,
            routed.layout,
            has_weights,
            weights is not None and weights.requires_grad,
            home is not None,
            *self._options,
        )
        if home is not None:
            validation_beside.weights_at_home(engine.plan, home, handle.num_tokens, engine.ranks.device)
            if options.needs_grad or (torch.is_grad_enabled() and home.requires_grad):
                raise NotDifferentiable("topk_weights of a combine have no gradient; pass them to dispatch")
        if out is not None:
            outputs.of_combine(out, options, routed, y)
        rows = y if y.ndim == 2 else y.view(-1, engine.plan.hidden)
        if options.needs_grad:
            weights = routed._weights if options.weighted else None
            self._sent = autograd.send_combine(engine, handle, rows, weights, options, split)
        else:
            late = home if home is not None else routed._late_weights if options.weighted else None
            self._sent = engine.send_combine(handle, rows, late, options, out, split=split)
        return self._sent

    def _receive(self) -> torch.Tensor:
        return self._sent.receive()
