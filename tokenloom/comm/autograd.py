"""Dispatch and combine as autograd sees them: the gradient of each is the other."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from tokenloom.backends.base import Backend, CombineCall, Handle
from tokenloom.comm.strategy import SWAPPED

DISPATCH_RANGE = "tokenloom::dispatch"
COMBINE_RANGE = "tokenloom::combine"
"""Names of the profiler ranges. Forward, communicator.py opens them around the whole call, counts exchange and all;
backward they are opened here, under the name of what really runs: dispatch's gradient is a combine."""


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """A named range, where a profiler listens; else nothing, which costs the host less."""
    return record_function(name) if torch._C._autograd._profiler_enabled() else nullcontext()


def dispatch(
    backend: Backend, handle: Handle, x: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [T, H], weights [T, K] at home -> (rows [places, H], ``handle.topk_weights``)."""
    if not _wants_grad(x, weights):
        return backend.dispatch(handle, x), handle.topk_weights
    rows, received = _Dispatch.apply(backend, handle, x, weights)
    return rows, received


def combine(
    backend: Backend, handle: Handle, rows: torch.Tensor, weights: torch.Tensor | None, call: CombineCall
) -> torch.Tensor:
    """rows [places, H], received weights [R, K] or None -> [T, H]."""
    if not _wants_grad(rows, weights):
        return backend.combine(handle, rows, weights, call)
    return _Combine.apply(backend, handle, rows, weights, call)


def row_weights(backend: Backend, handle: Handle, weights: torch.Tensor, num_places: int) -> torch.Tensor:
    """Received weights [R, K] -> [num_places], of the rows."""
    return _RowWeights.apply(backend, handle, weights, num_places)


def _wants_grad(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backend: Backend, handle: Handle, x: torch.Tensor, weights: torch.Tensor | None) -> Any:
        ctx.backend, ctx.handle, ctx.x_dtype = backend, handle, x.dtype
        # Outputs point at this node, which holds the handle. If one were the handle's own tensor, as a backend may
        # keep its rows and weights there, that would be a cycle that only the garbage collector ends, with all
        # activations before it. So they are other tensors of the same storage.
        rows = backend.dispatch(handle, x).detach()
        received = handle.topk_weights
        if received is not None:
            received = received.detach()
        if rows.element_size() == 1:  # FP8, which x need not be: the backend may have quantised it
            ctx.mark_non_differentiable(rows)
        return rows, received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor, grad_received: torch.Tensor | None) -> Any:
        backend, handle, x_dtype = ctx.backend, ctx.handle, ctx.x_dtype
        grad_x = grad_weights = None
        with profiler_range(COMBINE_RANGE):
            if ctx.needs_input_grad[2]:
                call = CombineCall("per_rank", False, x_dtype, x_dtype, False, SWAPPED[handle.call.strategy])
                grad_x = backend.combine(handle, grad_rows.contiguous(), None, call)
            if ctx.needs_input_grad[3] and grad_received is not None:
                grad_weights = backend.return_weights(handle, grad_received.contiguous())
        return None, None, grad_x, grad_weights


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, backend: Backend, handle: Handle, rows: torch.Tensor, weights: torch.Tensor | None, call: CombineCall
    ) -> torch.Tensor:
        ctx.backend, ctx.handle, ctx.call, ctx.rows_dtype = backend, handle, call, rows.dtype
        needs_dots = weights is not None and ctx.needs_input_grad[3]
        ctx.save_for_backward(rows if needs_dots else None, weights)
        return backend.combine(handle, rows, weights, call)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows, weights = ctx.saved_tensors
        with profiler_range(DISPATCH_RANGE):
            grad_rows, grad_weights = ctx.backend.combine_backward(
                ctx.handle, grad.contiguous(), rows, weights, ctx.rows_dtype, SWAPPED[ctx.call.strategy]
            )
        if grad_weights is not None:
            grad_weights = grad_weights.to(weights.dtype)
        return None, None, grad_rows if ctx.needs_input_grad[2] else None, grad_weights, None


class _RowWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backend: Backend, handle: Handle, weights: torch.Tensor, num_places: int) -> torch.Tensor:
        ctx.backend, ctx.handle = backend, handle
        ctx.save_for_backward(weights)
        return backend.row_weights(handle, weights, num_places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (weights,) = ctx.saved_tensors
        return None, None, ctx.backend.route_gradients(ctx.handle, grad.contiguous(), weights), None
