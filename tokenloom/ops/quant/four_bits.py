"""Four-bit weights of checkpoints, and their re-encoding as FP8."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tokenloom.errors import DtypeMismatch, InvalidArgument, ShapeMismatch, require_type
from tokenloom.ops.quant.fp8 import E4M3_MAX, quantize_weights
from tokenloom.ops.quant.scale_dtypes import require_scales, widen_scales
from tokenloom.plan import FP8_BLOCK

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of E2M1, by the code without its sign, which is the fourth bit."""
VALUES: dict[str, tuple[float, ...]] = {
    "e2m1": (*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)),
    "int4": (*map(float, range(8)), *map(float, range(-8, 0))),
    "offset_int4": tuple(map(float, range(-8, 8))),
}
NIBBLES = ("low_first", "high_first")
GROUPS = (16, 32, 64, 128)
PACKED_DTYPES = (torch.uint8, torch.int8, torch.int32)


@dataclass(frozen=True)
class FourBits:
    """How four-bit weights lie in a checkpoint.

    Attributes:
        values: "e2m1", as in MXFP4; "int4", two's complement; or "offset_int4", codes that are 8 above their values.
        group: values along K that share a scale: 16, 32, 64 or 128.
        nibbles: which half of a byte comes first, "low_first" or "high_first". Words are little-endian.

    Raises:
        InvalidArgument: an attribute is not as above.
    """

    values: str = "e2m1"
    group: int = 32
    nibbles: str = "low_first"

    def __post_init__(self) -> None:
        for name, known in (("values", tuple(VALUES)), ("group", GROUPS), ("nibbles", NIBBLES)):
            if getattr(self, name) not in known:
                expected = ", ".join(map(str, known))
                raise InvalidArgument(f"{name} is {getattr(self, name)!r}, expected one of {expected}")


MXFP4 = FourBits()
"""E2M1 in groups of 32, low halves of bytes first, as gpt-oss and DeepSeek-V4 have it."""


