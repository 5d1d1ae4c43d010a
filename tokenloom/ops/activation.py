"""Activations between the two GEMMs of an expert: one kernel each way on Hopper GPUs, torch elsewhere."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn import functional

from tokenloom.kernels.activation import launch
from tokenloom.kernels.common import HOPPER, is_dense
from tokenloom.ops.offsets import experts_of_rows
from tokenloom.plan import SWIGLU, Activation

GELU_TANH = math.sqrt(2 / math.pi), 0.044715
"""Constants of the approximation of gelu (Hendrycks and Gimpel, arXiv 1606.08415, section 2)."""


class Between(NamedTuple):
    """What lies between the products of a rank's experts.

    Attributes:
        activation: of each row.
        interleaved: a row has gate, up, gate, up and so on, instead of gates first.
        bias: [L, 2I], or [L, I] without gates, dtype and order of the rows; or None.
    """

    activation: Activation = SWIGLU
    interleaved: bool = False
    bias: torch.Tensor | None = None


PLAIN = Between()


def apply_activation(hidden: torch.Tensor, activation: Activation = SWIGLU, interleaved: bool = False) -> torch.Tensor:
    """Compute ``f(gate) * (up + up_offset)`` from [..., 2I], or ``f(x)`` from [..., I], giving [..., I].

    Differentiable. Each step is rounded to the dtype of ``hidden``.
    """
    if not activation.gated:
        return _function(hidden, activation)
    gate, up = _gate_and_up(hidden, interleaved)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return _function(gate, activation) * (up + activation.up_offset if activation.up_offset else up)


def _function(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation.function == "silu":
        return functional.silu(x) if activation.alpha == 1.0 else x * torch.sigmoid(activation.alpha * x)
    if activation.function in ("gelu", "gelu_tanh"):
        return functional.gelu(x, approximate="tanh" if activation.function == "gelu_tanh" else "none")
    return x.relu() if activation.function == "relu" else x.relu().square()


def activate(
    hidden: torch.Tensor, row_weights: torch.Tensor, offsets: torch.Tensor, between: Between = PLAIN
) -> torch.Tensor:
    """Compute ``weight * activation(hidden + bias)`` in float32, or float64 for float64 input, rounded once.

    Args:
        hidden: [R, 2I], gates first or interleaved; [R, I] without gates.
        row_weights: float32 [R], or float64 for float64 input.
        offsets: int32 [L + 1], rows of each expert. The rows of the result from the last on are unspecified.
        between: what to compute.

    Returns:
        [R, I], dtype of ``hidden``.
    """
    if _kernels_take(hidden, row_weights, between):
        return launch.activate_forward(hidden, row_weights, offsets, *between)
    gate, up = _parts(hidden, offsets, between)
    value, _ = _value_and_slope(gate, between.activation)
    return _weighted(value if up is None else value * up, row_weights).to(hidden.dtype)


def activate_backward(
    hidden: torch.Tensor,
    row_weights: torch.Tensor,
    offsets: torch.Tensor,
    grad: torch.Tensor,
    between: Between = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Recompute the result of :func:`activate` and compute the gradients of its inputs.

    Args:
        hidden: as in ``activate``.
        row_weights: as in ``activate``.
        offsets: as in ``activate``.
        grad: [R, I], gradient of the result.
        between: as in ``activate``.

    Returns:
        The result [R, I] again, the gradient of ``hidden`` [R, 2I] or [R, I], and that of ``row_weights`` [R]. Each
        has the dtype of its input. The gradient of ``hidden`` is in the order of ``hidden``. Rows from the last offset
        on are unspecified.
    """
    if _kernels_take(hidden, row_weights, between):
        return launch.activate_backward(hidden, row_weights, offsets, grad, *between)
    activation = between.activation
    gate, up = _parts(hidden, offsets, between)
    value, slope = _value_and_slope(gate, activation)
    grad = grad.to(value.dtype)
    activations = value if up is None else value * up
    grad_weights = (grad * activations).sum(-1).to(row_weights.dtype)
    grad = _weighted(grad, row_weights)
    if up is None:
        grad_hidden = grad * slope
    else:
        grad_gate, grad_up = grad * up * slope, grad * value
        if activation.limit is not None:
            gate, up = _gate_and_up(_biased(hidden, offsets, between), between.interleaved)
            grad_gate = torch.where(gate > activation.limit, 0, grad_gate)
            grad_up = torch.where(up.abs() > activation.limit, 0, grad_up)
        in_turns = between.interleaved
        grad_hidden = torch.stack([grad_gate, grad_up], -1 if in_turns else -2).flatten(-2)
    return _weighted(activations, row_weights).to(hidden.dtype), grad_hidden.to(hidden.dtype), grad_weights


def _parts(hidden: torch.Tensor, offsets: torch.Tensor, between: Between) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return gates and ups as the product takes them: biased, limited, ups with their offset. Without gates, x."""
    hidden, activation = _biased(hidden, offsets, between), between.activation
    if not activation.gated:
        return hidden, None
    gate, up = _gate_and_up(hidden, between.interleaved)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return gate, up + activation.up_offset if activation.up_offset else up


def _biased(hidden: torch.Tensor, offsets: torch.Tensor, between: Between) -> torch.Tensor:
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if between.bias is None:
        return wide
    return wide + between.bias.to(wide.dtype)[experts_of_rows(offsets, len(wide))]


def _gate_and_up(hidden: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if interleaved:
        return hidden[..., 0::2], hidden[..., 1::2]
    gate, up = hidden.chunk(2, -1)
    return gate, up


def _value_and_slope(x: torch.Tensor, activation: Activation) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute f(x) and its derivative."""
    if activation.function == "silu":
        scaled = x if activation.alpha == 1.0 else activation.alpha * x
        sigmoid = torch.sigmoid(scaled)
        return x * sigmoid, sigmoid * (1 + scaled * (1 - sigmoid))
    if activation.function == "gelu":
        below = 0.5 * torch.erfc(x * -math.sqrt(0.5))  # 1 + erf(..) would lose the small ones
        return x * below, below + x * torch.exp(-0.5 * x.square()) / math.sqrt(2 * math.pi)
    if activation.function == "gelu_tanh":
        factor, cubic = GELU_TANH
        below = torch.sigmoid(2 * factor * x * (1 + cubic * x.square()))  # (1 + tanh(u)) / 2
        return x * below, below + x * below * (1 - below) * 2 * factor * (1 + 3 * cubic * x.square())
    positive = x.relu()
    if activation.function == "relu":
        return positive, (x > 0).to(x.dtype)
    return positive.square(), 2 * positive


def _weighted(rows: torch.Tensor, row_weights: torch.Tensor) -> torch.Tensor:
    return rows * row_weights[:, None]


def _kernels_take(hidden: torch.Tensor, row_weights: torch.Tensor, between: Between) -> bool:
    return (
        hidden.is_cuda
        and row_weights.dtype == torch.float32
        and launch.takes(hidden.dtype, hidden.shape[1] // between.activation.rows)
        and (between.bias is None or is_dense(between.bias))
        and torch.cuda.get_device_capability(hidden.device) == HOPPER
    )
