"""Products with weights of four bits, on the emulator: the bits of the same weights in FP8."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.one_gpu import EmulatedKernel
from tests.support import emulator
from tests.support.emulator.gemm import one_gpu
from tests.support.slow import mostly_slow
from tokenloom.kernels.gemm.launch import GroupedGemmVariant, tile_heights
from tokenloom.ops import gemm
from tokenloom.ops.quant import MXFP4, quantize_fp8, weights_for
from tokenloom.ops.quant.packed_weights import pack_weights

pytestmark = pytest.mark.skipif(emulator.CXX is None, reason="no g++")


@pytest.mark.parametrize("tile_rows", mostly_slow(tile_heights("row", four_bits=True), [64]))
@pytest.mark.parametrize(
    ("counts", "n", "k"), [([3], 256, 128), ([0, 70, 1, 130], 256, 384), ([17, 40], 384, 256), ([300, 16], 128, 128)]
)
def test_the_same_bits_as_fp8(counts: list[int], n: int, k: int, tile_rows: int) -> None:
    """For all numbers of columns of a product, odd strips, tiles that share, and experts without rows."""
    generator = torch.Generator().manual_seed(n + k)
    experts, rows = len(counts), sum(counts)
    codes = torch.randint(0, 256, (experts, n, k // 2), generator=generator, dtype=torch.int64).to(torch.uint8)
    exponents = torch.randint(110, 122, (experts, n, k // 32), generator=generator).to(torch.uint8)
    w, scales, _ = weights_for("row", codes, exponents, four_bits=MXFP4)
    a, a_scales = quantize_fp8(torch.randn(rows, k, generator=generator), recipe="row")
    offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    results = []
    for weights in (w, pack_weights(w)):
        variant = GroupedGemmVariant(
            experts, n, k, recipe="row", tile_rows=tile_rows, four_bits=weights.dtype == torch.uint8
        )
        kernel: Any = EmulatedKernel(variant.spec(), 0)
        out = torch.full((rows, n), torch.nan, dtype=torch.bfloat16)
        with one_gpu():
            gemm._launch(kernel, a, a_scales, weights, scales, offsets, None, out)
        results.append(out.view(torch.int16))
    assert torch.equal(*results)
