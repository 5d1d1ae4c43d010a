"""FP8: ops.quant against the reference bit for bit, and both against codes worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.conftest import NUM_GPUS
from tests.support.cases import BF16, FP8, FP16, FP32, FP64
from tokenloom import dequantize_fp8, quantize_fp8, quantize_fp8_blocks, reference
from tokenloom.errors import DtypeMismatch, InvalidArgument, ShapeMismatch
from tokenloom.ops import quant
from tokenloom.plan import RECIPES

both = pytest.mark.parametrize("quantize", [quant.quantize_fp8, reference.quantize_fp8], ids=["quant", "reference"])
scales_of = pytest.mark.parametrize("power_of_two", [False, True], ids=["any scale", "power of two"])
DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if NUM_GPUS else [])]
Quantize = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def block(*values: float, dtype: torch.dtype = FP32) -> torch.Tensor:
    """One block of 128, the values first, then zeros."""
    x = torch.zeros(1, 128, dtype=dtype)
    x[0, : len(values)] = torch.tensor(values, dtype=dtype)
    return x


def codes(q: torch.Tensor, count: int) -> list[int]:
    assert q.dtype == FP8
    return q.view(torch.uint8)[0, :count].tolist()


@both
@scales_of
def test_codes_by_hand(quantize: Quantize, power_of_two: bool) -> None:
    """amax 448 makes the scale 1 in both ways, so the codes are those of E4M3 itself."""
    expected = {
        448.0: 0x7E,
        -1.0: 0xB8,
        17.0: 0x58,  # tie between 16 and 18: the even code
        19.0: 0x5A,  # tie between 18 and 20: the even code
        432.0: 0x7E,  # tie between 416 and 448
        431.0: 0x7D,
        2.0**-6: 0x08,  # smallest normal
        2.0**-9: 0x01,  # smallest subnormal
        2.0**-10: 0x00,  # tie between 0 and 2**-9
        -(2.0**-10): 0x80,
        1.5 * 2.0**-10: 0x01,
        3 * 2.0**-10: 0x02,  # tie between 2**-9 and 2 * 2**-9
        -0.0: 0x80,
    }
    q, scales = quantize(block(*expected), power_of_two_scales=power_of_two)
    assert scales.tolist() == [[1.0]]
    assert codes(q, len(expected)) == list(expected.values())


@both
def test_scale_is_rounded_up_to_a_power_of_two(quantize: Quantize) -> None:
    """449/448 -> 2, so 449 is 224.5 -> 224; 1/448 -> 2**-8, so 1 is 256."""
    q, scales = quantize(block(449.0), power_of_two_scales=True)
    assert (scales.item(), codes(q, 1)) == (2.0, [0x76])
    q, scales = quantize(block(1.0), power_of_two_scales=True)
    assert (scales.item(), codes(q, 1)) == (2.0**-8, [0x78])


@both
@pytest.mark.parametrize("exponent", [-10, -1, 0, 1, 30])
def test_exact_power_of_two_stays(quantize: Quantize, exponent: int) -> None:
    """A scale that is a power of two already is not doubled."""
    q, scales = quantize(block(448.0 * 2.0**exponent), power_of_two_scales=True)
    assert (scales.item(), codes(q, 1)) == (2.0**exponent, [0x7E])


@both
def test_zeros(quantize: Quantize) -> None:
    """A block of zeros has the scale of the floor, 1e-4, rounded in float32; -0.0 keeps its sign."""
    q, scales = quantize(block(0.0, -0.0))
    assert scales.item() == (torch.tensor(1e-4) / torch.tensor(448.0)).item()
    assert codes(q, 3) == [0x00, 0x80, 0x00]
    _, scales = quantize(block(0.0), power_of_two_scales=True)
    assert scales.item() == 2.0**-22  # 1e-4 / 448 = 2.23e-7, 2**-22 = 2.38e-7


@both
def test_each_block_has_its_own_scale(quantize: Quantize) -> None:
    """[2, 256] gives scales [2, 2], row by row."""
    x = torch.ones(2, 256)
    x[0, 128:], x[1, :128], x[1, 128:] = 2.0, 4.0, 8.0
    q, scales = quantize(x)
    assert torch.equal(scales, torch.tensor([[1.0, 2.0], [4.0, 8.0]]) / 448)
    assert q.view(torch.uint8).unique().tolist() == [0x7E]


@both
def test_multiplier_is_rounded_once(quantize: Quantize) -> None:
    """448 / amax is one division: 1 / scale, or x / scale, gives another code for some values."""
    amax = torch.arange(1, 2, 2.0**-12)
    limit = torch.full_like(amax, 448.0)  # torch computes 448.0 / amax as a product with a reciprocal
    multiplier, other = limit / amax, 1.0 / (amax / limit)
    differs = (multiplier != other).nonzero().flatten()
    assert len(differs) > 100
    # The values at half steps of E4M3 are where the last bit of the multiplier decides.
    halves = torch.arange(0, 448, 0.0625)
    checked = 0
    for index in differs[:200].tolist():
        x = halves / multiplier[index]
        right, wrong = (x * multiplier[index]).to(FP8), (x * other[index]).to(FP8)
        for place in (right.view(torch.uint8) != wrong.view(torch.uint8)).nonzero().flatten().tolist()[:1]:
            q, _ = quantize(block(amax[index].item(), x[place].item()))
            assert q[0, 1].float() == right[place].float()
            checked += 1
    assert checked > 10


def samples(dtype: torch.dtype) -> torch.Tensor:
    """[rows, 256] of many magnitudes, with ties, zeros, tiny and huge values."""
    generator = torch.Generator().manual_seed(1)
    limit = 4.0 if dtype == FP16 else 37.0
    magnitude = 10.0 ** (torch.rand(20, 1, generator=generator) * 2 * limit - limit)
    normal = torch.randn(20, 256, generator=generator) * magnitude
    ties = (torch.arange(-448, 448) + 0.5).repeat(2).view(-1, 256)
    ties = torch.cat([ties, ties * 2.0**-12, ties * 1.37])
    tiny = torch.randn(2, 256, generator=generator) * 1e-5  # below the floor of amax
    subnormal = torch.randn(2, 256, generator=generator) * 1e-40
    wide = torch.randn(4, 256, generator=generator) * 10.0 ** torch.randint(-6, 4, (4, 256), generator=generator)
    special = torch.zeros(3, 256)
    special[1] = -0.0
    special[2, 7] = torch.finfo(FP16 if dtype == FP16 else FP32).max / 2
    return torch.cat([normal, ties, tiny, subnormal, wide, special]).to(dtype)


@scales_of
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_equals_reference(recipe: str, device: str, dtype: torch.dtype, power_of_two: bool) -> None:
    """Bit for bit, codes and scales; a GPU's division must be the IEEE one."""
    x, options = samples(dtype), {"power_of_two_scales": power_of_two, "recipe": recipe}
    q, scales = (each.cpu() for each in quantize_fp8(x.to(device), **options))  # type: ignore[arg-type]
    want_q, want_scales = reference.quantize_fp8(x, **options)  # type: ignore[arg-type]
    assert q.shape == want_q.shape == x.shape
    assert scales.shape == want_scales.shape == ((len(x), 2) if recipe == "block" else (len(x),))
    assert scales.dtype == FP32
    assert torch.equal(scales.view(torch.int32), want_scales.view(torch.int32))
    assert torch.equal(q.view(torch.uint8), want_q.view(torch.uint8))


