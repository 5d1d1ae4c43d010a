"""Weights of checkpoints, with the scales that a recipe takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenloom.errors import DtypeMismatch, InvalidArgument, ShapeMismatch, require_type
from tokenloom.ops.padding import pad
from tokenloom.ops.quant.four_bits import FourBits, check_four_bits, encode_as_fp8
from tokenloom.ops.quant.fp8 import quantize_weights, require_recipe
from tokenloom.ops.quant.scale_dtypes import require_scales, widen_scales
from tokenloom.plan import FP8_BLOCK, align_up

E4M3 = torch.float8_e4m3fn
E4M3_NAN = 0x7F
WIDE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of weights without scales."""

SMALLEST_RATIO = 2.0**-20
"""Least ratio of scales in use. It rounds all of E4M3 to zero, as smaller ones do, and its products fit float32."""


@dataclass(frozen=True)
class WeightReport:
    """Account of how weights came to their scales.

    Attributes:
        origin: "as they were"; "repeated", of one scale for an expert; "quantised", from a wider dtype; "rebased
            exactly", with other scales and the same values; "encoded exactly", from four bits; or "rounded again".
        num_channels: output channels of all experts.
        num_values: weights of all experts.
        num_rounded_channels: channels with a value that was rounded again.
        num_rounded_values: values that are not what they were, because they were rounded again.
    """

    origin: str
    num_channels: int
    num_values: int
    num_rounded_channels: int = 0
    num_rounded_values: int = 0

    def __str__(self) -> str:
        if not self.num_rounded_values:
            return self.origin
        percent = 100 * self.num_rounded_values / self.num_values
        return f"{self.origin}: {self.num_rounded_channels} of {self.num_channels} channels, {percent:.3g}% of values"


def weights_for(
    recipe: str,
    w: torch.Tensor,
    w_scales: torch.Tensor | None = None,
    *,
    four_bits: FourBits | None = None,
    round_again: bool = False,
    name: str = "w",
) -> tuple[torch.Tensor, torch.Tensor, WeightReport]:
    """Give weights the scales that a recipe takes: ``"block"``, one for 128 x 128 values, or ``"row"``, one a channel.

    Scales of the recipe stay as they are. One scale for an expert is repeated, and its codes stay. Otherwise the 128
    channels that share blocks are converted together:

    - If their scales differ by powers of two, they take the largest, and the codes of the others are divided. That is
      exact for codes that stay multiples of E4M3's smallest step, 2**-9. Others are rounded to nearest even.
    - If their scales differ otherwise, the values are quantised anew from float32. That rounds nearly all of them.

    A wider dtype is quantised as by ``quantize_fp8_blocks`` or ``quantize_fp8(recipe="row")``. Memory beside the
    result is a few float32 copies of one expert.

    Args:
        recipe: "block" or "row".
        w: float8_e4m3fn [E, N, K], or bfloat16, float16 or float32 without scales. N and K are multiples of 128.
        w_scales: of FP8: [E, N / 128, K / 128], one for 128 x 128 values; [E, N] or [E, N, 1], one for each output
            channel; [E], [E, 1] or [E, 1, 1], one for each expert; or [] or [1], one for all. float32, bfloat16,
            float16, float8_e8m0fnu, or uint8 with the bytes of the latter: b is 2**(b - 127). Of four bits:
            [E, N, K / group].
        four_bits: how w holds values of four bits, such as ``MXFP4``, or None. w is then uint8, int8 or int32, whose
            items hold 2 or 8 values: [E, N, K / 2] or [E, N, K / 8], or the same with groups apart, as gpt-oss has
            them: [E, N, K / group, group / 2]. Scales that are powers of two make it exact in E4M3, where those of a
            block or channel lie within 14 octaves; others round all values again.
        round_again: round values a second time where the conversion needs it, instead of raising InvalidArgument.
        name: of w in errors; that of the scales has ``_scales`` behind it.

    Returns:
        w: float8_e4m3fn [E, N, K], the one given if nothing had to change; scales: float32 [E, N / 128, K / 128] or
        [E, N]; and a report. Both tensors are contiguous.

    Raises:
        InvalidArgument: the recipe is unknown; an argument is no tensor; a scale is NaN in E8M0, or must be converted
            and is negative or not finite; or values would be rounded a second time.
        ShapeMismatch: w is not [E, N, K], FP8 comes without scales, or the scales have another shape.
        DtypeMismatch: w or its scales have another dtype, or weights of a wider dtype come with scales.
        DeviceMismatch: the scales are on another device than w.
    """
    return padded_weights_for(
        recipe, w, w_scales, four_bits=four_bits, round_again=round_again, name=name, multiple=FP8_BLOCK
    )


