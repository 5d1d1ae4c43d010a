"""FP8 weights that are packed in four bits, and back."""

from __future__ import annotations

import pytest
import torch

import tokenloom as tl
from tokenloom.ops.quant import packed_weights
from tokenloom.ops.quant.four_bits import MAGNITUDES
from tokenloom.ops.quant.packed_weights import shape_of_weights, unpack_weights

FP8 = torch.float8_e4m3fn


def test_all_codes_with_all_scales() -> None:
    """Each value of E2M1, with both signs, beside each other, times each power of two that there may be."""
    values = torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)])
    pairs = torch.cartesian_prod(values, values)  # [256, 2]
    groups = torch.zeros(12, 256, 32)
    groups[..., 0::2], groups[..., 1::2] = pairs[:, :1], pairs[:, 1:]
    groups *= 2.0 ** torch.arange(-5, 7)[:, None, None]
    w = groups.view(1, 256, 12 * 32).to(FP8)
    assert torch.equal(w.float().view(groups.shape), groups)
    packed = tl.pack_weights(w)
    assert packed.shape == (1, 2, 3, 8704)
    assert shape_of_weights(packed) == [1, 256, 384]
    assert torch.equal(unpack_weights(packed).view(torch.uint8), w.view(torch.uint8))


@pytest.mark.parametrize("four_bits", [tl.MXFP4, tl.FourBits(nibbles="high_first")])
@pytest.mark.parametrize("values_at_once", [1, packed_weights.VALUES_AT_ONCE])
def test_checkpoints(four_bits: tl.FourBits, values_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every channel has its own scale, and every place its own value."""
    monkeypatch.setattr(packed_weights, "VALUES_AT_ONCE", values_at_once)
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (2, 256, 192), generator=generator).to(torch.uint8)
    exponents = torch.randint(120, 132, (2, 256, 12), generator=generator).to(torch.uint8)
    w, _, _ = tl.weights_for("row", codes, exponents, four_bits=four_bits)
    assert torch.equal(unpack_weights(tl.pack_weights(w)).view(torch.uint8), w.view(torch.uint8))


@pytest.mark.parametrize(
    ("values", "misfits"),
    [
        ([5.0], 1),  # no value of E2M1
        ([6.0, 0.25], 1),  # two powers of two
        ([2.0**-7], 1),  # half of the least
        ([448.0], 1),
        ([6.0, 0.5], 0),
        ([384.0], 0),
        ([2.0**-6], 0),
        ([0.0], 0),
    ],
)
def test_what_does_not_fit(values: list[float], misfits: int) -> None:
    w = torch.zeros(1, 128, 128)
    w[0, 77, 40 : 40 + len(values)] = torch.tensor(values)
    if not misfits:
        assert torch.equal(unpack_weights(tl.pack_weights(w.to(FP8))).float(), w)
        return
    with pytest.raises(tl.InvalidArgument, match=f"^{misfits} of 512 groups of 32 values of w .*keep='fp8'"):
        tl.pack_weights(w.to(FP8))


def test_wrong_weights() -> None:
    with pytest.raises(tl.DtypeMismatch, match=r"w is torch.bfloat16, expected float8_e4m3fn"):
        tl.pack_weights(torch.zeros(1, 128, 128, dtype=torch.bfloat16))
    with pytest.raises(tl.ShapeMismatch, match=r"w is \[1, 128, 96\]"):
        tl.pack_weights(torch.zeros(1, 128, 96).to(FP8))
    with pytest.raises(tl.ShapeMismatch, match=r"w is \[0, 128, 128\], expected \[E, N, K\] of at least one expert"):
        tl.pack_weights(torch.zeros(0, 128, 128).to(FP8))
    with pytest.raises(tl.InvalidArgument, match="w is packed already"):
        tl.pack_weights(tl.pack_weights(torch.zeros(1, 128, 128).to(FP8)))
    with pytest.raises(tl.InvalidArgument, match="w is a list"):
        tl.pack_weights([1.0])  # type: ignore[arg-type]
