"""How the scales of FP8 rows in fixed places per expert may lie in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenloom.plan import align_up

EXPONENTS_PER_WORD = 4
MANTISSA_BITS = 23
"""A positive float32 that is a power of two has its biased exponent above them, and zeros in them."""


def empty_scales(scale_layout: str, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Make an uninitialised tensor for scales.

    Args:
        scale_layout: "rows", "columns" or "packed", as ``Communicator.dispatch`` takes it.
        shape: experts, places of each, and blocks of a row.
    """
    experts, slots, blocks = shape
    if scale_layout == "rows":
        return torch.empty(experts, slots, blocks, dtype=torch.float32, device=device)
    width, dtype = blocks, torch.float32
    if scale_layout == "packed":
        width, dtype = align_up(blocks, EXPONENTS_PER_WORD) // EXPONENTS_PER_WORD, torch.int32
    return torch.empty(experts, width, slots, dtype=dtype, device=device).transpose(1, 2)


def lay_out_scales(scales: torch.Tensor, scale_layout: str) -> torch.Tensor:
    """Give float32 scales [experts, slots, blocks] the layout asked for.

    Args:
        scale_layout: as :func:`empty_scales` takes it. "packed" keeps the exponents of float32 alone.
    """
    if scale_layout == "rows":
        return scales
    out = empty_scales(scale_layout, scales.shape, scales.device)
    if scale_layout == "columns":
        return out.copy_(scales)
    exponents = scales.contiguous().view(torch.int32) >> MANTISSA_BITS & 0xFF
    padding = out.shape[2] * EXPONENTS_PER_WORD - scales.shape[2]
    exponents = torch.nn.functional.pad(exponents, (0, padding)).unflatten(2, (-1, EXPONENTS_PER_WORD))
    shifts = torch.arange(EXPONENTS_PER_WORD, dtype=torch.int32, device=scales.device) * 8
    return out.copy_((exponents << shifts).sum(3))
