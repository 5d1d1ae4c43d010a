"""FP8 (E4M3) with one float32 scale per 128 values, as docs/reference/semantics.md defines it."""

from __future__ import annotations

import torch

from tokenloom.errors import DtypeMismatch, ShapeMismatch
from tokenloom.plan import FP8_BLOCK

E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4
"""Smallest amax that is used, so that a block of zeros has a finite scale."""


def quantize_fp8(x: torch.Tensor, *, power_of_two_scales: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to E4M3 with one scale per 128 values of the last dimension.

    ``amax = max(max|x|, 1e-4)``; ``scale = fl(amax / 448)``;
    ``q = E4M3(clamp(fl(x * fl(448 / amax)), -448, 448))``, all in float32 with IEEE division and
    round to nearest even. With ``power_of_two_scales`` the scale is rounded up to a power of two and x is
    divided by it. Non-finite input gives unspecified output.

    Args:
        x: [..., H], floating point, H a multiple of 128.

    Returns:
        q: float8_e4m3fn [..., H]; scales: float32 [..., H / 128]; ``q * scale`` is near x.

    Raises:
        ShapeMismatch: H is not a multiple of 128.
        DtypeMismatch: x is not bfloat16, float16, float32 or float64.
    """
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise DtypeMismatch(f"quantize_fp8 takes bfloat16, float16, float32 or float64, got {x.dtype}")
    hidden = x.shape[-1]
    if hidden % FP8_BLOCK:
        raise ShapeMismatch(f"quantize_fp8 needs a last dimension that is a multiple of {FP8_BLOCK}, got {hidden}")
    blocks = x.detach().float().unflatten(-1, (hidden // FP8_BLOCK, FP8_BLOCK))
    q, scale = _quantize(blocks, (-1,), power_of_two_scales)
    return q.flatten(-2), scale.squeeze(-1)


def quantize_fp8_blocks(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise weights to E4M3 with one scale per 128 x 128 values of the last two dimensions.

    Each block is quantised as ``quantize_fp8`` quantises its blocks of 128.

    Args:
        w: [..., N, K], floating point, N and K multiples of 128.

    Returns:
        q: float8_e4m3fn [..., N, K]; scales: float32 [..., N / 128, K / 128].

    Raises:
        ShapeMismatch: N or K is not a multiple of 128.
    """
    if w.dim() < 2 or w.shape[-1] % FP8_BLOCK or w.shape[-2] % FP8_BLOCK:
        raise ShapeMismatch(f"w is {list(w.shape)}, expected [..., N, K] with multiples of {FP8_BLOCK}")
    down, across = w.shape[-2] // FP8_BLOCK, w.shape[-1] // FP8_BLOCK
    blocks = w.detach().float().unflatten(-1, (across, FP8_BLOCK)).unflatten(-3, (down, FP8_BLOCK))
    q, scale = _quantize(blocks, (-3, -1), False)
    return q.flatten(-4, -3).flatten(-2), scale.squeeze(-1).squeeze(-2)


def dequantize_fp8(q: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``q * scale``, computed in float32, then cast.

    Args:
        q: float8_e4m3fn [..., H].
        scales: float32 [..., H / 128].
    """
    blocks = q.float().unflatten(-1, (scales.shape[-1], FP8_BLOCK))
    return (blocks * scales.unsqueeze(-1)).flatten(-2).to(dtype)


def _quantize(
    blocks: torch.Tensor, dims: tuple[int, ...], power_of_two_scales: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of float32 values, and the scale of each block, which lies along ``dims``; those have size 1 in it."""
    amax = blocks.abs().amax(dims, keepdim=True).clamp_min(AMAX_FLOOR)
    # Tensors on both sides, for the IEEE quotient: torch computes number / tensor, and on GPUs tensor / number too, as
    # a product with a reciprocal, which rounds twice.
    limit = torch.full_like(amax, E4M3_MAX)
    scale = amax / limit
    if power_of_two_scales:
        scale = _power_of_two_above(scale)
        scaled = blocks / scale
    else:
        scaled = blocks * (limit / amax)  # not by 1 / scale, which would round twice
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def _power_of_two_above(scale: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is >= scale, on the float32 bits (scale is positive and normal)."""
    mantissa_mask, exponent_mask = 0x007FFFFF, 0x7F800000
    return ((scale.view(torch.int32) + mantissa_mask) & exponent_mask).view(torch.float32)
