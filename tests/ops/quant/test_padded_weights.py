"""Weights of widths that are no multiples of 128: they keep values and scales, and zeros come behind them."""

from __future__ import annotations

import pytest
import torch

import tokenloom as tl
from tokenloom.ops.padding import pad
from tokenloom.ops.quant.weights import padded_weights_for
from tokenloom.plan import RECIPES

E4M3 = torch.float8_e4m3fn
EXPERTS, HALF, DEPTH = 2, 176, 144
"""Two parts of rows, such as gates and ups. Neither they nor K are whole blocks."""
WHOLE = [EXPERTS, 2 * 256, 256]


def by_hand(tensor: torch.Tensor, rows: int = 256, columns: int = 256) -> torch.Tensor:
    """Both parts of the rows padded, then the columns, without the code under test."""
    values = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
    parts = [torch.nn.functional.pad(part, (0, columns - part.shape[2], 0, rows - part.shape[1]))
             for part in values.chunk(2, 1)]  # fmt: skip
    return torch.cat(parts, 1).view(tensor.dtype)


def weights(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(EXPERTS, 2 * HALF, DEPTH, generator=generator).to(dtype)


def scales_of(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    shapes = {"blocks": (EXPERTS, 4, 2), "channels": (EXPERTS, 2 * HALF), "experts": (EXPERTS,)}
    exponents = torch.randint(-9, -6, shapes[kind.removeprefix("uneven ")], generator=generator)
    return 2.0**exponents * (0.7 + torch.rand(exponents.shape, generator=generator) if "uneven" in kind else 1)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["blocks", "channels", "uneven blocks", "uneven channels", "experts", "none"])
def test_they_are_those_of_padded_weights(kind: str, recipe: str) -> None:
    """Bit for bit, where they are: zeros change neither the largest value of a block nor a conversion, and what is
    said of it counts values of the caller."""
    w = weights()
    wide: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if kind != "none":
        w, scales = w.to(E4M3), scales_of(kind)
        wide = (scales, scales)
        if "channels" in kind:  # others with any scale that is no larger would be as good
            of_rows = by_hand(scales[..., None], columns=1)[..., 0]
            wide = (scales, of_rows.masked_fill(of_rows == 0, 2.0**-20))
    codes, scales, report = padded_weights_for(recipe, w, wide[0], round_again=True, parts=2)
    wanted, of_wanted, report_of_wanted = tl.weights_for(recipe, by_hand(w), wide[1], round_again=True)
    assert (codes.dtype, list(codes.shape)) == (E4M3, WHOLE)
    assert torch.equal(codes.view(torch.uint8) & 0x7F, wanted.view(torch.uint8) & 0x7F)
    has_values = by_hand(torch.ones(EXPERTS, 2 * HALF, 1), columns=1)[..., 0] > 0
    assert torch.equal(scales[has_values], of_wanted[has_values]) if recipe == "row" else scales.equal(of_wanted)
    assert scales.isfinite().all()
    assert (report.num_channels, report.num_values) == (EXPERTS * 2 * HALF, EXPERTS * 2 * HALF * DEPTH)
    assert (report.origin, report.num_rounded_channels, report.num_rounded_values) == (
        report_of_wanted.origin,
        report_of_wanted.num_rounded_channels,
        report_of_wanted.num_rounded_values,
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "four_bits", [tl.MXFP4, tl.FourBits("offset_int4", 16), tl.FourBits("int4", 16, "high_first")]
)
@pytest.mark.parametrize("powers", [True, False])
@pytest.mark.parametrize("held", [2, 8])
def test_four_bits(recipe: str, four_bits: tl.FourBits, powers: bool, held: int) -> None:
    """Zeros are values of 0, though the code 0 of offset_int4 is -8; and scales of E8M0, which have no 0."""
    generator, group = torch.Generator().manual_seed(0), four_bits.group
    depth = 160  # a multiple of all groups
    w = torch.randint(0, 256, (EXPERTS, 2 * HALF, depth // 2), generator=generator).to(torch.uint8)
    scales = torch.randint(117, 120, (EXPERTS, 2 * HALF, depth // group), generator=generator).to(torch.uint8)
    if not powers:
        scales = scales.float() / 117
    items = w if held == 2 else w.view(torch.int32)
    codes, of_codes, report = padded_weights_for(recipe, items, scales, four_bits=four_bits, round_again=True, parts=2)
    floats = scales if scales.dtype == torch.float32 else scales.view(torch.float8_e8m0fnu).float()
    zero = 0x88 if four_bits.values == "offset_int4" else 0
    whole = by_hand(w ^ zero, columns=128) ^ zero
    wanted, of_wanted, report_of_wanted = tl.weights_for(
        recipe, whole, by_hand(floats, columns=256 // group), four_bits=four_bits, round_again=True
    )
    assert torch.equal(codes.view(torch.uint8) & 0x7F, wanted.view(torch.uint8) & 0x7F)
    assert not (by_hand(torch.ones(EXPERTS, 2 * HALF, depth)) == 0)[codes.float() != 0].any()
    assert torch.equal(of_codes, of_wanted)
    assert report.num_rounded_values == report_of_wanted.num_rounded_values
    assert report.num_values == EXPERTS * 2 * HALF * depth


def test_four_bits_of_no_whole_group() -> None:
    w, scales = torch.zeros(1, 16, 8, dtype=torch.uint8), torch.zeros(1, 16, 1, dtype=torch.uint8)
    with pytest.raises(tl.ShapeMismatch, match="which is 1 experts of 16 x 16 values; expected multiples of 32, and"):
        padded_weights_for("row", w, scales, four_bits=tl.MXFP4)


def test_what_is_whole_is_not_copied() -> None:
    w, scales = torch.zeros(1, 256, 128).to(E4M3), torch.ones(1, 2, 1)
    assert padded_weights_for("block", w, scales, parts=2)[0].data_ptr() == w.data_ptr()
    assert pad(w, [1, 256, 128], parts=2) is w


def test_scales_of_another_shape() -> None:
    """An error speaks of the caller's widths; gates and ups have blocks of their own, though two thirds would do."""
    with pytest.raises(
        tl.ShapeMismatch,
        match=r"w_scales is \[2, 3, 2\] for weights \[2, 352, 144\], expected \[2, 4, 2\], .* \[2, 352\]",
    ):
        padded_weights_for("block", weights(E4M3), torch.ones(EXPERTS, 3, 2), parts=2)
