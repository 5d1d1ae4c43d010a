"""Weights of checkpoints: every code and shift against a float64 model, counts, refusals, shapes and dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import NUM_GPUS
from tests.support.cases import BF16, FP8, FP16, FP32, FP64
from tokenloom import dequantize_fp8, quantize_fp8, quantize_fp8_blocks, weights_for
from tokenloom.errors import DeviceMismatch, DtypeMismatch, InvalidArgument, ShapeMismatch, TokenloomError

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if NUM_GPUS else [])]
on_devices = pytest.mark.parametrize("device", DEVICES)
to_each = pytest.mark.parametrize("recipe", ["block", "row"])
OTHER = {"block": "row", "row": "block"}
E8M0 = torch.float8_e8m0fnu
EVERY_CODE = torch.arange(256, dtype=torch.uint8)
SHIFTS = torch.arange(21)


def random_codes(*shape: int, low: int = 0, seed: int = 0) -> torch.Tensor:
    """FP8 of both signs, without NaN, the codes of magnitudes from ``low`` on."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.randint(low, 0x7F, shape, generator=generator)
    return (magnitudes + 128 * torch.randint(0, 2, shape, generator=generator)).to(torch.uint8).view(FP8)


def values_of(w: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = FP64) -> torch.Tensor:
    """Multiply FP8 by scales of either recipe: exactly in float64, rounded once in float32."""
    if scales.shape == w.shape[:2]:
        return w.to(dtype) * scales[..., None].to(dtype)
    return w.to(dtype) * scales.repeat_interleave(128, 1).repeat_interleave(128, 2).to(dtype)


def nearest_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Codes of float64 values up to 448, nearest, ties to the even code, by search among all of them."""
    codes = torch.arange(127)
    distance = (values.abs()[..., None] - codes.to(torch.uint8).view(FP8).double()).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    code = torch.where(nearest, codes % 2, 2).argmin(-1) + 128 * torch.signbit(values)
    return torch.where(values.isnan(), 0x7F, code).to(torch.uint8)


def magnitudes_or_nan(codes: torch.Tensor) -> torch.Tensor:
    """Give all NaN the same code: a GPU does not keep its sign."""
    codes = codes.view(torch.uint8)
    return torch.where(codes & 0x7F == 0x7F, 0x7F, codes)


def every_code_and_shift(recipe: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All codes with all shifts, as codes, scales for the other recipe, and shifts that codes broadcast with."""
    if recipe == "row":  # block j is shifted by j; channels have the lower and the upper half of the codes in turn
        w = EVERY_CODE.view(2, 1, 128).repeat(64, len(SHIFTS), 1).view(1, 128, -1)
        return w.view(FP8), 3 * 2.0 ** -SHIFTS.float().view(1, 1, -1), SHIFTS.repeat_interleave(128)
    shifts = torch.arange(128) % len(SHIFTS)
    return EVERY_CODE.repeat(1, 128, 1).view(FP8), 3 * 2.0 ** -shifts.float().view(1, -1), shifts[:, None]


@on_devices
@to_each
def test_every_code_and_shift(recipe: str, device: str) -> None:
    """The largest scale stays, 3 here; a code is divided as float64 does it, then rounded to nearest even."""
    w, scales, shifts = every_code_and_shift(recipe)
    want = w.double() * 2.0 ** -shifts.double()
    want_codes = nearest_e4m3(want)
    changed = (want_codes.view(FP8).double() != want) & ~want.isnan()
    found, found_scales, report = weights_for(recipe, w.to(device), scales.to(device), round_again=True)
    assert torch.equal(magnitudes_or_nan(found.cpu()), magnitudes_or_nan(want_codes))
    assert found_scales.shape == ((1, 128) if recipe == "row" else (1, 1, 2))
    assert (found_scales == 3).all()
    assert report.num_rounded_values == changed.sum()
    assert report.num_rounded_channels == changed.any(-1).sum()
    assert str(report).startswith(f"rounded again: {report.num_rounded_channels} of 128 channels, ")


