"""Grouped GEMMs on the emulator: loads by tensor maps, the ring, products, epilogues and stores, in random orders."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.one_gpu import EmulatedKernel
from tests.ops.grouped_operands import assert_close, expected, operands
from tests.support import emulator
from tests.support.emulator.gemm import one_gpu
from tokenloom.kernels.gemm import launch
from tokenloom.kernels.gemm.launch import GroupedGemmVariant, QuantizeRowsVariant, SwigluFp8Epilogue
from tokenloom.ops import gemm
from tokenloom.ops.quant import dequantize_fp8, quantize_fp8
from tokenloom.plan import RECIPES, align_up

pytestmark = pytest.mark.skipif(emulator.CXX is None, reason="no g++")

CASES = {
    "one tile": ([128], 256, 128),
    "tails and empty experts": ([0, 70, 0, 1, 130, 0], 256, 384),
    "N is no multiple of the tile": ([70, 20], 384, 512),
    "no rows": ([0, 0], 256, 128),
    "many short tiles": ([300, 0, 129, 500], 512, 128),
    "more blocks of K than stages": ([300, 20], 256, 768),
}
FAST = "tails and empty experts"


mostly_slow = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != FAST)) for name in CASES]
)


@mostly_slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_gemm(name: str, recipe: str) -> None:
    check_gemm(name, claims=False, recipe=recipe)


@mostly_slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_tiles_that_are_claimed(name: str, recipe: str) -> None:
    """Each tile once, also in the next launch: the count is 0 again."""
    check_gemm(name, claims=True, launches=3, recipe=recipe)


@mostly_slow
@pytest.mark.parametrize("claims", [False, True])
def test_activations_with_a_scale_per_row(name: str, claims: bool) -> None:
    """Rounded to bfloat16 by whichever cluster multiplied them, then quantised as whole rows."""
    counts, n, k = CASES[name]
    n = 2 * align_up(n, 512)  # two pairs of tiles, which two clusters may take
    a, a_scales, w1, w1_scales, offsets = operands(counts, n, k, "cpu", recipe="row")
    a_scales /= a_scales.mean() * k**0.5 * w1_scales.mean() * 448 * 200
    rows = sum(counts)
    epilogue = SwigluFp8Epilogue(power_of_two_scales=True)
    kernel: Any = EmulatedKernel(
        GroupedGemmVariant(*w1.shape, epilogue=epilogue, claims=claims, recipe="row").spec(), 0
    )
    quantize: Any = EmulatedKernel(QuantizeRowsVariant(n // 2).spec(), 0)
    claimed, row_scales = torch.zeros(1, dtype=torch.int32), torch.full((rows,), torch.nan)
    activations = torch.empty(rows, n // 2, dtype=torch.bfloat16)
    out = torch.empty(rows, n // 2, dtype=torch.float8_e4m3fn)
    kernel.args.claimed = claimed.data_ptr()
    with one_gpu():
        gemm._launch(kernel, a, a_scales, w1, w1_scales, offsets, None, activations)
        gemm._launch_quantize(quantize, activations, out, row_scales, offsets, None)
    assert claimed == 0
    want_codes, want_scales = quantize_fp8(activations, power_of_two_scales=True, recipe="row")
    assert torch.equal(row_scales, want_scales)
    assert torch.equal(out.view(torch.uint8), want_codes.view(torch.uint8))
    for e, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        gates, ups = gemm.separate_gate_and_up(expected(a[begin:end], a_scales[begin:end], w1, w1_scales, e).T[None])[
            0
        ].T.chunk(2, 1)
        want = torch.nn.functional.silu(gates) * ups
        got = dequantize_fp8(out[begin:end], row_scales[begin:end]).double()
        limit = (2**-4 + 2**-8) * want.abs() + (2**-9 * row_scales[begin:end, None]).double()
        assert ((got - want).abs() <= 1.01 * limit).all(), f"expert {e}"


@pytest.mark.parametrize(("recipe", "apart"), [("block", 256), ("row", 512)])
def test_windows(recipe: str, apart: int) -> None:
    """Window w of map n - 1 begins at row w of the matrix, and ends behind n rows. None reaches past the matrix."""
    rows = torch.zeros(100, apart, dtype=torch.float8_e4m3fn)[:, :256]
    with one_gpu():
        maps = launch.row_windows(rows, recipe)
    assert maps.shape == (launch.TILE_HEIGHTS[recipe][-1], 128)
    for n, words in enumerate(maps.view(torch.int64).tolist(), start=1):
        windows = min(n, len(rows))
        sizes, box, strides = [256, windows, 101 - windows], [launch.BLOCK, launch.ROW_BOX], [apart, apart]
        assert words[:10] == [rows.data_ptr(), 1, *sizes, *box, 1, *strides], n


def check_gemm(name: str, claims: bool, launches: int = 1, recipe: str = "block") -> None:
    counts, n, k = CASES[name]
    a, a_scales, b, b_scales, offsets = operands(counts, n, k, "cpu", recipe=recipe)
    out = torch.empty(sum(counts), n, dtype=torch.bfloat16)
    kernel: Any = EmulatedKernel(GroupedGemmVariant(*b.shape, claims=claims, recipe=recipe).spec(), 0)
    claimed = torch.zeros(1, dtype=torch.int32)
    kernel.args.claimed = claimed.data_ptr()
    for _ in range(launches):
        out.fill_(torch.nan)
        with one_gpu():
            gemm._launch(kernel, a, a_scales, b, b_scales, offsets, None, out)
        assert claimed == 0
        for e, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
            want = expected(a[begin:end], a_scales[begin:end], b, b_scales, e)
            assert_close(out[begin:end], want, f"expert {e}")
