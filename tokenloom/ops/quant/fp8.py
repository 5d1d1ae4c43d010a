"""FP8 (E4M3) with one float32 scale per 128 values, as docs/reference/semantics.md defines it."""

from __future__ import annotations

import torch

from tokenloom.errors import DtypeMismatch, InvalidArgument, ShapeMismatch, require_type
from tokenloom.plan import FP8_BLOCK, RECIPES

E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4
"""Smallest amax in use, so that a block of zeros has a finite scale."""


def quantize_fp8(
    x: torch.Tensor, *, power_of_two_scales: bool = False, recipe: str = "block"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to E4M3 with one scale per 128 values of the last dimension, or one per row.

    ``amax = max(max|x|, 1e-4)``, ``scale = fl(amax / 448)`` and
    ``q = E4M3(clamp(fl(x * fl(448 / amax)), -448, 448))``. All steps are float32 with IEEE division and rounding to
    nearest even. Non-finite input gives unspecified output. Source: docs/reference/semantics.md.

    Args:
        x: bfloat16, float16, float32 or float64 [..., H], H a multiple of 128.
        power_of_two_scales: round each scale up to a power of two and divide x by it.
        recipe: "block", or "row" for one scale of all H values. Weights [E, N, K] then have one for each output
            channel.

    Returns:
        q: float8_e4m3fn [..., H]; scales: float32 [..., H / 128], or [...] with recipe "row". Both are contiguous.
        ``q * scale`` approximates x.

    Raises:
        InvalidArgument: x is no tensor, or the recipe is unknown.
        ShapeMismatch: H is not a multiple of 128.
        DtypeMismatch: x has another dtype.
    """
    require_type("x", x, torch.Tensor, "a torch.Tensor")
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise DtypeMismatch(f"x is {x.dtype}, expected bfloat16, float16, float32 or float64")
    hidden = x.shape[-1] if x.dim() else 1
    if hidden % FP8_BLOCK or (require_recipe(recipe) == "row" and not hidden):
        raise ShapeMismatch(f"x is {list(x.shape)}, expected a last dimension that is a multiple of {FP8_BLOCK}")
    if recipe == "row":
        q, scale = _quantize(_as_float32(x), (-1,), power_of_two_scales)
        return q, scale.squeeze(-1)
    blocks = _as_float32(x).unflatten(-1, (hidden // FP8_BLOCK, FP8_BLOCK))
    q, scale = _quantize(blocks, (-1,), power_of_two_scales)
    return q.flatten(-2), scale.squeeze(-1)


def require_recipe(recipe: object) -> str:
    """Return the name of a recipe, or raise InvalidArgument."""
    if isinstance(recipe, str) and recipe in RECIPES:
        return recipe
    raise InvalidArgument(f"recipe is {recipe!r}, expected one of {', '.join(RECIPES)}")


def quantize_fp8_blocks(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise weights to E4M3 with one scale per 128 x 128 values of the last two dimensions.

    Each block is quantised as ``quantize_fp8`` quantises its blocks of 128.

    Args:
        w: floating point [..., N, K], N and K multiples of 128.

    Returns:
        q: float8_e4m3fn [..., N, K]; scales: float32 [..., N / 128, K / 128]. Both are contiguous.

    Raises:
        InvalidArgument: w is no tensor.
        ShapeMismatch: N or K is not a multiple of 128.
    """
    require_type("w", w, torch.Tensor, "a torch.Tensor")
    if w.dim() < 2 or w.shape[-1] % FP8_BLOCK or w.shape[-2] % FP8_BLOCK:
        raise ShapeMismatch(f"w is {list(w.shape)}, expected [..., N, K] with multiples of {FP8_BLOCK}")
    down, across = w.shape[-2] // FP8_BLOCK, w.shape[-1] // FP8_BLOCK
    blocks = _as_float32(w).unflatten(-1, (across, FP8_BLOCK)).unflatten(-3, (down, FP8_BLOCK))
    q, scale = _quantize(blocks, (-3, -1), False)
    return q.flatten(-4, -3).flatten(-2), scale.squeeze(-1).squeeze(-2)


def quantize_weights(recipe: str, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise weights [..., N, K] with the scales of a recipe: of 128 x 128 values, or of output channels."""
    return quantize_fp8(w, recipe="row") if recipe == "row" else quantize_fp8_blocks(w)


def dequantize_fp8(q: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Multiply FP8 values by their scales in float32, then cast.

    Args:
        q: float8_e4m3fn [..., H].
        scales: float32 [..., H / 128], or [...], one for each row.
        dtype: dtype of the result.

    Returns:
        [..., H] of ``dtype``.

    Raises:
        ShapeMismatch: the scales are neither of rows nor of 128 values of them.
    """
    if scales.dim() < q.dim():
        if scales.shape != q.shape[:-1]:
            raise ShapeMismatch(f"scales is {list(scales.shape)}, expected {list(q.shape[:-1])}: one for each row")
        return (q.float() * scales.unsqueeze(-1)).to(dtype)
    of_blocks = [*q.shape[:-1], q.shape[-1] // FP8_BLOCK]
    if list(scales.shape) != of_blocks or q.shape[-1] % FP8_BLOCK:
        raise ShapeMismatch(
            f"scales is {list(scales.shape)}, expected {of_blocks}, one for {FP8_BLOCK} values of a row, or "
            f"{of_blocks[:-1]}, one for each row"
        )
    blocks = q.float().unflatten(-1, (scales.shape[-1], FP8_BLOCK))
    return (blocks * scales.unsqueeze(-1)).flatten(-2).to(dtype)


def _as_float32(values: torch.Tensor) -> torch.Tensor:
    """In the order of their dimensions, so that results are contiguous whatever the strides."""
    return values.detach().float().contiguous()


def _quantize(
    blocks: torch.Tensor, dims: tuple[int, ...], power_of_two_scales: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise float32 values whose blocks lie along ``dims``. Scales have size 1 there."""
    amax = blocks.abs().amax(dims, keepdim=True).clamp_min(AMAX_FLOOR)
    # Torch gives the IEEE quotient only for two tensors. For number / tensor, and on GPUs for tensor / number, it
    # multiplies by a reciprocal, which rounds twice.
    limit = torch.full_like(amax, E4M3_MAX)
    scale = amax / limit
    if power_of_two_scales:
        scale = _power_of_two_above(scale)
        scaled = blocks / scale
    else:
        scaled = blocks * (limit / amax)  # not by 1 / scale, which would round twice
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def _power_of_two_above(scale: torch.Tensor) -> torch.Tensor:
    """Round up to a power of two, on the float32 bits. ``scale`` must be positive and normal."""
    mantissa_mask, exponent_mask = 0x007FFFFF, 0x7F800000
    return ((scale.view(torch.int32) + mantissa_mask) & exponent_mask).view(torch.float32)
