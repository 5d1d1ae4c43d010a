"""The warps that give each row of activations one scale, by themselves: every code, every distance of scales."""

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
from tokenloom.kernels.gemm.launch import TILE_ROWS, tile_places, warps_that_store
from tokenloom.ops.quant import share_row_scales
from tokenloom.reference import _e4m3_values, _nearest_e4m3

needs_compiler = pytest.mark.skipif(emulator.CXX is None, reason="no g++")
each_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=needs_compiler), pytest.param("cuda", marks=needs_one_gpu)]
)
FP8 = torch.float8_e4m3fn
MOST_HALVINGS = 40
SHARE_ROWS = 2
"""kRescaledRows of device/roles/gate.cuh."""


class RescaleArgs(ctypes.Structure):
    """Mirror of RescaleArgs in rescale.cuh."""

    _fields_ = [
        *uint64_fields("values", "from", "tile_scales", "row_scales", "stored", "claimed", "offsets"),
        ("stored_by", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
    ]


def rescaled(
    device: str, codes: torch.Tensor, scales: torch.Tensor, counts: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What three warps make of the codes of rows and of their tiles' scales, while another stores the codes."""
    rows, width = codes.shape
    offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    stored, claimed = torch.zeros(tile_places(rows, len(counts)), dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    values, row_scales = torch.full((rows, width), 0x7F, dtype=torch.uint8), torch.full((rows,), torch.nan)
    given = (values, codes.view(torch.uint8), scales, row_scales, stored, claimed, offsets)
    tensors = [each.to(device).clone() for each in given]
    path = str(Path(__file__).with_name("rescale.cuh"))
    shape = (("num_experts", len(counts)), ("k", width))
    spec = KernelSpec("rescale", path, shape, RescaleArgs, 32)
    kernel: Any = EmulatedKernel(spec, 0) if device == "cpu" else Kernel(spec, 0)
    for (name, _), tensor in zip(RescaleArgs._fields_, tensors, strict=False):
        setattr(kernel.args, name, tensor.data_ptr())
    kernel.args.stored_by = stored_by = warps_that_store(2 * width)
    kernel.launch(4, 0 if device == "cpu" else torch.cuda.current_stream().cuda_stream)
    out, _, _, row_scales, stored, *_ = (each.cpu() for each in tensors)
    shares = 0
    for expert, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        for row in range(begin, end, TILE_ROWS):
            place, of_tile = row // TILE_ROWS + expert, -(-min(end - row, TILE_ROWS) // SHARE_ROWS)
            assert stored[place] == stored_by + of_tile, "GEMM2 waits for each share once"
            shares += stored_by + of_tile
    assert stored.sum() == shares
    return out.view(FP8), row_scales


def nearest(codes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The codes that are nearest to the products, from a table of values; a NaN stays one."""
    products = codes.view(FP8).double() * factors.double()
    found = _nearest_e4m3(products.nan_to_num(), _e4m3_values()).view(torch.uint8)
    return torch.where(products.isnan(), codes.view(torch.uint8), found)


@each_device
def test_every_code_and_distance(device: str) -> None:
    """Rows of two tiles, of which the second has the row's scale, in turn with rows whose first one has it."""
    scales = torch.tensor([[2.0**-halvings, 1.0] for halvings in range(MOST_HALVINGS)])
    scales = torch.cat([scales, scales.flip(1)]) * 2.0**-5
    all_codes = torch.arange(256, dtype=torch.uint8).expand(len(scales), 256)
    out, row_scales = rescaled(device, all_codes.view(FP8), scales, [len(scales)])
    assert (row_scales == 2.0**-5).all()
    want = nearest(all_codes, (scales / 2.0**-5).repeat_interleave(128, 1))
    lost = all_codes & 0x7F == 0x7F
    assert (out.view(torch.uint8)[lost] & 0x7F == 0x7F).all()
    assert torch.equal(out.view(torch.uint8)[~lost], want[~lost])


@each_device
@pytest.mark.parametrize(("counts", "width"), [([3, 0, 130, 1, 257], 384), ([5], 2048), ([2, 3], 5120)])
def test_rows_of_experts(device: str, counts: list[int], width: int) -> None:
    """Each row has its own largest scale, whatever shares and tiles it lies in, and whichever of its tiles has it."""
    generator = torch.Generator().manual_seed(width)
    rows = sum(counts)
    codes = torch.randint(0, 256, (rows, width), generator=generator).to(torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    scales = 2.0 ** torch.randint(-22, 4, (rows, width // 128), generator=generator)
    got, want = rescaled(device, codes.view(FP8), scales, counts), share_row_scales(codes.view(FP8), scales)
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
