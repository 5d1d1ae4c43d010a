"""SwiGLU experts on rows grouped by expert, which save little for backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tokenloom.activation import activate_backward
from tokenloom.errors import ShapeMismatch
from tokenloom.products import products_for


def swiglu_experts(
    rows: torch.Tensor,
    expert_offsets: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    row_weights: torch.Tensor | None = None,
    host_offsets: list[int] | None = None,
) -> torch.Tensor:
    """``w2 @ (weight * silu(gate) * up)`` per expert, with ``gate, up = w1 @ row``. Differentiable, once.

    For backward only ``rows`` and the pre-activations ``w1 @ row`` are kept: activations are computed again, and the
    gradient of a weight is the product of the unweighted activations with their gradient, so that outputs are not
    needed. Activations are computed in float32 (float64 beside float64) and rounded once, weighted.

    Args:
        rows: [R, H], expert e's rows at ``expert_offsets[e]:expert_offsets[e + 1]``; R may exceed the last offset.
        expert_offsets: int32 [L + 1], ascending.
        w1: [L, 2I, H], gate rows 0..I-1, then up rows.
        w2: [L, H, I].
        row_weights: [R], or None for ones.
        host_offsets: ``expert_offsets`` where they are known on the host, which then picks faster products.

    Returns:
        [R, H], dtype of ``rows`` (of autocast, where that is on); rows beyond the last offset are unspecified.

    Raises:
        ShapeMismatch: row_weights is not [R].
    """
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows, w1, w2 = (tensor.to(dtype) for tensor in (rows, w1, w2))
    if row_weights is not None:
        if row_weights.shape != rows.shape[:1]:
            raise ShapeMismatch(f"row_weights is {list(row_weights.shape)}, expected [{len(rows)}]: one for each row")
        row_weights = row_weights.contiguous()
    else:
        row_weights = rows.new_ones(len(rows), dtype=torch.promote_types(rows.dtype, torch.float32))
    with torch.autocast(device, enabled=False):
        return _SwigluExperts.apply(rows, expert_offsets, w1, w2, row_weights, host_offsets)


class _SwigluExperts(torch.autograd.Function):
    saved_names = ("rows", "offsets", "w1", "w2", "weights of rows", "pre-activations")

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        offsets: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        row_weights: torch.Tensor,
        host_offsets: list[int] | None,
    ) -> torch.Tensor:
        ctx.products = products = products_for(rows, w1, w2, offsets, host_offsets)
        hidden, activations = products.swiglu(rows, w1, row_weights)
        ctx.save_for_backward(rows, offsets, w1, w2, row_weights, hidden)
        return products.by_weights(activations, w2.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows, offsets, w1, w2, row_weights, hidden = ctx.saved_tensors
        products, grad = ctx.products, grad.contiguous()
        wants_rows, _, wants_w1, wants_w2, wants_weights, _ = ctx.needs_input_grad
        grad_activations = products.by_weights(grad, w2)
        activations, grad_hidden, grad_weights = activate_backward(hidden, row_weights, offsets[-1:], grad_activations)
        grad_rows = products.by_weights(grad_hidden, w1) if wants_rows else None
        grad_w1 = products.of_weights(grad_hidden, rows) if wants_w1 else None
        grad_w2 = products.of_weights(grad, activations) if wants_w2 else None
        return grad_rows, None, grad_w1, grad_w2, grad_weights if wants_weights else None, None