@to_each
def test_scales_far_apart(recipe: str) -> None:
    """float32 cannot hold the products with a ratio of 2**-145: all are lost and counted. Zeros keep signs."""
    w, scales, shifts = every_code_and_shift(recipe)
    w = torch.where(w.view(torch.uint8) & 0x7F == 0x7F, 0, w.view(torch.uint8)).view(FP8)
    scales = torch.where(scales == 3, 3.0, 3 * 2.0**-145)
    found, _, report = weights_for(recipe, w, scales, round_again=True)
    far = (shifts > 0).expand_as(w)
    assert torch.equal(found.view(torch.uint8)[far], w.view(torch.uint8)[far] & 0x80)
    assert torch.equal(found.view(torch.uint8)[~far], w.view(torch.uint8)[~far])
    assert report.num_rounded_values == (w.float()[far] != 0).sum()


@to_each
def test_scales_of_zero(recipe: str) -> None:
    """Codes with scale 0 are zeros: nothing is lost beside others, and nothing is divided by 0.

    Without codes of 448, quantising anew would not find the scale again.
    """
    w, scales, shifts = every_code_and_shift(recipe)
    w = torch.where(w.view(torch.uint8) & 0x7F > 0x75, 0, w.view(torch.uint8)).view(FP8)
    found, found_scales, report = weights_for(recipe, w, torch.where(scales == 3, 3.0, 0.0))
    assert torch.equal(found.double() * 3, w.double() * torch.where(shifts == 0, 3.0, 0.0))
    assert ((found_scales == 3).all(), str(report)) == (True, "rebased exactly")
    found, found_scales, report = weights_for(recipe, w, torch.zeros_like(scales))
    assert (found.float() == 0).all()
    assert ((found_scales == 0).all(), str(report)) == (True, "rebased exactly")


@on_devices
@to_each
def test_only_other_ratios_are_quantised_again(recipe: str, device: str) -> None:
    """128 channels of powers of two are rebased beside 128 that are not, in one expert and in others."""
    w = random_codes(3, 256, 384, low=0x40)
    shape = (3, 2, 3) if recipe == "row" else (3, 256)
    scales = 2.0 ** torch.randint(-3, 1, shape, generator=torch.Generator().manual_seed(1))
    others = torch.zeros(3, 2, dtype=torch.bool)
    others[0, 1] = others[2] = True
    of_units = scales.view(3, 2, -1)
    of_units[others] *= torch.rand(of_units[others].shape, generator=torch.Generator().manual_seed(2)) + 0.5
    found, found_scales, report = (
        each.cpu() if isinstance(each, torch.Tensor) else each
        for each in weights_for(recipe, w.to(device), scales.to(device), round_again=True)
    )
    before = values_of(w, scales, FP32)
    q, s = quantize_fp8(before, recipe="row") if recipe == "row" else quantize_fp8_blocks(before)
    channels = others.repeat_interleave(128, 1)
    assert torch.equal(found[channels].float(), q[channels].float())
    new_scales, want_scales = found_scales.view(3, 2, -1), s.view(3, 2, -1)
    assert torch.equal(new_scales[others], want_scales[others])
    assert torch.equal(new_scales[~others], of_units[~others].amax(1, True).expand_as(new_scales[~others]))
    after = values_of(found, found_scales, FP32)
    assert torch.equal(after[~channels], before[~channels])
    assert report.num_rounded_values == (after != before).sum()
    assert report.num_rounded_channels == (after != before).any(-1).sum() == 3 * 128


@to_each
def test_nan_stays_alone(recipe: str) -> None:
    """Where values are quantised again, NaN is not the scale of others."""
    w = random_codes(1, 128, 256)
    scales = torch.tensor([[[1.0, 0.7]]]) if recipe == "row" else torch.linspace(0.5, 1, 128)[None]
    with_nan = w.view(torch.uint8).clone()
    with_nan[0, 3, 5], with_nan[0, 4, 200] = 0x7F, 0xFF
    found, found_scales, _ = weights_for(recipe, with_nan.view(FP8), scales, round_again=True)
    with_zero = torch.where(with_nan & 0x7F == 0x7F, 0, with_nan).view(FP8)
    want, want_scales, _ = weights_for(recipe, with_zero, scales, round_again=True)
    missing = with_nan & 0x7F == 0x7F
    assert torch.equal(found.float().isnan(), missing)
    assert torch.equal(found.float()[~missing], want.float()[~missing])
    assert torch.equal(found_scales, want_scales)