@torch.no_grad()
def padded_weights_for(
    recipe: str,
    w: torch.Tensor,
    w_scales: torch.Tensor | None = None,
    *,
    four_bits: FourBits | None = None,
    round_again: bool = False,
    name: str = "w",
    multiple: int = 1,
    parts: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, WeightReport]:
    """Do what ``weights_for`` does for any N and K, and round both up to multiples of 128 with zeros.

    The values keep their scales: a block of 128 x 128 that reaches over the end of N or K is of the values before it.

    Args:
        recipe, w, w_scales, four_bits, round_again, name: as in ``weights_for``, with N / 128 and K / 128 rounded up.
        multiple: N and K are multiples of it.
        parts: of N, such as gates and ups. Each is padded by itself, and begins with a block of its own.

    Returns:
        w and its scales, of the widths that are multiples of 128; a report that counts the values before.
    """
    require_recipe(recipe)
    require_type("round_again", round_again, bool, "a bool")
    if four_bits is not None:
        return _of_four_bits(recipe, w, w_scales, four_bits, round_again, name, multiple, parts)
    _check(name, w, w_scales, multiple)
    sizes = (w.shape[0] * w.shape[1], w.numel())
    padded = _padded_shape(w.shape, parts)
    if w_scales is None:
        return *_quantize_experts(recipe, w.detach(), padded, parts), WeightReport("quantised", *sizes)
    scales_of, scales = _by_unit(f"{name}_scales", widen_scales(f"{name}_scales", w_scales.detach()), w, parts)
    w = pad(w.detach(), padded, parts)
    if scales_of in (recipe, "expert"):
        report = WeightReport("as they were" if scales_of == recipe else "repeated", *sizes)
        return w.contiguous(), _flatten(recipe, _spread(recipe, scales, w)), report
    if not (scales.isfinite() & (scales >= 0)).all():
        raise InvalidArgument(f"{name}_scales has values that are negative or not finite, which cannot be converted")
    codes, scales, counts = _convert(recipe, w, scales)
    channels, values = counts.tolist()
    if values and not round_again:
        raise InvalidArgument(
            f"{name} has scales of recipe={scales_of!r}; for recipe={recipe!r}, {channels} of {sizes[0]} channels "
            f"({values} of {sizes[1]} values) would be rounded a second time; pass round_again=True to allow it, or "
            f"keep recipe={scales_of!r}"
        )
    report = WeightReport("rounded again" if values else "rebased exactly", *sizes, channels, values)
    return codes, _flatten(recipe, scales), report


