"""Four-bit weights as FP8: every code under every scale, both recipes, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenloom as tl
from tokenloom.plan import RECIPES
from tokenloom.reference import _e4m3_values, _nearest_e4m3

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
TABLES = {
    "e2m1": E2M1 + [-value for value in E2M1],
    "int4": [float(code if code < 8 else code - 16) for code in range(16)],
    "offset_int4": [float(code - 8) for code in range(16)],
}


def packed(codes: torch.Tensor, four_bits: tl.FourBits, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Codes [..., K] from 0 to 15, two in a byte."""
    first, second = codes.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    low, high = (first, second) if four_bits.nibbles == "low_first" else (second, first)
    return (low | high << 4).view(dtype)


def values_of(codes: torch.Tensor, scales: torch.Tensor, four_bits: tl.FourBits) -> torch.Tensor:
    """float64 [E, N, K]."""
    table = torch.tensor(TABLES[four_bits.values], dtype=torch.float64)
    return table[codes.long()] * scales.double().repeat_interleave(four_bits.group, -1)


def decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 [E, N, K] of FP8 weights of either recipe."""
    if scales.dim() == 2:
        return codes.double() * scales.double()[..., None]
    return codes.double() * scales.double().repeat_interleave(128, 1).repeat_interleave(128, 2)


def random_codes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("values", TABLES)
@pytest.mark.parametrize("nibbles", ["low_first", "high_first"])
@pytest.mark.parametrize("by_group", [False, True])
def test_wide_weights(by_group: bool, nibbles: str, values: str) -> None:
    """Every code under every scale that bfloat16 has as a normal number, exactly."""
    four_bits = tl.FourBits(values, nibbles=nibbles)
    codes = torch.arange(16).repeat(16 * 2 * 32).view(2, 32, 256)
    exponents = 3 + torch.arange(2 * 32 * 8).view(2, 32, 8).remainder(245)
    w = packed(codes, four_bits)
    found = tl.dequantize_four_bits(w.unflatten(-1, (-1, 16)) if by_group else w, exponents.to(torch.uint8), four_bits)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.double(), values_of(codes, 2.0 ** (exponents.double() - 127), four_bits))


def test_wide_weights_of_other_scales() -> None:
    four_bits = tl.FourBits("int4", 128)
    codes, scales = random_codes(1, 128, 256), torch.rand(1, 128, 2).half()
    found = tl.dequantize_four_bits(packed(codes, four_bits), scales, four_bits, torch.float32)
    assert torch.equal(found.double(), values_of(codes, scales, four_bits))
    with pytest.raises(tl.ShapeMismatch, match=r"w_scales is \[1, 128, 1\], expected \[1, 128, 2\]"):
        tl.dequantize_four_bits(packed(codes, four_bits), scales[..., :1], four_bits)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("nibbles", ["low_first", "high_first"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e8m0fnu, torch.float32, torch.bfloat16])
def test_mxfp4_is_exact(scale_dtype: torch.dtype, dtype: torch.dtype, nibbles: str, recipe: str) -> None:
    """As checkpoints have it: any packing, any dtype of scales, scales that span 14 octaves."""
    four_bits = tl.FourBits(nibbles=nibbles)
    codes = random_codes(2, 128, 256)
    exponents = 120 + torch.randint(0, 15, (2, 128, 8), generator=torch.Generator().manual_seed(1))
    scales = exponents.to(torch.uint8)
    if scale_dtype != torch.uint8:
        scales = (2.0 ** (exponents - 127.0)).to(scale_dtype)
    w, of_w, report = tl.weights_for(recipe, packed(codes, four_bits, dtype), scales, four_bits=four_bits)
    assert (str(report), report.num_rounded_values) == ("encoded exactly", 0)
    assert tuple(of_w.shape) == ((2, 128) if recipe == "row" else (2, 1, 2))
    assert torch.equal(decoded(w, of_w), values_of(codes, 2.0 ** (exponents - 127.0), four_bits))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("values", TABLES)
def test_every_code_under_every_scale(values: str, recipe: str) -> None:
    """Nearest E4M3, ties to even, and counted right, for scales of a group up to 30 octaves below the largest."""
    four_bits = tl.FourBits(values, 32)
    codes = torch.arange(16).repeat(128, 8)[None]  # [1, 128, 128]: four groups with every code twice
    octaves = torch.zeros(1, 128, 4)
    octaves[0, :, 1] = torch.arange(128) % 31
    scales = 2.0**-octaves
    w, of_w, report = tl.weights_for(recipe, packed(codes, four_bits), scales, four_bits=four_bits, round_again=True)
    raised = {"e2m1": 64.0, "int4": 32.0, "offset_int4": 32.0}[values]
    assert (of_w == 1 / raised).all()
    products = values_of(codes, scales, four_bits) * raised
    want = _nearest_e4m3(products, _e4m3_values()).view(torch.float8_e4m3fn)
    assert torch.equal(w.float(), want.float())
    rounded = want.double() != products
    assert report.num_rounded_values == rounded.sum()
    assert report.num_rounded_channels == rounded.any(-1).sum() > 0
    assert not rounded[0, torch.arange(128) % 31 <= (14 if values == "e2m1" else 12)].any()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("values", "group"), [("int4", 128), ("offset_int4", 32)])
def test_other_scales_round(values: str, group: int, recipe: str) -> None:
    """Only if asked: products are those of the formula, quantised once."""
    four_bits = tl.FourBits(values, group)
    codes = random_codes(2, 256, 128)
    scales = (torch.rand(2, 256, 128 // group, generator=torch.Generator().manual_seed(0)) + 0.5).to(torch.bfloat16)
    given: tuple[Any, ...] = (recipe, packed(codes, four_bits), scales)
    with pytest.raises(
        tl.InvalidArgument, match=r"^w1 has values of four bits.* would be rounded again; pass round_again"
    ):
        tl.weights_for(*given, four_bits=four_bits, name="w1")
    w, of_w, report = tl.weights_for(*given, four_bits=four_bits, round_again=True)
    products = values_of(codes, scales, four_bits).float()
    quantise = tl.quantize_fp8_blocks if recipe == "block" else (lambda each: tl.quantize_fp8(each, recipe="row"))
    want, of_want = quantise(products)
    assert torch.equal(w.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(of_w, of_want)
    assert str(report).startswith("rounded again: 512 of 512 channels")


def test_groups_that_lie_apart() -> None:
    """gpt-oss has a dimension for groups, and one for the bytes of each."""
    codes, scales = random_codes(1, 128, 128), torch.full((1, 128, 4), 127, dtype=torch.uint8)
    plain = tl.weights_for("row", packed(codes, tl.MXFP4), scales, four_bits=tl.MXFP4)
    apart = tl.weights_for("row", packed(codes, tl.MXFP4).unflatten(2, (4, 16)), scales, four_bits=tl.MXFP4)
    assert torch.equal(plain[0].view(torch.uint8), apart[0].view(torch.uint8))
    assert torch.equal(plain[1], apart[1])


@pytest.mark.parametrize("recipe", RECIPES)
def test_scales_of_zero_and_one_large_one(recipe: str) -> None:
    """Channels of zeros are exact, and the largest scale of a block may be in any group."""
    codes, scales = random_codes(1, 128, 128), torch.ones(1, 128, 4)
    scales[0, :64], scales[0, 100, 3] = 0, 2.0**7
    w, of_w, report = tl.weights_for(recipe, packed(codes, tl.MXFP4), scales, four_bits=tl.MXFP4)
    assert torch.equal(decoded(w, of_w), values_of(codes, scales, tl.MXFP4))
    assert report.origin == "encoded exactly"


PACKED, SCALES = torch.zeros(1, 128, 64, dtype=torch.uint8), torch.ones(1, 128, 4)
BAD: dict[str, tuple[tuple[Any, ...], type[tl.TokenloomError], str]] = {
    "no format": (
        (PACKED, SCALES, "mxfp4"),
        tl.InvalidArgument,
        "four_bits is a str, expected a FourBits, such as tl.MXFP4",
    ),
    "dtype": ((PACKED.float(), SCALES), tl.DtypeMismatch, "w is torch.float32, expected uint8, int8 or int32"),
    "no scales": ((PACKED, None), tl.ShapeMismatch, "w has values of four bits, expected w_scales too"),
    "scale dtype": ((PACKED, SCALES.int()), tl.DtypeMismatch, "w_scales is torch.int32, expected float32"),
    "dimensions": (
        (PACKED[0], SCALES),
        tl.ShapeMismatch,
        r"w is \[128, 64\] of torch.uint8, expected \[E, N, K / 2\]",
    ),
    "size": (
        (PACKED[:, :100], SCALES),
        tl.ShapeMismatch,
        r"w is \[1, 100, 64\] of torch.uint8, which is 1 experts of 100 x 128 values; expected multiples",
    ),
    "groups": (
        (PACKED, SCALES[..., :2]),
        tl.ShapeMismatch,
        r"w_scales is \[1, 128, 2\], expected \[1, 128, 4\]: one for",
    ),
    "negative": ((PACKED, -SCALES), tl.InvalidArgument, "w_scales has values that are negative or not finite"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what: str) -> None:
    (w, scales, *four_bits), error, said = BAD[what]
    with pytest.raises(error, match=f"^{said}"):
        tl.weights_for("row", w, scales, four_bits=four_bits[0] if four_bits else tl.MXFP4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"values": "e3m0"}, "values is 'e3m0', expected one of e2m1, int4, offset_int4"),
        ({"group": 48}, "group is 48, expected one of 16, 32, 64, 128"),
        ({"nibbles": "big"}, "nibbles is 'big', expected one of low_first, high_first"),
    ],
)
def test_unknown_formats(options: dict[str, Any], said: str) -> None:
    with pytest.raises(tl.InvalidArgument, match=f"^{said}"):
        tl.FourBits(**options)


@pytest.mark.parametrize("recipe", ["block", "row"])
@pytest.mark.parametrize("octaves", [16, 52, 150, 190, 253])
def test_scales_that_lie_far_apart(octaves: int, recipe: str) -> None:
    """Also so far that float32 takes their ratio for 0: the values are lost, and that is said."""
    codes = torch.full((1, 128, 64), 0x22, dtype=torch.uint8)  # ones
    scales = torch.full((1, 128, 4), 254, dtype=torch.uint8)
    scales[:, :, 0] = 254 - octaves
    with pytest.raises(tl.InvalidArgument, match="128 channels \\(4096 of 16384 values\\) would be rounded again"):
        tl.weights_for(recipe, codes, scales, four_bits=tl.MXFP4)
    w, _, report = tl.weights_for(recipe, codes, scales, four_bits=tl.MXFP4, round_again=True)
    assert report.num_rounded_values == 4096
    assert not w[..., :32].float().any()
