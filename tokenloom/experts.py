"""SwiGLU experts on rows grouped by expert."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

GROUPED_MM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUPED_MM_ALIGNMENT_BYTES = 16
"""``grouped_mm`` takes row strides that are multiples of this."""


def swiglu_experts(
    rows: torch.Tensor, expert_offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """``w2 @ (silu(gate) * up)`` per expert, with ``gate, up = w1 @ row``. Differentiable.

    Args:
        rows: [R, H], expert e's rows at ``expert_offsets[e]:expert_offsets[e + 1]``; R may exceed the last offset.
        expert_offsets: int32 [L + 1], ascending.
        w1: [L, 2I, H], gate rows 0..I-1, then up rows.
        w2: [L, H, I].

    Returns:
        [R, H], dtype of ``rows``; rows beyond the last offset are unspecified.
    """
    matmul = _grouped_mm if _grouped_mm_takes(rows, w1, w2) else _loop_mm
    return matmul(swiglu(matmul(rows, w1, expert_offsets)), w2, expert_offsets)


def swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    """[..., 2I] -> [..., I]: silu of the first half times the second."""
    gate, up = gate_and_up.chunk(2, -1)
    return functional.silu(gate) * up


def _grouped_mm_takes(rows: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> bool:
    """Whether torch's grouped GEMM accepts these; it refuses float64 and rows that are not 16-byte multiples."""
    if rows.dtype not in GROUPED_MM_DTYPES or not rows.dtype == w1.dtype == w2.dtype:
        return False
    if rows.is_cuda and rows.dtype != torch.bfloat16:
        return False
    widths = (w1.shape[2], w1.shape[1], w2.shape[2])
    return all(width * rows.element_size() % GROUPED_MM_ALIGNMENT_BYTES == 0 for width in widths)


def _grouped_mm(rows: torch.Tensor, weights: torch.Tensor, expert_offsets: torch.Tensor) -> torch.Tensor:
    out = functional.grouped_mm(rows, weights.transpose(1, 2), offs=expert_offsets[1:])
    return _ContiguousGrad.apply(out)


def _loop_mm(rows: torch.Tensor, weights: torch.Tensor, expert_offsets: torch.Tensor) -> torch.Tensor:
    ends = expert_offsets.tolist()
    parts = [functional.linear(rows[ends[e] : ends[e + 1]], weights[e]) for e in range(len(weights))]
    parts.append(rows.new_zeros(rows.shape[0] - ends[-1], weights.shape[1]))
    return torch.cat(parts)


class _ContiguousGrad(torch.autograd.Function):
    """Identity whose gradient is contiguous: grouped_mm's backward refuses expanded ones, as ``sum()`` gives."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.contiguous()
