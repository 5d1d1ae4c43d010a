"""The calls that ``tokenloom bench comm`` measures, on fixed tensors of this rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import torch

from tokenloom.backends import registry
from tokenloom.bench.comm.series import Contestant, Series
from tokenloom.bench.common.inputs import Inputs, expert_outputs
from tokenloom.bench.rivals import deep_ep
from tokenloom.comm.communicator import Communicator
from tokenloom.comm.engine import Pending
from tokenloom.comm.routed import Routed
from tokenloom.runtime.processes import RankContext


class OurCall:
    """An operation of one of our backends, ready to be called again and again. Making one is collective.

    Args:
        comm: what makes the calls.
        series: which operation.
        inputs: what is sent.
    """

    def __init__(self, comm: Communicator, series: Series, inputs: Inputs) -> None:
        operation = series.operation
        self._comm = comm
        self._name = operation.name
        x = inputs.fp8 if operation.payload == "fp8" else inputs.x
        assert x is not None
        self._given = (x, inputs.ids, inputs.weights)
        self._options: dict[str, Any] = {"layout": operation.layout, "sizes": series.sizes}
        if operation.payload == "to_fp8":
            self._options["to_fp8"] = True
        if operation.layout == "slots":
            self._options["capacity"] = inputs.slot_rows
            if series.scale_layout is not None:
                self._options["scale_layout"] = series.scale_layout
        elif operation.layout == "expert" and series.sizes == "bounded":
            self._options["capacity"] = inputs.expert_rows
        self._before: Routed | None = None
        if "combine" in operation.name:
            self._before = self.dispatch(copy=True)  # later dispatches would overwrite a view of a receive buffer
            self._y = expert_outputs(self._before.tokens)

    def __call__(self) -> Any:
        """Make the operation in calls of one piece. A combine after a dispatch is of that dispatch."""
        if self._name == "dispatch":
            return self.dispatch()
        return self.combine(self._before if self._name == "combine" else self.dispatch())

    def dispatch(self, copy: bool = False) -> Routed:
        """Dispatch the tokens."""
        return self._comm.dispatch(*self._given, copy=copy, **self._options)

    def combine(self, routed: Routed | None) -> torch.Tensor:
        """Combine the same expert outputs, whatever was dispatched."""
        assert routed is not None
        return self._comm.combine(self._y, routed)

    def send(self) -> list[Pending[Any]]:
        """Send the first halves. A dispatch and a combine are of two micro-batches, open at the same time."""
        pendings: list[Pending[Any]] = []
        if self._name != "combine":
            pendings.append(self._comm.send_dispatch(*self._given, **self._options))
        if self._before is not None:
            pendings.append(self._comm.send_combine(self._y, self._before))
        return pendings


class CallMaker:
    """Makes the calls of every series. Communicators are made when they are first needed.

    Args:
        context: the rank.
        inputs: what is sent.
        stack: closes the communicators.
    """

    def __init__(self, context: RankContext, inputs: Inputs, stack: ExitStack) -> None:
        self._context = context
        self._inputs = inputs
        self._stack = stack
        self._communicators: dict[tuple[str, int | None], Communicator] = {}
        self._deep_ep: deep_ep.DeepEp | None = None

    def ours(self, series: Series) -> OurCall:
        """The operation of a series of one of our backends. Collective."""
        return OurCall(self._communicator(series.contestant), series, self._inputs)

    def call(self, series: Series) -> Callable[[], Any]:
        """The operation of any series, as a call of one piece. Collective."""
        if series.contestant.backend == deep_ep.NAME:
            return self._rival().prepared_call(series.operation, self._inputs)
        return self.ours(series)

    def check(self, contestant: Contestant) -> None:
        """Raise what calls of our own backends left behind: a graph cannot raise by itself."""
        comm = self._communicators.get((contestant.backend, contestant.num_sms))
        if comm is not None:
            comm.check()

    def _communicator(self, contestant: Contestant) -> Communicator:
        key = (contestant.backend, contestant.num_sms)
        if key not in self._communicators:
            shape = self._inputs.shape
            comm = Communicator(
                self._context.group,
                num_experts=shape.num_experts,
                hidden=shape.hidden,
                top_k=shape.top_k,
                max_tokens_per_rank=shape.num_tokens,
                backend=contestant.backend,
                device=self._context.device,
                num_sms=contestant.num_sms or registry.DEFAULT_SMS,
                ranks_per_node=contestant.ranks_per_node,
            )
            self._communicators[key] = self._stack.enter_context(comm)
        return self._communicators[key]

    def _rival(self) -> deep_ep.DeepEp:
        if self._deep_ep is None:
            plan = self._inputs.shape.plan(self._context.num_ranks)
            self._deep_ep = self._stack.enter_context(closing(deep_ep.DeepEp(self._context.group, plan)))
        return self._deep_ep
