"""SwiGLU experts on rows grouped by expert, which save little for backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tokenloom.errors import ShapeMismatch
from tokenloom.ops.activation import activate, activate_backward
from tokenloom.ops.autocast import autocast_dtype
from tokenloom.runtime.streams import on_stream

FEW_ROWS = 1024
"""An expert's, up to which one launch for all experts is faster than one for each."""
GROUPED_MM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUPED_MM_ALIGNMENT_BYTES = 16
"""``grouped_mm`` takes row strides that are multiples of this."""


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
        host_offsets: ``expert_offsets`` where they are known on the host, which then picks faster gemms.

    Returns:
        [R, H], dtype of ``rows`` (of autocast, where that is on); rows beyond the last offset are unspecified.

    Raises:
        ShapeMismatch: row_weights is not [R].
    """
    dtype = autocast_dtype(rows.device)
    if dtype is not None:
        rows, w1, w2 = (tensor.to(dtype) for tensor in (rows, w1, w2))
    if row_weights is not None:
        if row_weights.shape != rows.shape[:1]:
            raise ShapeMismatch(f"row_weights is {list(row_weights.shape)}, expected [{len(rows)}]: one for each row")
        row_weights = row_weights.contiguous()
    else:
        row_weights = rows.new_ones(len(rows), dtype=torch.promote_types(rows.dtype, torch.float32))
    with torch.autocast(rows.device.type, enabled=False):
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
        ctx.gemms = gemms = gemms_for(rows, w1, w2, offsets, host_offsets)
        hidden = gemms.by_weights(rows, w1.transpose(1, 2))
        ctx.save_for_backward(rows, offsets, w1, w2, row_weights, hidden)
        return gemms.by_weights(activate(hidden, row_weights, offsets[-1:]), w2.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows, offsets, w1, w2, row_weights, hidden = ctx.saved_tensors
        gemms, grad = ctx.gemms, grad.contiguous()
        wants_rows, _, wants_w1, wants_w2, wants_weights, _ = ctx.needs_input_grad
        grad_activations = gemms.by_weights(grad, w2)
        activations, grad_hidden, grad_weights = activate_backward(hidden, row_weights, offsets[-1:], grad_activations)
        grad_rows = gemms.by_weights(grad_hidden, w1) if wants_rows else None
        grad_w1 = gemms.of_weights(grad_hidden, rows) if wants_w1 else None
        grad_w2 = gemms.of_weights(grad, activations) if wants_w2 else None
        return grad_rows, None, grad_w1, grad_w2, grad_weights if wants_weights else None, None


class ExpertGemms(Protocol):
    """GEMMs over rows that are grouped by expert; where the groups are is known since it was made."""

    def by_weights(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[R, k], [L, k, n] -> [R, n]: each group's rows times its weights; unspecified where no group is."""

    def of_weights(self, left: torch.Tensor, right: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
        """[R, n], [R, k] -> [L, n, k]: for each group the sum of its rows' outer gemms, added to ``total``."""


class _GroupedGemms:
    def __init__(self, offsets: torch.Tensor) -> None:
        self._ends = offsets[1:]

    def by_weights(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return functional.grouped_mm(rows, weights, offs=self._ends)

    def of_weights(self, left: torch.Tensor, right: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
        found = functional.grouped_mm(left.t(), right, offs=self._ends)
        return found if total is None else total.add_(found)


class _ExpertByExpert:
    """One product after the other; on GPUs half of them on a second stream, so that those that have begun late,
    because others had taken some SMs, keep no SM idle."""

    def __init__(self, ends: list[int]) -> None:
        self._end = ends[-1]
        self._counts = [end - begin for begin, end in pairwise(ends)]

    def by_weights(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty(len(rows), weights.shape[2])
        if len(out) > self._end:
            out[self._end :].zero_()
        self._for_each(torch.mm, self._parts(rows), weights.unbind(), self._parts(out))
        return out

    def of_weights(self, left: torch.Tensor, right: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
        out = total
        if out is None:
            out = left.new_empty(len(self._counts), left.shape[1], right.shape[1])
        lefts = left[: self._end].t().split(self._counts, 1)
        self._for_each(torch.mm if total is None else _add_mm, lefts, self._parts(right), out.unbind())
        return out

    def _parts(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return rows[: self._end].split(self._counts)

    @staticmethod
    def _for_each(multiply: Callable[..., object], *operands: tuple[torch.Tensor, ...]) -> None:
        """``multiply(left, right, out=out)`` of each expert. The host does little for one, for small ones are fast."""
        gemms, device = list(zip(*operands, strict=True)), operands[-1][0].device
        if device.type != "cuda":
            for left, right, out in gemms:
                multiply(left, right, out=out)
            return
        streams = (torch.cuda.current_stream(device), _second_stream(device))
        streams[1].wait_stream(streams[0])
        try:
            for number, stream in enumerate(streams):
                with on_stream(stream):
                    for left, right, out in gemms[number::2]:
                        multiply(left, right, out=out)
        finally:  # whoever reuses the operands' memory comes behind both
            streams[0].wait_stream(streams[1])


def _add_mm(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    out.addmm_(left, right)


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def gemms_for(
    rows: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    offsets: torch.Tensor,
    host_offsets: list[int] | None = None,
) -> ExpertGemms:
    """How the rows of each expert are multiplied.

    Args:
        rows: [R, H]; w1: [L, 2I, H]; w2: [L, H, I]. offsets: int32 [L + 1], as for swiglu_experts.
        host_offsets: the same where they are known on the host, or None.
    """
    many = rows.is_cuda and host_offsets is not None and len(rows) >= FEW_ROWS * len(w1)
    if _grouped_mm_takes(rows, w1, w2) and not many:
        return _GroupedGemms(offsets)
    return _ExpertByExpert(offsets.tolist() if host_offsets is None else host_offsets)


def _grouped_mm_takes(rows: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> bool:
    """Whether torch's grouped GEMM accepts these; it refuses float64 and rows that are not 16-byte multiples."""
    if rows.dtype not in GROUPED_MM_DTYPES or not rows.dtype == w1.dtype == w2.dtype:
        return False
    if rows.is_cuda and rows.dtype != torch.bfloat16:
        return False
    widths = (w1.shape[2], w1.shape[1], w2.shape[2])
    return all(width * rows.element_size() % GROUPED_MM_ALIGNMENT_BYTES == 0 for width in widths)