def test_one_huge_channel() -> None:
    """It takes the small values of its 128 channels, and none of the other 128."""
    w = random_codes(1, 256, 128)
    scales = torch.ones(1, 256)
    scales[0, 7] = 2.0**15
    found, found_scales, report = weights_for("block", w, scales, round_again=True)
    assert found_scales.tolist() == [[[2.0**15], [1.0]]]
    assert torch.equal(found[0, 128:].float(), w[0, 128:].float())
    assert torch.equal(found[0, 7].float(), w[0, 7].float())
    lost = values_of(found, found_scales) != values_of(w, scales)
    assert report.num_rounded_values == lost.sum()
    assert report.num_rounded_channels == 127


small = settings(max_examples=25, derandomize=True, deadline=None)
sizes = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3))


@small
@given(sizes, st.integers(0, 2**20), st.sampled_from([1.0, 0.3, 2.0**-100]))
def test_there_and_back(size: tuple[int, int, int], seed: int, factor: float) -> None:
    """Blocks to channels and back: the same values, where no code comes near the smallest step."""
    experts, units, blocks = size
    w = random_codes(experts, 128 * units, 128 * blocks, low=0x40, seed=seed)
    scales = factor * 2.0 ** -torch.randint(0, 8, size, generator=torch.Generator().manual_seed(seed)).float()
    by_row, row_scales, report = weights_for("row", w, scales)
    assert str(report) == "rebased exactly"
    by_block, block_scales, report = weights_for("block", by_row, row_scales)
    assert str(report) == "rebased exactly"
    assert torch.equal(block_scales, scales.amax(2, True).expand_as(scales))
    assert torch.equal(values_of(by_block, block_scales), values_of(w, scales))
    assert torch.equal(by_block.float(), by_row.float())  # the channels of a unit had the same scale


@small
@given(sizes, st.integers(0, 2**20), st.sampled_from(["block", "row"]), st.sampled_from([0.0, 1.0]))
def test_any_weights(size: tuple[int, int, int], seed: int, recipe: str, jitter: float) -> None:
    """The report counts what differs; nothing is off by more than half a step of its new scale."""
    experts, units, blocks = size
    generator = torch.Generator().manual_seed(seed)
    w = random_codes(experts, 128 * units, 128 * blocks, seed=seed)
    shape = size if recipe == "row" else (experts, 128 * units)
    scales = 2.0 ** -torch.randint(0, 12, shape, generator=generator) * (
        1 + jitter * torch.rand(shape, generator=generator)
    )
    before = values_of(w, scales, FP32)
    found, found_scales, report = weights_for(recipe, w, scales, round_again=True)
    after = values_of(found, found_scales, FP32)
    assert report.num_rounded_values == (after != before).sum()
    assert report.num_rounded_channels == (after != before).any(-1).sum()
    assert (report.num_channels, report.num_values) == (experts * 128 * units, w.numel())
    half_step = values_of(torch.full_like(w, 2.0**-9), found_scales) / 2
    assert ((after - before).abs() <= torch.maximum(half_step, before.abs().double() * 2.0**-4) * 1.0001).all()
    if report.num_rounded_values:
        with pytest.raises(InvalidArgument, match="would be rounded a second time"):
            weights_for(recipe, w, scales)


def test_refusal() -> None:
    """The error has the counts, and both ways on."""
    w = torch.full((1, 128, 256), 2.0**-9).to(FP8)
    w[0, 5:, 128:] = 1.0
    text = (
        r"^w1 has scales of recipe='block'; for recipe='row', 5 of 128 channels \(640 of 32768 values\) would be "
        r"rounded a second time; pass round_again=True to allow it, or keep recipe='block'$"
    )
    with pytest.raises(InvalidArgument, match=text):
        weights_for("row", w, torch.tensor([[[1.0, 0.5]]]), name="w1")
    report = weights_for("row", w, torch.tensor([[[1.0, 0.5]]]), round_again=True)[2]
    assert str(report) == "rounded again: 5 of 128 channels, 1.95% of values"


@pytest.mark.parametrize("dtype", [torch.uint8, E8M0])
@pytest.mark.parametrize("recipe", ["block", "row"])
def test_e8m0(recipe: str, dtype: torch.dtype) -> None:
    """Byte b is 2**(b - 127), also where float32 is subnormal; 255 is NaN and refused."""
    bytes_ = torch.arange(256, dtype=torch.uint8)
    shape = (2, 128) if recipe == "row" else (2, 1, 128)
    w = random_codes(2, 128, 128 if recipe == "row" else 128 * 128)
    scales = bytes_.clamp(max=254).view(shape)
    found, found_scales, report = weights_for(recipe, w, scales.view(dtype))
    assert (found_scales.dtype, str(report)) == (FP32, "as they were")
    assert found_scales.flatten().tolist() == [2.0 ** (min(b, 254) - 127) for b in range(256)]
    assert torch.equal(found.view(torch.uint8), w.view(torch.uint8))
    with pytest.raises(InvalidArgument, match=r"^w_scales has the byte 255, which is NaN in E8M0$"):
        weights_for(recipe, w, bytes_.view(shape).view(dtype))


