"""Grouped GEMMs on the emulator: loads by tensor maps, the ring, products, epilogues and stores, in random orders."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.one_gpu import EmulatedKernel
from tests.ops.grouped_operands import assert_close, expected, operands
from tests.support import emulator
from tests.support.emulator.gemm import one_gpu
from tokenloom.kernels.gemm.launch import GroupedGemmVariant
from tokenloom.ops import gemm

pytestmark = pytest.mark.skipif(emulator.CXX is None, reason="no g++")

CASES = {
    "one tile": ([128], 256, 128),
    "tails and empty experts": ([0, 70, 0, 1, 130, 0], 256, 384),
    "N is no multiple of the tile": ([70, 20], 384, 512),
}
FAST = "tails and empty experts"


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != FAST)) for name in CASES])
def test_gemm(name: str) -> None:
    counts, n, k = CASES[name]
    a, a_scales, b, b_scales, offsets = operands(counts, n, k, "cpu")
    out = torch.full((sum(counts), n), torch.nan, dtype=torch.bfloat16)
    kernel: Any = EmulatedKernel(GroupedGemmVariant(*b.shape).spec(), 0)
    with one_gpu():
        gemm._launch(kernel, a, a_scales, b, b_scales, offsets, None, out)
    for e, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        want = expected(a[begin:end], a_scales[begin:end], b, b_scales, e)
        assert_close(out[begin:end], want, f"expert {e}")
