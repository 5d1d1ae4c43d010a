"""Experts on rows grouped by expert, with little saved for backward: products, biases and what lies between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tokenloom.errors import DeviceMismatch, DtypeMismatch, InvalidArgument, ShapeMismatch
from tokenloom.kernels.common import is_dense
from tokenloom.ops.activation import Between, activate, activate_backward
from tokenloom.ops.autocast import autocast_dtype
from tokenloom.ops.bias import add_bias, dot_bias, is_watched, sum_rows
from tokenloom.ops.expert_gemms import ExpertGemms, gemms_for
from tokenloom.plan import PLAIN_WEIGHTS, SWIGLU, Activation, WeightLayout

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""w1, w2, the bias of w1 and that of w2, as they were given."""


@dataclass(frozen=True)
class ExpertForm:
    """What the experts of a layer compute, and how their weights lie."""

    activation: Activation = SWIGLU
    layout: WeightLayout = PLAIN_WEIGHTS

    def __post_init__(self) -> None:
        if not isinstance(self.layout, WeightLayout):
            raise InvalidArgument(f"weight_layout is {self.layout!r}, expected a WeightLayout")
        if self.layout.interleaved and not self.activation.gated:
            raise InvalidArgument("interleaved weights have gates and ups, but the activation is not gated")

    def shapes(self, num_experts: int, hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of w1, w2 and their biases."""
        rows = self.activation.rows * intermediate
        w1, w2 = (num_experts, rows, hidden), (num_experts, hidden, intermediate)
        if self.layout.transposed:
            w1, w2 = (num_experts, hidden, rows), (num_experts, intermediate, hidden)
        return {"w1": w1, "w2": w2, "w1_bias": (num_experts, rows), "w2_bias": (num_experts, hidden)}

    def check(self, tensors: Tensors, num_experts: int, hidden: int) -> None:
        """Raise an error unless the tensors fit the form, each other, ``num_experts`` and ``hidden``.

        Raises:
            ShapeMismatch, DtypeMismatch, DeviceMismatch: one does not.
        """
        w1, w2, *_ = tensors
        if w2.dim() != 3:
            raise ShapeMismatch(f"w2 is {list(w2.shape)}, expected three dimensions: experts, hidden, intermediate")
        intermediate = w2.shape[1 if self.layout.transposed else 2]
        for (name, shape), tensor in zip(self.shapes(num_experts, hidden, intermediate).items(), tensors, strict=True):
            if tensor is None:
                continue
            if tensor.shape != shape:
                raise ShapeMismatch(
                    f"{name} is {list(tensor.shape)}, expected {list(shape)}: {num_experts} experts here, hidden "
                    f"{hidden}, intermediate {intermediate} as w2 has it, {self}"
                )
            if tensor.dtype != w1.dtype:
                raise DtypeMismatch(f"{name} is {tensor.dtype}, w1 is {w1.dtype}; cast one of them")
            if tensor.device != w1.device:
                raise DeviceMismatch(f"{name} is on {tensor.device}, w1 is on {w1.device}; move one of them")


PLAIN = ExpertForm()


class Experts:
    """A rank's experts: tensors, form, and the computations of forward and backward.

    Args:
        tensors: weights and biases.
        form: what they compute and how they lie.
    """

    def __init__(self, tensors: Tensors, form: ExpertForm = PLAIN) -> None:
        self.tensors, self.form = tensors, form
        self.w1, self.w2, self.w1_bias, self.w2_bias = tensors
        if form.layout.transposed:
            self.w1, self.w2 = self.w1.transpose(1, 2), self.w2.transpose(1, 2)

    def gemms(self, rows: torch.Tensor, offsets: torch.Tensor, host_offsets: list[int] | None) -> ExpertGemms:
        """Choose how the rows of each expert are multiplied."""
        return gemms_for(rows, self.w1, self.w2, offsets, host_offsets)

    def forward(
        self, gemms: ExpertGemms, rows: torch.Tensor, row_weights: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute ``weight * (w2 @ activation + w2_bias)`` for each row.

        Returns:
            ``w1 @ row`` [R, 2I], or [R, I] without gates, for backward; and the result [R, H].
        """
        hidden = gemms.multiply(rows, self.w1.transpose(1, 2))
        y = gemms.multiply(activate(hidden, row_weights, offsets, self._between()), self.w2.transpose(1, 2))
        if self.w2_bias is not None:
            if is_watched():  # selective checkpointing may keep what a GEMM gave
                y = y.clone()
            add_bias(y, row_weights, offsets, self.w2_bias)
        return hidden, y

    def backward(
        self,
        gemms: ExpertGemms,
        hidden: torch.Tensor,
        row_weights: torch.Tensor,
        offsets: torch.Tensor,
        grad: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the weighted activations again, the gradient of ``hidden`` and that of the rows' weights.

        Args:
            gemms: those of forward.
            hidden: from forward.
            row_weights: as in forward.
            offsets: as in forward.
            grad: [R, H], contiguous.
        """
        found = activate_backward(hidden, row_weights, offsets, gemms.multiply(grad, self.w2), self._between())
        if self.w2_bias is not None:
            dot_bias(found[2], grad, offsets, self.w2_bias)
        return found

    def _between(self) -> Between:
        return Between(self.form.activation, self.form.layout.interleaved, self.w1_bias)

    def grad_rows(self, gemms: ExpertGemms, grad_hidden: torch.Tensor) -> torch.Tensor:
        """Compute the gradient of the rows, [R, H]."""
        return gemms.multiply(grad_hidden, self.w1)

    def grad_w1(
        self, gemms: ExpertGemms, grad_hidden: torch.Tensor, rows: torch.Tensor, total: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the gradient of w1 in its layout, added to ``total`` if given."""
        return self._weight_gradient(gemms, grad_hidden, rows, total)

    def grad_w2(
        self, gemms: ExpertGemms, grad: torch.Tensor, activations: torch.Tensor, total: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the gradient of w2 in its layout, added to ``total`` if given."""
        return self._weight_gradient(gemms, grad, activations, total)

    def _weight_gradient(
        self, gemms: ExpertGemms, left: torch.Tensor, right: torch.Tensor, total: torch.Tensor | None
    ) -> torch.Tensor:
        if self.form.layout.transposed:
            left, right = right, left
        return gemms.weight_gradient(left, right, total)

    @staticmethod
    def grad_w1_bias(gemms: ExpertGemms, grad_hidden: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
        """Sum the gradients of each expert's pre-activations, [L, 2I], added to ``total`` if given."""
        return sum_rows(gemms, grad_hidden, None, total)

    @staticmethod
    def grad_w2_bias(
        gemms: ExpertGemms, grad: torch.Tensor, row_weights: torch.Tensor, total: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sum each expert's weighted gradients, [L, H], added to ``total`` if given."""
        return sum_rows(gemms, grad, row_weights, total)


def run_experts(
    rows: torch.Tensor,
    expert_offsets: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    row_weights: torch.Tensor | None = None,
    host_offsets: list[int] | None = None,
    *,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation: Activation | str = SWIGLU,
    weight_layout: WeightLayout = PLAIN_WEIGHTS,
) -> torch.Tensor:
    """Compute ``weight * (w2 @ a + w2_bias)`` with each row's expert, where ``a = activation(w1 @ row + w1_bias)``.

    Differentiable once. Backward needs only ``rows`` and the products ``w1 @ row``: it recomputes the activations.
    The gradient of a row's weight is the dot product of its unweighted activations with their gradient, so outputs
    are not saved. Activations are computed in float32 (float64 for float64 input), weighted, then rounded once.

    Args:
        rows: [R, H], expert e's rows at ``expert_offsets[e]:expert_offsets[e + 1]``. R may exceed the last offset.
        expert_offsets: int32 [L + 1], ascending.
        w1: [L, 2I, H], gate rows 0..I-1, then up rows; [L, I, H] where the activation is not gated.
        w2: [L, H, I].
        row_weights: [R], or None for ones.
        host_offsets: values of ``expert_offsets`` where the host knows them, which allows faster GEMMs. Else None.
        w1_bias: [L, 2I] in the order of w1's rows ([L, I] where the activation is not gated), or None.
        w2_bias: [L, H], or None.
        activation: what lies between the products.
        weight_layout: how w1, w2 and w1_bias lie, where it is not as above.

    Returns:
        [R, H], dtype of ``rows``, or of autocast where that is on. Rows beyond the last offset are unspecified, and so
        are their gradients.

    Raises:
        InvalidArgument: the activation is unknown, or has no gates though the layout interleaves them.
        ShapeMismatch, DtypeMismatch, DeviceMismatch: a tensor is not as above.
    """
    form = ExpertForm(Activation.of(activation), weight_layout)
    if expert_offsets.dtype != torch.int32:
        raise DtypeMismatch(f"expert_offsets is {expert_offsets.dtype}, expected torch.int32")
    dtype = autocast_dtype(rows.device)
    tensors: Tensors = (w1, w2, w1_bias, w2_bias)
    if dtype is not None:
        rows, tensors = rows.to(dtype), cast(tensors, dtype)
    form.check(tensors, len(expert_offsets) - 1, rows.shape[1])
    if rows.dtype != tensors[0].dtype:
        raise DtypeMismatch(f"rows are {rows.dtype}, w1 is {w1.dtype}; cast rows to {w1.dtype}")
    if row_weights is not None:
        if row_weights.shape != rows.shape[:1]:
            raise ShapeMismatch(f"row_weights is {list(row_weights.shape)}, expected [{len(rows)}]: one for each row")
        row_weights = row_weights.contiguous()
    else:
        row_weights = rows.new_ones(len(rows), dtype=torch.promote_types(rows.dtype, torch.float32))
    with torch.autocast(rows.device.type, enabled=False):
        return _RunExperts.apply(rows, row_weights, *tensors, expert_offsets, host_offsets, form)


def cast(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Convert weights and biases, which keep their layout."""
    w1, w2, w1_bias, w2_bias = (None if tensor is None else tensor.to(dtype) for tensor in tensors)
    assert w1 is not None
    assert w2 is not None
    return w1, w2, w1_bias, w2_bias


class _RunExperts(torch.autograd.Function):
    saved_names = ("rows", "row weights", "offsets", "pre-activations", "w1", "w2", "w1 bias", "w2 bias")

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        row_weights: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        w1_bias: torch.Tensor | None,
        w2_bias: torch.Tensor | None,
        offsets: torch.Tensor,
        host_offsets: list[int] | None,
        form: ExpertForm,
    ) -> torch.Tensor:
        experts, ctx.form = Experts((w1, w2, w1_bias, w2_bias), form), form
        ctx.gemms = gemms = experts.gemms(rows, offsets, host_offsets)
        hidden, y = experts.forward(gemms, rows, row_weights, offsets)
        ctx.save_for_backward(rows, row_weights, offsets, hidden, *experts.tensors)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows, row_weights, offsets, hidden, *tensors = ctx.saved_tensors
        experts, gemms = Experts(tuple(tensors), ctx.form), ctx.gemms
        grad = grad.contiguous()
        if not is_dense(grad):  # part of a larger gradient, which begins anywhere
            grad = grad.clone()
        wants_rows, wants_weights, wants_w1, wants_w2, wants_w1_bias, wants_w2_bias, *_ = ctx.needs_input_grad
        activations, grad_hidden, grad_weights = experts.backward(gemms, hidden, row_weights, offsets, grad)
        return (
            experts.grad_rows(gemms, grad_hidden) if wants_rows else None,
            grad_weights if wants_weights else None,
            experts.grad_w1(gemms, grad_hidden, rows) if wants_w1 else None,
            experts.grad_w2(gemms, grad, activations) if wants_w2 else None,
            experts.grad_w1_bias(gemms, grad_hidden) if wants_w1_bias else None,
            experts.grad_w2_bias(gemms, grad, row_weights) if wants_w2_bias else None,
            None,
            None,
            None,
        )
