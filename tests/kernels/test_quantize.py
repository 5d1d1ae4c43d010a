"""The warps that quantise rows of activations, by themselves: beside the GEMM that stores them."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.one_gpu import EmulatedKernel, needs_one_gpu
from tests.support import emulator
from tokenloom.jit.compiler import KernelSpec
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.common import uint64_fields
from tokenloom.kernels.gemm.launch import LEAST_STEP, tile_places, warps_that_store
from tokenloom.ops.quant import quantize_fp8

needs_compiler = pytest.mark.skipif(emulator.CXX is None, reason="no g++")
each_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=needs_compiler), pytest.param("cuda", marks=needs_one_gpu)]
)
FP8 = torch.float8_e4m3fn


class QuantizeArgs(ctypes.Structure):
    """Mirror of QuantizeArgs in quantize.cuh."""

    _fields_ = [
        *uint64_fields("rows", "from", "scales", "stored", "claimed", "offsets"),
        ("stored_by", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
    ]


def quantised(device: str, rows: torch.Tensor, counts: list[int], tile_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What three warps make of rows, while another stores them."""
    num_rows, width = rows.shape
    offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    stored = torch.zeros(tile_places(num_rows, len(counts)), dtype=torch.int32)
    claimed, scales = torch.zeros(1, dtype=torch.int32), torch.full((num_rows,), torch.nan)
    tensors = [each.to(device).clone() for each in (torch.full_like(rows, torch.nan), rows, scales, stored)]
    tensors += [claimed.to(device), offsets.to(device)]
    path = str(Path(__file__).with_name("quantize.cuh"))
    spec = KernelSpec(
        "quantize",
        path,
        (("num_experts", len(counts)), ("k", width), ("tile_rows", tile_rows)),
        QuantizeArgs,
        32,
    )
    kernel: Any = EmulatedKernel(spec, 0) if device == "cpu" else Kernel(spec, 0)
    for (name, _), tensor in zip(QuantizeArgs._fields_, tensors, strict=False):
        setattr(kernel.args, name, tensor.data_ptr())
    kernel.args.stored_by = stored_by = warps_that_store(2 * width, "row")
    kernel.launch(4, 0 if device == "cpu" else torch.cuda.current_stream().cuda_stream)
    out, _, scales, stored, *_ = (each.cpu() for each in tensors)
    want = torch.zeros_like(stored)
    for expert, count in enumerate(counts):
        for row, rows_of_tile in parts(int(offsets[expert]), count, tile_rows):
            want[row // LEAST_STEP + expert] = stored_by + rows_of_tile
    assert torch.equal(stored, want), "each row is counted once, where GEMM2 waits for it"
    return out.view(FP8)[:, :width], scales


def parts(begin: int, count: int, most: int) -> list[tuple[int, int]]:
    """First row and rows of each tile of an expert: the last two evenly where the last would have few."""
    full, rest = divmod(count, most)
    sizes = [most] * full + [rest] * bool(rest)
    if full and 0 < rest <= most // 2:
        half = -(-((most + rest + 1) // 2) // 16) * 16
        sizes[-2:] = half, most + rest - half
    return [(begin + sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def by_row(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_fp8(rows, power_of_two_scales=True, recipe="row")


@each_device
@pytest.mark.parametrize(
    ("counts", "width"),
    [([3, 0, 130, 1, 257], 384), ([5], 2048), ([2, 3], 5120), ([700, 384, 385], 128), ([131, 9], 768)],
)
@pytest.mark.parametrize("tile_rows", [128, 160, 256])
def test_rows_of_experts(device: str, counts: list[int], width: int, tile_rows: int) -> None:
    """Each row by itself, whatever shares and tiles it lies in. Its codes lie in its own place."""
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(sum(counts), width, generator=generator)
    rows *= 2.0 ** torch.randint(-30, 8, (sum(counts), width // 128), generator=generator).repeat_interleave(128, 1)
    rows[-1] = 0
    rows = rows.bfloat16()
    (codes, scales), want = quantised(device, rows, counts, tile_rows), by_row(rows)
    assert torch.equal(scales, want[1])
    assert torch.equal(codes.view(torch.uint8), want[0].view(torch.uint8))
