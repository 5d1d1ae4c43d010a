"""Biases of experts' second products on rows grouped by expert, and sums of rows for the gradients of biases.

On Hopper GPUs a bias takes one kernel each way, elsewhere torch.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tokenloom.kernels.bias import launch
from tokenloom.kernels.common import HOPPER, is_dense
from tokenloom.ops.expert_gemms import GROUPED_MM_ALIGNMENT_BYTES, ExpertGemms
from tokenloom.ops.offsets import experts_of_rows


def is_watched() -> bool:
    """Whether a dispatch mode sees operations now, and may keep their results. They may not change then."""
    return _get_current_dispatch_mode() is not None


def add_bias(y: torch.Tensor, row_weights: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor) -> None:
    """Add ``weight * bias`` of each row's expert to the row, in place, rounded once.

    Computes in float32, or float64 beside float64.

    Args:
        y: [R, H].
        row_weights: float32 or float64 [R].
        offsets: int32 [L + 1].
        bias: [L, H], dtype of y.
    """
    if _kernels_take(y, row_weights, bias):
        launch.add_bias(y, row_weights, offsets, bias)
        return
    terms = row_weights[:, None] * bias.to(row_weights.dtype)[experts_of_rows(offsets, len(y))]
    y.copy_(terms.add_(y))


def dot_bias(totals: torch.Tensor, grad: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor) -> None:
    """Add the dot product of each row of ``grad`` with its expert's bias to ``totals``, in place.

    Args:
        totals: float32 or float64 [R].
        grad: [R, H].
        offsets: int32 [L + 1].
        bias: [L, H], dtype of grad.
    """
    if _kernels_take(grad, totals, bias):
        launch.dot_bias(totals, grad, offsets, bias)
        return
    bias_of_row = bias.to(totals.dtype)[experts_of_rows(offsets, len(grad))]
    totals.add_(bias_of_row.mul_(grad).sum(-1))


def sum_rows(
    gemms: ExpertGemms, rows: torch.Tensor, row_weights: torch.Tensor | None, total: torch.Tensor | None
) -> torch.Tensor:
    """Sum each expert's rows, weighted or not, as a GEMM with one column per factor.

    A weight of more bits than the rows have goes as the sum of two numbers of theirs.

    Args:
        gemms: those of the rows.
        rows: [R, n].
        row_weights: float32 or float64 [R], or None for ones.
        total: [L, n] to add to, or None.

    Returns:
        [L, n], dtype of ``rows``.
    """
    factors = rows.new_zeros(len(rows), GROUPED_MM_ALIGNMENT_BYTES // rows.element_size())
    if row_weights is None:
        factors[:, 0] = 1
    else:
        factors[:, 0] = row_weights
        factors[:, 1] = row_weights - factors[:, 0]
    found = gemms.weight_gradient(factors, rows)[:, :2].sum(1)
    return found if total is None else total.add_(found)


def _kernels_take(rows: torch.Tensor, row_weights: torch.Tensor, bias: torch.Tensor) -> bool:
    return (
        rows.is_cuda
        and row_weights.dtype == torch.float32
        and launch.takes(rows.dtype, rows.shape[1])
        and is_dense(bias)
        and is_dense(rows)
        and torch.cuda.get_device_capability(rows.device) == HOPPER
    )