def _padded_shape(shape: Sequence[int], parts: int) -> list[int]:
    """Round the sizes of each part of N, and K, up to multiples of 128."""
    experts, channels, depth = shape
    return [experts, parts * align_up(channels // parts, FP8_BLOCK), align_up(depth, FP8_BLOCK)]


def _of_four_bits(
    recipe: str,
    w: torch.Tensor,
    w_scales: torch.Tensor | None,
    four_bits: FourBits,
    round_again: bool,
    name: str,
    multiple: int,
    parts: int,
) -> tuple[torch.Tensor, torch.Tensor, WeightReport]:
    experts, channels, depth = check_four_bits(name, w, w_scales, four_bits, multiple)
    assert w_scales is not None
    *padded, padded_depth = _padded_shape((experts, channels, depth), parts)
    # Groups are whole, as K is a multiple of them. The scales of new ones are 0, whatever value the code 0 has.
    scales = pad(widen_scales(f"{name}_scales", w_scales.detach()), [*padded, padded_depth // four_bits.group], parts)
    held = depth // w.shape[2]  # values in an item of dimension 2
    w = pad(w.detach(), [*padded, padded_depth // held, *w.shape[3:]], parts)
    codes, scales, counts = encode_as_fp8(recipe, name, w, scales, four_bits)
    sizes = (experts * channels, experts * channels * depth)
    channels, values = counts.tolist()
    if values and not round_again:
        raise InvalidArgument(
            f"{name} has values of four bits; as FP8 of recipe={recipe!r}, {channels} of {sizes[0]} channels "
            f"({values} of {sizes[1]} values) would be rounded again; pass round_again=True to allow it"
        )
    return codes, scales, WeightReport("rounded again" if values else "encoded exactly", *sizes, channels, values)


def _check(name: str, w: torch.Tensor, w_scales: torch.Tensor | None, multiple: int) -> None:
    """Raise an error for wrong types, dtypes, sizes of w and devices."""
    require_type(name, w, torch.Tensor, "a torch.Tensor")
    if w.dtype != E4M3 and w.dtype not in WIDE_DTYPES:
        cure = "; view bytes as torch.float8_e4m3fn" if w.dtype in (torch.uint8, torch.int8) else ""
        raise DtypeMismatch(f"{name} is {w.dtype}, expected bfloat16, float16, float32 or float8_e4m3fn{cure}")
    if w.dim() != 3 or w.shape[1] % multiple or w.shape[2] % multiple or not w.numel():
        raise ShapeMismatch(
            f"{name} is {list(w.shape)}, expected [E, N, K] with N and K multiples of {multiple}"
            + ", and not of 0 experts" * (w.shape[:1] == (0,))
        )
    if w.dtype != E4M3:
        if w_scales is not None:
            raise DtypeMismatch(f"{name} is {w.dtype}, which has no scales; leave them out")
        return
    if w_scales is None:
        raise ShapeMismatch(f"{name} is float8_e4m3fn, expected {name}_scales too")
    require_scales(name, w_scales, w)


def _by_unit(name: str, scales: torch.Tensor, w: torch.Tensor, parts: int) -> tuple[str, torch.Tensor]:
    """Return the recipe that takes the scales, or "expert", and the scales as [experts, units, channels, blocks].

    A unit is 128 channels, which share blocks. The last three sizes are 1 where a scale is of all. Channels that pad w
    have scales of 0, which never are the largest of a unit.
    """
    experts, channels, _ = w.shape
    units, blocks = (size // FP8_BLOCK for size in _padded_shape(w.shape, parts)[1:])
    shape = list(scales.shape)
    if shape == [experts, units, blocks]:
        return "block", scales.reshape(experts, units, 1, blocks)
    if shape in ([experts, channels], [experts, channels, 1]):
        padded = pad(scales.reshape(experts, channels), [experts, units * FP8_BLOCK], parts)
        return "row", padded.reshape(experts, units, FP8_BLOCK, 1)
    if shape in ([experts], [experts, 1], [experts, 1, 1], [], [1]):
        return "expert", scales.reshape(-1, 1, 1, 1).expand(experts, 1, 1, 1)
    raise ShapeMismatch(
        f"{name} is {shape} for weights {list(w.shape)}, expected {[experts, units, blocks]}, one for {FP8_BLOCK} x "
        f"{FP8_BLOCK} values; {[experts, channels]} or {[experts, channels, 1]}, one for each output channel; "
        f"{[experts]}, {[experts, 1]} or {[experts, 1, 1]}, one for each expert; or [] or [1], one for all"
    )


def _spread(recipe: str, scales: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Repeat scales by unit for the channels of recipe "row", or the blocks of recipe "block"."""
    experts, channels, depth = w.shape
    sizes = (FP8_BLOCK, 1) if recipe == "row" else (1, depth // FP8_BLOCK)
    return scales.expand(experts, channels // FP8_BLOCK, *sizes).contiguous()


def _flatten(recipe: str, scales: torch.Tensor) -> torch.Tensor:
    """Give scales by unit the shape that the recipe takes."""
    return scales.flatten(1) if recipe == "row" else scales.squeeze(2)


def _quantize_experts(
    recipe: str, w: torch.Tensor, padded: Sequence[int], parts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise expert by expert: a float32 copy of all would take four times the memory of the result.

    Args:
        padded: shape of the codes.
    """
    codes = torch.empty(*padded, dtype=E4M3, device=w.device)
    scales = []
    for expert, values in enumerate(w):
        whole = pad(values[None], [1, *padded[1:]], parts)[0]
        codes[expert], found = quantize_weights(recipe, whole)
        scales.append(found)
    return codes, torch.stack(scales)


def _convert(recipe: str, w: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convert FP8 to the other recipe.

    Args:
        scales: by unit.

    Returns:
        The codes; the new scales, by unit; and int64 [2] on w's device: channels and values that were rounded.
    """
    largest = scales.amax((2, 3), keepdim=True)
    # A scale of 0 makes zeros of all codes, whatever the others are.
    ratios = torch.where(scales > 0, (scales / largest).clamp_min(SMALLEST_RATIO), 0)
    by_powers = torch.frexp(scales).mantissa == torch.frexp(largest).mantissa
    can_rebase = (by_powers | (scales == 0)).flatten(2).all(2).cpu()  # one wait, not one for each expert
    new_scales = _spread(recipe, largest, w).clone()
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device).unflatten(1, (-1, FP8_BLOCK))
    counts = torch.zeros(2, dtype=torch.int64, device=w.device)
    for expert, rebased in enumerate(can_rebase):
        units = w[expert].view(torch.uint8).unflatten(0, (-1, FP8_BLOCK))  # torch indexes no FP8
        for chosen in (rebased.nonzero().flatten(), (~rebased).nonzero().flatten()):
            if not len(chosen):
                continue
            factors = ratios if rebased[chosen[0]] else scales
            values = _multiply(units[chosen].view(E4M3), factors[expert, chosen])
            if factors is ratios:
                found = values.to(E4M3)
                after = found.float()
            else:
                found, of_chosen = _quantize_beside_nan(recipe, values)
                new_scales[expert, chosen] = of_chosen.reshape(len(chosen), *new_scales.shape[2:])
                after = _multiply(found, new_scales[expert, chosen])
            codes[expert, chosen] = found.view(torch.uint8)
            rounded = ((after != values) & ~values.isnan()).sum(-1)
            counts += torch.stack([rounded.count_nonzero(), rounded.sum()])
    return codes.flatten(1, 2).view(E4M3), new_scales, counts


def _multiply(codes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Multiply units of codes [n, 128, K] in float32 by factors [n, 128 or 1, K / 128 or 1]."""
    return codes.float().unflatten(-1, (-1, FP8_BLOCK)).mul_(factors[..., None]).flatten(-2)


def _quantize_beside_nan(recipe: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise, and keep a NaN from the values that share its scale."""
    missing = values.isnan()
    codes, scales = quantize_weights(recipe, values.masked_fill(missing, 0))
    return codes.view(torch.uint8).masked_fill_(missing, E4M3_NAN).view(E4M3), scales