def check_four_bits(
    name: str, w: torch.Tensor, w_scales: torch.Tensor | None, four_bits: FourBits, multiple: int = 1
) -> list[int]:
    """Raise an error unless these are packed weights with scales, as ``weights_for`` takes them.

    Args:
        multiple: N and K are multiples of it, and of the values that share a scale.

    Returns:
        Shape of the values, [E, N, K].
    """
    require_type("four_bits", four_bits, FourBits, "a FourBits, such as tl.MXFP4")
    require_type(name, w, torch.Tensor, "a torch.Tensor")
    if w.dtype not in PACKED_DTYPES:
        raise DtypeMismatch(f"{name} is {w.dtype}, expected uint8, int8 or int32, which hold values of four bits")
    if w_scales is None:
        raise ShapeMismatch(f"{name} has values of four bits, expected {name}_scales too")
    require_scales(name, w_scales, w)
    held, group = 2 * w.itemsize, four_bits.group  # values in an item, and in a group
    by_group = w.dim() == 4 and w.shape[3] * held == group
    if w.dim() != 3 and not by_group:
        raise ShapeMismatch(
            f"{name} is {list(w.shape)} of {w.dtype}, expected [E, N, K / {held}] or "
            f"[E, N, K / {group}, {group // held}]"
        )
    experts, channels, depth = w.shape[0], w.shape[1], w.shape[2] * (group if by_group else held)
    multiple = max(multiple, group)
    if not w.numel() or channels % multiple or depth % multiple:
        raise ShapeMismatch(
            f"{name} is {list(w.shape)} of {w.dtype}, which is {experts} experts of {channels} x {depth} values; "
            f"expected multiples of {multiple}, and not of 0 experts"
        )
    expected = [experts, channels, depth // group]
    if list(w_scales.shape) != expected:
        raise ShapeMismatch(
            f"{name}_scales is {list(w_scales.shape)}, expected {expected}: one for {group} values of a channel"
        )
    return [experts, channels, depth]


def unpack_four_bits(packed: torch.Tensor, four_bits: FourBits) -> torch.Tensor:
    """Look up the values that packed items hold.

    Args:
        packed: uint8, int8 or int32 [..., n], contiguous.

    Returns:
        float32 [..., 2 * bytes of n].
    """
    octets = packed.view(torch.uint8)
    halves = (octets & 15, octets >> 4)
    codes = torch.stack(halves if four_bits.nibbles == "low_first" else halves[::-1], -1).flatten(-2)
    return torch.tensor(VALUES[four_bits.values], device=packed.device)[codes.int()]


def _in_groups(packed: torch.Tensor, four_bits: FourBits) -> torch.Tensor:
    """Look up one expert's values, float32 [N, groups, group]."""
    return unpack_four_bits(packed.contiguous(), four_bits).flatten(1).unflatten(1, (-1, four_bits.group))


def dequantize_four_bits(
    w: torch.Tensor, w_scales: torch.Tensor, four_bits: FourBits, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Multiply four-bit weights by their scales in float32, then cast. In bfloat16 this is exact for MXFP4.

    Args:
        w: uint8, int8 or int32 [E, N, K / n], n values in an item, or [E, N, K / group, group / n].
        w_scales: [E, N, K / group] with the dtypes of ``weights_for``.
        four_bits: how w holds the values, such as ``MXFP4``.
        dtype: of the result.

    Returns:
        [E, N, K].

    Raises:
        ShapeMismatch, DtypeMismatch, DeviceMismatch: a tensor is not as above.
    """
    shape = check_four_bits("w", w, w_scales, four_bits)
    found = torch.empty(shape, dtype=dtype, device=w.device)
    for values, packed, of_groups in zip(found, w.detach(), w_scales.detach(), strict=True):  # one is wide at a time
        wide = _in_groups(packed, four_bits) * widen_scales("w_scales", of_groups)[..., None]
        values.copy_(wide.flatten(1))
    return found


def encode_as_fp8(
    recipe: str, name: str, w: torch.Tensor, w_scales: torch.Tensor, four_bits: FourBits
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encode checked four-bit weights as FP8, expert by expert.

    Scales that are powers of two make exact products, as far as E4M3 reaches: a channel or a block gets the largest of
    its scales, over the power of two that makes E4M3's largest codes of the largest values. Others are quantised.

    Args:
        recipe: "block" or "row".

    Returns:
        float8_e4m3fn [E, N, K]; its scales, as the recipe has them; int64 [2]: channels and values that were rounded.

    Raises:
        InvalidArgument: a scale is negative or not finite.
    """
    scales = widen_scales(f"{name}_scales", w_scales.detach())
    if not (scales.isfinite() & (scales >= 0)).all():
        raise InvalidArgument(f"{name}_scales has values that are negative or not finite")
    by_powers = ((torch.frexp(scales).mantissa == 0.5) | (scales == 0)).flatten(1).all(1).cpu()
    counts, found = torch.zeros(2, dtype=torch.int64, device=w.device), []
    for packed, of_groups, exactly in zip(w.detach(), scales, by_powers, strict=True):
        values = _in_groups(packed, four_bits)
        encode = _by_powers_of_two if exactly else _quantised
        codes, of_codes, rounded = encode(
            recipe, values, of_groups[..., None], max(map(abs, VALUES[four_bits.values]))
        )
        counts += torch.stack([rounded.any(1).sum(), rounded.sum()])
        found.append((codes.view(torch.uint8), of_codes))
    codes, of_codes = (torch.stack(each) for each in zip(*found, strict=True))
    return codes.view(torch.float8_e4m3fn), of_codes, counts


Encoded = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Codes [N, K], their scales, and which were rounded, bool [N, K]."""


def _by_powers_of_two(recipe: str, values: torch.Tensor, scales: torch.Tensor, largest_value: float) -> Encoded:
    """Encode one expert's values [N, groups, group] with scales [N, groups, 1]."""
    raised = 2.0 ** math.floor(math.log2(E4M3_MAX / largest_value))
    if recipe == "row":
        largest = scales.amax(1)  # [N, 1]
        of_codes = largest[:, 0]
    else:
        groups = FP8_BLOCK // values.shape[2]
        of_codes = scales.unflatten(0, (-1, FP8_BLOCK)).unflatten(2, (-1, groups)).amax((1, 3, 4))
        largest = of_codes.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(groups, 1)
    # Scales may lie 254 octaves apart, which float32 would take for products of 0.
    ratios = torch.where(scales > 0, scales.double() / largest[..., None].double(), 0)
    products = (values * (ratios * raised)).flatten(1)
    codes = products.float().to(torch.float8_e4m3fn)
    return codes, of_codes / raised, codes.double() != products


def _quantised(recipe: str, values: torch.Tensor, scales: torch.Tensor, _: float) -> Encoded:
    products = (values * scales).flatten(1)
    codes, of_codes = quantize_weights(recipe, products)
    if recipe == "row":
        spread = of_codes[:, None]
    else:
        spread = of_codes.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return codes, of_codes, codes.float() * spread != products
