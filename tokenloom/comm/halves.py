"""What runs in each half of a dispatch and of a combine, with or without a pending between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from tokenloom.backends.base import DispatchOut, Upcoming
from tokenloom.backends.base import Pending as Sent
from tokenloom.comm import autograd, outputs, validation
from tokenloom.comm.engine import COMBINE_RANGE, DISPATCH_RANGE, Engine, profiler_range
from tokenloom.comm.pending import Pending
from tokenloom.comm.routed import Routed, make_routed
from tokenloom.runtime.streams import tensors_in


class Call(ABC):
    """One call of a communicator, made once: in one piece by :meth:`run`, or in halves by :meth:`send`.

    Args:
        engine: of the communicator.
        name: "dispatch" or "combine".
        range_name: of the profiler.
        awaited: in one piece, ranks wait for its outcome before they open another call.
        given: everything that the call reads or writes: tensors, or tuples and dataclasses that hold tensors.
        async_op: run on the communicator's own stream, and give (result, event).
    """

    def __init__(
        self, engine: Engine, name: str, range_name: str, awaited: bool, given: tuple[Any, ...], async_op: bool
    ) -> None:
        self.engine, self.async_op = engine, async_op
        self._name, self._range, self._awaited, self._given = name, range_name, awaited, given

    def run(self) -> Any:
        """Make the whole call: its result."""
        engine = self.engine
        engine.begin()
        upcoming = Upcoming(self._name, awaited=self._awaited)
        stream = engine.side_stream.run(self._given) if self.async_op else nullcontext()
        with stream, profiler_range(self._range), engine.sequence(upcoming):
            self._send(split=False)
            return self._result()

    def send(self) -> Pending[Any]:
        """Make the first half."""
        engine = self.engine
        engine.begin()
        stream = engine.side_stream.run(self._given) if self.async_op else nullcontext()
        with stream, profiler_range(self._range), engine.sequence(Upcoming(self._name)):
            sent = self._send(split=True)
        self._given = ()  # the pending may live for long

        def discard() -> None:
            with engine.side_stream.resume() if self.async_op else nullcontext(), engine.sequence():
                sent.receive()

        return Pending(self._second_half, engine.open_calls, self._name, discard)

    def _second_half(self) -> Any:
        engine = self.engine
        engine.ranks.require_alive()
        stream = engine.side_stream.resume() if self.async_op else nullcontext()
        with stream, profiler_range(self._range), engine.sequence():
            return self._result()

    def _result(self) -> Any:
        result = self._receive()
        return (result, self.engine.side_stream.event(tuple(tensors_in(result)))) if self.async_op else result

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
        copy, out, async_op: as they were given.
    """

    def __init__(
        self,
        owner: object,
        engine: Engine,
        tensors: tuple[Any, torch.Tensor, torch.Tensor | None],
        options: tuple[Any, ...],
        copy: bool,
        out: DispatchOut | None,
        async_op: bool,
    ) -> None:
        layout, _, sizes = options[:3]
        exact = sizes != "bounded" and layout != "slots"
        super().__init__(engine, "dispatch", DISPATCH_RANGE, exact, (*tensors, out), async_op)
        self._owner, self._options, self._copy, self._out = owner, options, copy, out

    def _send(self, split: bool) -> Sent[Any]:
        engine, (x, ids, weights, _) = self.engine, self._given
        plan, able, device = engine.plan, engine.capabilities, engine.ranks.device
        options = validation.dispatch_options(plan, able, *self._options)
        reads_ids = validation.reads_ids(able, device)
        inputs = validation.dispatch_inputs(
            plan, able, device, x, ids, weights, self._copy, reads_ids, options.to_fp8, options.scale_layout, split
        )
        if self._out is not None:
            inputs = replace(inputs, out=outputs.of_dispatch(plan, options, inputs, self._out))
        self._ids_dtype = inputs.topk_ids.dtype
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
            return make_routed(*made, rows, handle.topk_weights, self._ids_dtype, self._out)
        with torch.enable_grad():  # as it was in the first half
            rows, weights = autograd.dispatched(self.engine, handle, rows, *self._in_graph)
            return make_routed(*made, rows, weights, self._ids_dtype)


class CombineCall(Call):
    """One combine, as ``Communicator.combine`` explains it.

    Args:
        owner: the communicator.
        y, routed: as they were given.
        options: weighted, mode, wire_dtype and out_dtype as they were given.
        out, async_op: as they were given.
    """

    def __init__(
        self,
        owner: object,
        engine: Engine,
        y: torch.Tensor,
        routed: Routed,
        options: tuple[Any, ...],
        out: torch.Tensor | None,
        async_op: bool,
    ) -> None:
        super().__init__(engine, "combine", COMBINE_RANGE, False, (y, routed, out), async_op)
        self._owner, self._options = owner, options

    def _send(self, split: bool) -> Sent[torch.Tensor]:
        engine, (y, routed, out) = self.engine, self._given
        validation.require_routed(routed, self._owner)
        shape, weights = list(routed.tokens.shape), routed._weights
        options = validation.combine_options(
            engine.capabilities, engine.ranks.device, y, shape, routed.layout, weights, *self._options
        )
        if out is not None:
            outputs.of_combine(out, options, routed, y)
        rows, weights = y.view(-1, engine.plan.hidden), weights if options.weighted else None
        if options.needs_grad:
            self._sent = autograd.send_combine(engine, routed._handle, rows, weights, options, split)
        else:
            self._sent = engine.send_combine(routed._handle, rows, weights, options, out, split=split)
        return self._sent

    def _receive(self) -> torch.Tensor:
        return self._sent.receive()
