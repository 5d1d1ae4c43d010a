"""Dispatch and combine as autograd sees them: the gradient of each is the other."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tokenloom.backends.seam import (
    STRATEGY_OF_MODE,
    SWAPPED,
    CombineOptions,
    Handle,
    PreparedCombine,
    Sent,
    Upcoming,
    gradient_of_dispatch,
)
from tokenloom.comm.engine import Engine
from tokenloom.runtime.torch_modes import settled


class GradientOrder:
    """The order in which the gradient of one dispatch is summed. A combine of its rows may change it.

    Attributes:
        per_route: every route's gradient comes home by itself, in ascending k, as a combine with ``mode="per_route"``
            brought its row. Then neither depends on where experts are.
    """

    per_route = False


def dispatched(
    engine: Engine,
    handle: Handle,
    rows: torch.Tensor,
    order: GradientOrder,
    x: torch.Tensor,
    weights: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tie what a dispatch received to x [T, H] and weights [T, K] at home: (rows, received weights)."""
    return _Dispatch.apply(engine, handle, [rows], order, x, weights)


def ticket(tensor: torch.Tensor) -> torch.Tensor:
    """Stand for a tensor in the graph as it is now: its shape and dtype, without its values or its memory."""
    return _Ticket.apply(tensor)


def send_combine(
    engine: Engine,
    handle: Handle,
    prepared: PreparedCombine,
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    options: CombineOptions,
    stream: int | None = None,
) -> Sent[torch.Tensor]:
    """Send rows [places, H], with received weights [R, K] or None, home. ``receive`` gives [T, H], with a graph.

    Args:
        prepared: sends them. options: its own. stream: what the engine's ``ready_stream`` has just given, or None.
    """
    sent: list[Sent[torch.Tensor]] = []
    return _SentWithGraph(sent, _SendCombine.apply(engine, handle, prepared, rows, weights, options, stream, sent))


def row_weights(handle: Handle, weights: torch.Tensor, num_places: int) -> torch.Tensor:
    """Received weights [R, K] -> [num_places], one for each row."""
    return _RowWeights.apply(handle, weights, num_places)


def _save_a_mark(ctx: Any, like: torch.Tensor) -> None:
    """Save a tensor without values where saved tensors are hooked. Backward asks for it before it does anything.

    A region under ``torch.utils.checkpoint`` runs again at the first saved tensor that is asked for. Without a mark
    that could be one of the rank's own computations, of which a rank without rows may have none: ranks would call in
    different orders. Elsewhere nothing is saved, so nothing is freed behind the first backward.
    """
    ctx.marked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    if ctx.marked:
        ctx.save_for_backward(like.new_empty(0))


def _ask_for_the_mark(ctx: Any) -> None:
    if ctx.marked:
        _ = ctx.saved_tensors


class _Ticket(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_empty(()).expand(tensor.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        engine: Engine,
        handle: Handle,
        received_rows: list[torch.Tensor],
        order: GradientOrder,
        x: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> Any:
        ctx.engine, ctx.handle, ctx.order, ctx.x_dtype = engine, handle, order, x.dtype
        # Outputs point at this node, which holds the handle. An output that were the handle's own tensor would close
        # a cycle that only the garbage collector ends, with all activations before it. detach() makes another tensor.
        rows = received_rows[0].detach()
        received = handle.topk_weights
        if received is not None:
            received = received.detach()
        no_gradient = []
        if not ctx.needs_input_grad[4]:  # so rows in FP8 never do: such payloads have no gradient
            no_gradient.append(rows)
        if received is not None and not ctx.needs_input_grad[5]:
            no_gradient.append(received)
        ctx.mark_non_differentiable(*no_gradient)
        _save_a_mark(ctx, rows)
        return rows, received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor, grad_received: torch.Tensor | None) -> Any:
        _ask_for_the_mark(ctx)
        engine, handle, x_dtype = ctx.engine, ctx.handle, ctx.x_dtype
        wants_x, wants_weights = ctx.needs_input_grad[4], ctx.needs_input_grad[5] and grad_received is not None
        strategy = STRATEGY_OF_MODE["per_route"]
        if not ctx.order.per_route:
            strategy = gradient_of_dispatch(engine.capabilities, handle.options.strategy)
        options = CombineOptions(False, x_dtype, x_dtype, False, strategy)
        upcoming = [Upcoming("gradient of dispatch", options, x_dtype.itemsize)] * wants_x
        upcoming += [Upcoming("gradient of weights")] * wants_weights
        grad_x = grad_weights = None
        with engine.sequence(*upcoming):
            if wants_x:
                grad_x = engine.send_combine(handle, settled(grad_rows).contiguous(), None, options).receive()
            if wants_weights and grad_received is not None:
                grad_weights = engine.send_weight_gradients(handle, settled(grad_received).contiguous()).receive()
        return None, None, None, None, grad_x, grad_weights


class _SentWithGraph:
    """A sent combine whose result gets an autograd node at ``receive``."""

    def __init__(self, sent: list[Sent[torch.Tensor]], ticket: torch.Tensor) -> None:
        self._sent, self._ticket = sent, ticket

    def receive(self) -> torch.Tensor:
        out = self._sent[0].receive()
        with torch.enable_grad():
            return _ReceiveCombine.apply(self._ticket, [out])


class _ReceiveCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: torch.Tensor, out: list[torch.Tensor]) -> torch.Tensor:
        _save_a_mark(ctx, out[0])
        return out[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _ask_for_the_mark(ctx)
        return grad, None


class _SendCombine(torch.autograd.Function):
    """Gives a ticket of the result. What backward needs is saved here: y may get other values between the halves."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: Engine,
        handle: Handle,
        prepared: PreparedCombine,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        options: CombineOptions,
        stream: int | None,
        sent: list[Sent[torch.Tensor]],
    ) -> torch.Tensor:
        ctx.engine, ctx.handle, ctx.options, ctx.rows_dtype = engine, handle, options, rows.dtype
        needs_dots = weights is not None and ctx.needs_input_grad[4]
        ctx.save_for_backward(rows if needs_dots else None, weights)
        sent.append(engine.opened(prepared.send(handle, rows, weights, None, stream)))
        return rows.new_empty((), dtype=options.out_dtype).expand(handle.num_tokens, rows.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        upcoming = Upcoming("gradient of combine", value_bytes=grad.element_size())
        with ctx.engine.sequence(upcoming):
            rows, weights = ctx.saved_tensors  # which raises on a rank that has changed them in place
            grad_rows, grad_weights = ctx.engine.combine_gradient(
                ctx.handle, settled(grad).contiguous(), rows, weights, ctx.rows_dtype, SWAPPED[ctx.options.strategy]
            )
        if grad_weights is not None:
            grad_weights = grad_weights.to(weights.dtype)
        return None, None, None, grad_rows if ctx.needs_input_grad[3] else None, grad_weights, None, None, None


class _RowWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Handle, weights: torch.Tensor, num_places: int) -> torch.Tensor:
        ctx.handle = handle
        ctx.save_for_backward(weights)
        return handle.row_weights(weights, num_places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (weights,) = ctx.saved_tensors
        return None, ctx.handle.route_gradients(settled(grad).contiguous(), weights), None