def test_e8m0_is_converted() -> None:
    """Scales of both encodings convert as the float32 of their values."""
    w = random_codes(1, 128, 256, low=0x40)
    scales = torch.tensor([[[120, 123]]], dtype=torch.uint8)
    want = weights_for("row", w, torch.tensor([[[2.0**-7, 2.0**-4]]]))
    for each in (scales, scales.view(E8M0)):
        found = weights_for("row", w, each)
        assert torch.equal(found[0].float(), want[0].float())
        assert torch.equal(found[1], torch.full((1, 128), 2.0**-4))
        assert found[2] == want[2]


@to_each
def test_scales_of_the_recipe_stay(recipe: str) -> None:
    """Nothing is copied; bfloat16 widens; [E, N, 1] is [E, N]. Values are not looked at, as in the kernels."""
    w = random_codes(2, 256, 384)
    shape = (2, 256) if recipe == "row" else (2, 2, 3)
    scales = torch.rand(shape)
    found, found_scales, report = weights_for(recipe, w, scales)
    assert (found.data_ptr(), found_scales.data_ptr()) == (w.data_ptr(), scales.data_ptr())
    assert (found_scales.shape, str(report)) == (shape, "as they were")
    assert torch.equal(weights_for(recipe, w, scales.to(BF16))[1], scales.to(BF16).float())
    if recipe == "row":
        assert torch.equal(weights_for(recipe, w, scales[..., None])[1], scales)
    assert weights_for(recipe, w, torch.full(shape, torch.nan))[1].isnan().all()


