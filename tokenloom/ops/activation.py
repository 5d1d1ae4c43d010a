"""SwiGLU between the two GEMMs of an expert: one kernel each way on Hopper GPUs, torch elsewhere."""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenloom.kernels.activation import launch
from tokenloom.kernels.common import HOPPER


def swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    """Compute ``silu(gate) * up`` from [..., 2I], gates first, giving [..., I]."""
    gate, up = gate_and_up.chunk(2, -1)
    return functional.silu(gate) * up


def activate(hidden: torch.Tensor, row_weights: torch.Tensor, num_rows: torch.Tensor) -> torch.Tensor:
    """Compute ``weight * silu(gate) * up`` in float32, or float64 for float64 input, rounded once.

    Args:
        hidden: [R, 2I], gates first.
        row_weights: float32 [R], or float64 for float64 input.
        num_rows: int32 [1], rows in use. The other rows of the result are unspecified.

    Returns:
        [R, I], dtype of ``hidden``.
    """
    if _kernels_take(hidden, row_weights):
        return launch.swiglu_forward(hidden, row_weights, num_rows)
    gate, up = hidden.to(_compute_dtype(hidden)).chunk(2, -1)
    return _weighted(gate * torch.sigmoid(gate) * up, row_weights).to(hidden.dtype)


def activate_backward(
    hidden: torch.Tensor, row_weights: torch.Tensor, num_rows: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Recompute the result of :func:`activate` and compute the gradients of its inputs.

    Args:
        hidden: as in ``activate``.
        row_weights: as in ``activate``.
        num_rows: as in ``activate``.
        grad: [R, I], gradient of the result.

    Returns:
        The result [R, I] again, the gradient of ``hidden`` [R, 2I] and that of ``row_weights`` [R], each with the
        dtype of its input. Rows from ``num_rows`` on are unspecified.
    """
    if _kernels_take(hidden, row_weights):
        return launch.swiglu_backward(hidden, row_weights, num_rows, grad)
    gate, up = hidden.to(_compute_dtype(hidden)).chunk(2, -1)
    grad = grad.to(gate.dtype)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    activations = silu * up
    grad_weights = (grad * activations).sum(-1).to(row_weights.dtype)
    grad = _weighted(grad, row_weights)
    grad_gate = grad * up * (sigmoid * (1 + gate * (1 - sigmoid)))
    grad_hidden = torch.cat([grad_gate, grad * silu], -1).to(hidden.dtype)
    return _weighted(activations, row_weights).to(hidden.dtype), grad_hidden, grad_weights


def _weighted(rows: torch.Tensor, row_weights: torch.Tensor) -> torch.Tensor:
    return rows * row_weights[:, None]


def _compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _kernels_take(hidden: torch.Tensor, row_weights: torch.Tensor) -> bool:
    return (
        hidden.is_cuda
        and row_weights.dtype == torch.float32
        and launch.takes(hidden.dtype, hidden.shape[1] // 2)
        and torch.cuda.get_device_capability(hidden.device) == HOPPER
    )