def test_every_code_survives() -> None:
    """All finite values of E4M3, quantised with scale 1, come back as themselves."""
    every = torch.arange(256, dtype=torch.uint8)
    x = every[(every & 0x7F) != 0x7F].view(FP8).float()
    x = torch.nn.functional.pad(x, (0, 2), value=448.0).view(2, 128)
    q, scales = quantize_fp8(x)
    assert scales.tolist() == [[1.0], [1.0]]
    assert torch.equal(q.view(torch.uint8), x.to(FP8).view(torch.uint8))
    assert torch.equal(dequantize_fp8(q, scales), x)


@scales_of
def test_round_trip(power_of_two: bool) -> None:
    """3 mantissa bits: off by 2**-4 of the value, or half the smallest step where it is small."""
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(2))
    q, scales = quantize_fp8(x, power_of_two_scales=power_of_two)
    back = dequantize_fp8(q, scales)
    step = scales.repeat_interleave(128, 1) * 2.0**-10
    assert ((back - x).abs() <= torch.maximum(x.abs() * 2.0**-4, step) * 1.0001).all()
    assert dequantize_fp8(q, scales, BF16).dtype == BF16
    assert torch.equal(dequantize_fp8(q, scales, BF16), back.to(BF16))


def test_shapes() -> None:
    """Leading dimensions are kept, also none and empty ones."""
    for shape in ((128,), (0, 256), (2, 3, 128)):
        q, scales = quantize_fp8(torch.ones(shape))
        assert (q.shape, scales.shape) == (shape, (*shape[:-1], shape[-1] // 128))


def test_blocks_of_weights() -> None:
    """Each 128 x 128 block by itself is a long row with one scale; leading dimensions are kept."""
    w = torch.randn(2, 256, 384) * torch.rand(2, 2, 3).mul(9).exp().repeat_interleave(128, 1).repeat_interleave(128, 2)
    q, scales = quantize_fp8_blocks(w)
    assert (q.shape, scales.shape) == (w.shape, (2, 2, 3))
    for e, i, j in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(3)).tolist():
        here = (e, slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
        amax = w[here].abs().max()
        assert scales[e, i, j] == amax / torch.tensor(448.0)
        want = (w[here] * (torch.tensor(448.0) / amax)).to(FP8)
        assert torch.equal(q[here].view(torch.uint8), want.view(torch.uint8))
    with pytest.raises(ShapeMismatch, match=r"^w is \[2, 100, 128\]"):
        quantize_fp8_blocks(torch.zeros(2, 100, 128))


@pytest.mark.parametrize("quantize", [quantize_fp8, quantize_fp8_blocks])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_results_are_contiguous(quantize: Quantize, dtype: torch.dtype) -> None:
    """Whatever the strides of what they are of: GEMMs and dispatch take nothing else."""
    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(0)).to(dtype).t()
    for found, wanted in zip(quantize(x), quantize(x.contiguous()), strict=True):
        assert found.is_contiguous()
        assert torch.equal(found.float(), wanted.float())


@pytest.mark.parametrize("power_of_two", [False, True])
def test_rows_have_one_scale(power_of_two: bool) -> None:
    """A row is quantised as a block of 128 is. Channels of weights are rows."""
    x = torch.randn(3, 2, 128, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[[1.0]], [[300.0]], [[0.0]]]
    )
    options = {"power_of_two_scales": power_of_two}
    by_row, by_block = quantize_fp8(x, recipe="row", **options), quantize_fp8(x, **options)
    assert by_row[1].shape == (3, 2)
    assert torch.equal(by_row[0].float(), by_block[0].float())
    assert torch.equal(by_row[1], by_block[1][..., 0])
    wide = torch.cat([x[0], 300 * x[0]], 1)
    q, scales = quantize_fp8(wide, recipe="row", **options)
    assert torch.equal(scales, quantize_fp8(wide[:, 128:], recipe="row", **options)[1])
    torch.testing.assert_close(dequantize_fp8(q, scales), wide, rtol=2**-4, atol=2**-10 * scales.max().item())


def test_bad_input() -> None:
    """Named errors with what was expected and what came."""
    with pytest.raises(InvalidArgument, match=r"recipe is 'rows', expected one of block, row"):
        quantize_fp8(torch.ones(2, 128), recipe="rows")
    with pytest.raises(ShapeMismatch, match=r"x is \[2, 0\], expected a last dimension"):
        quantize_fp8(torch.ones(2, 0), recipe="row")
    with pytest.raises(ShapeMismatch, match=r"scales is \[2\], expected \[3, 2\]: one for each row"):
        dequantize_fp8(torch.ones(3, 2, 128).to(FP8), torch.ones(2))
    with pytest.raises(ShapeMismatch, match=r"x is \[2, 100\], expected a last dimension that is a multiple of 128"):
        quantize_fp8(torch.ones(2, 100))
    with pytest.raises(DtypeMismatch, match=r"x is torch\.int32, expected bfloat16, float16, float32 or float64"):
        quantize_fp8(torch.ones(2, 128, dtype=torch.int32))