@to_each
@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 1), (2, 1, 1)])
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.uint8])
def test_one_scale_for_an_expert(recipe: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """It is repeated, and codes stay."""
    w = random_codes(2, 256, 384)
    scales = (torch.rand(shape) * 100 + 100).to(dtype)
    found, found_scales, report = weights_for(recipe, w, scales)
    values = (2.0 ** (scales.float() - 127) if dtype == torch.uint8 else scales.float()).flatten().expand(2)
    assert found_scales.shape == ((2, 256) if recipe == "row" else (2, 2, 3))
    assert found_scales.is_contiguous()
    assert torch.equal(found_scales, values.view(2, *[1] * (found_scales.dim() - 1)).expand_as(found_scales))
    assert (found.data_ptr(), str(report)) == (w.data_ptr(), "repeated")


@on_devices
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_weights_without_scales_are_quantised(dtype: torch.dtype, device: str) -> None:
    """The bits of quantising all experts at once."""
    w = torch.randn(3, 256, 384, generator=torch.Generator().manual_seed(0)).to(device, dtype).requires_grad_()
    for recipe, (q, s) in {"row": quantize_fp8(w, recipe="row"), "block": quantize_fp8_blocks(w)}.items():
        found, found_scales, report = weights_for(recipe, w)
        assert torch.equal(found.view(torch.uint8), q.view(torch.uint8))
        assert torch.equal(found_scales, s)
        assert not found.requires_grad
        assert not found_scales.requires_grad
        assert str(report) == "quantised"


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with other strides."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


@to_each
def test_any_strides(recipe: str) -> None:
    """Results are contiguous, and the same as those of contiguous tensors."""
    w, wide = random_codes(2, 256, 384), torch.randn(2, 256, 384)
    both = {"block": torch.rand(2, 2, 3), "row": torch.rand(2, 256)}
    for inputs in [(w, both[recipe]), (w, both[OTHER[recipe]]), (w, torch.rand(2, 1, 1)), (wide,)]:
        want = weights_for(recipe, *inputs, round_again=True)
        found = weights_for(recipe, *map(turned, inputs), round_again=True)
        for one, other in zip(found[:2], want[:2], strict=True):
            assert one.is_contiguous()
            assert torch.equal(one.float(), other.float())
        assert found[2] == want[2]


class LargestCopies(TorchDispatchMode):
    """Notes the most values of a result as wide as float32."""

    def __init__(self) -> None:
        super().__init__()
        self.num_values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.itemsize >= 4:
            self.num_values = max(self.num_values, result.numel())
        return result


@to_each
def test_memory_is_for_one_expert(recipe: str) -> None:
    """Weights of 256 experts of [4096, 7168] would be 30 GB in float32."""
    scales = {"block": torch.rand(5, 2, 3), "row": torch.rand(5, 256)}[OTHER[recipe]]
    for inputs in ((random_codes(5, 256, 384), scales), (torch.randn(5, 256, 384).to(BF16),)):
        with LargestCopies() as copies:
            weights_for(recipe, *inputs, round_again=True)
        assert copies.num_values == 256 * 384


def _fp8(*shape: int) -> torch.Tensor:
    return torch.ones(shape).to(FP8)


ACCEPTED = (
    "[2, 2, 3], one for 128 x 128 values; [2, 256] or [2, 256, 1], one for each output channel; "
    "[2], [2, 1] or [2, 1, 1], one for each expert; or [] or [1], one for all"
)
NOT_SIZES = "expected [E, N, K] with N and K multiples of 128"
BAD: list[tuple[tuple[Any, ...], type[TokenloomError], str]] = [
    (("rows", _fp8(1, 128, 128)), InvalidArgument, "recipe is 'rows', expected one of block, row"),
    (("row", None), InvalidArgument, "w is a NoneType, expected a torch.Tensor"),
    (("row", _fp8(1, 128, 128), 1.0), InvalidArgument, "w_scales is a float, expected a torch.Tensor"),
    (
        ("row", torch.ones(1, 128, 128, dtype=FP64)),
        DtypeMismatch,
        "w is torch.float64, expected bfloat16, float16, float32 or float8_e4m3fn",
    ),
    (("row", _fp8(128, 128)), ShapeMismatch, f"w is [128, 128], {NOT_SIZES}"),
    (("row", _fp8(1, 100, 128)), ShapeMismatch, f"w is [1, 100, 128], {NOT_SIZES}"),
    (("row", _fp8(1, 128, 100)), ShapeMismatch, f"w is [1, 128, 100], {NOT_SIZES}"),
    (("row", _fp8(0, 128, 128)), ShapeMismatch, f"w is [0, 128, 128], {NOT_SIZES}, and not of 0 experts"),
    (
        ("row", torch.ones(1, 128, 128), torch.ones(1)),
        DtypeMismatch,
        "w is torch.float32, which has no scales; leave them out",
    ),
    (("row", _fp8(1, 128, 128)), ShapeMismatch, "w is float8_e4m3fn, expected w_scales too"),
    (
        ("row", _fp8(1, 128, 128), torch.ones(1, dtype=torch.int32)),
        DtypeMismatch,
        "w_scales is torch.int32, expected float32, bfloat16 or float16, or float8_e8m0fnu or uint8 for E8M0",
    ),
    (
        ("row", _fp8(1, 128, 128), torch.ones(1, device="meta")),
        DeviceMismatch,
        "w_scales is on meta, expected cpu, where w is",
    ),
    *(
        (
            ("row", _fp8(2, 256, 384), torch.ones(shape)),
            ShapeMismatch,
            f"w_scales is {list(shape)} for weights [2, 256, 384], expected {ACCEPTED}",
        )
        for shape in ((2, 3, 2), (2, 256, 3), (3,), (2, 2), (256,), (1, 256))
    ),
    *(
        (
            ("row", _fp8(1, 128, 256), torch.tensor([[[1.0, value]]])),
            InvalidArgument,
            "w_scales has values that are negative or not finite, which cannot be converted",
        )
        for value in (-1.0, torch.nan, torch.inf)
    ),
]


@pytest.mark.parametrize(("inputs", "error", "text"), BAD)
def test_bad_input(inputs: tuple[Any, ...], error: type[TokenloomError], text: str) -> None:
    with pytest.raises(error) as raised:
        weights_for(*inputs)
    assert str(raised.value) == text


def test_values_are_those_of_dequantizing() -> None:
    """The model of this file multiplies as ``dequantize_fp8`` does."""
    w, scales = random_codes(2, 128, 256), torch.rand(2, 128)
    assert torch.equal(values_of(w, scales, FP32), dequantize_fp8(w, scales))
