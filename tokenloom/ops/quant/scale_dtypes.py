"""Dtypes that scales of weights have in checkpoints."""

from __future__ import annotations

import torch

from tokenloom.errors import DeviceMismatch, DtypeMismatch, InvalidArgument, require_type
from tokenloom.ops.quant.scale_layouts import MANTISSA_BITS

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8)
"""Of scales of weights. uint8 holds the bytes of float8_e8m0fnu."""
E8M0_NAN = 0xFF


def require_scales(name: str, scales: torch.Tensor, w: torch.Tensor) -> None:
    """Raise an error unless the scales are a tensor of a dtype that checkpoints have, on the device of w.

    Args:
        name: of w; that of the scales has ``_scales`` behind it.
    """
    require_type(f"{name}_scales", scales, torch.Tensor, "a torch.Tensor")
    if scales.dtype not in SCALE_DTYPES:
        raise DtypeMismatch(
            f"{name}_scales is {scales.dtype}, expected float32, bfloat16 or float16, or float8_e8m0fnu or uint8 for "
            "E8M0"
        )
    if scales.device != w.device:
        raise DeviceMismatch(f"{name}_scales is on {scales.device}, expected {w.device}, where {name} is")


def widen_scales(name: str, scales: torch.Tensor) -> torch.Tensor:
    """Widen scales to float32, which is exact.

    Raises:
        InvalidArgument: a scale is NaN in E8M0.
    """
    if scales.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return scales.float()
    exponents = scales.view(torch.uint8).to(torch.int32)
    if (exponents == E8M0_NAN).any():
        raise InvalidArgument(f"{name} has the byte {E8M0_NAN}, which is NaN in E8M0")
    # The exponents of float32 have the same bias, but 0 is for subnormals there: 2**-127 is half the smallest normal.
    bits = torch.where(exponents > 0, exponents << MANTISSA_BITS, 1 << MANTISSA_BITS - 1)
    return bits.view(torch.float32)
