"""The storing warps of a GEMM by themselves, on the emulator: rows that cannot be trusted are not stored."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from tests.kernels.one_gpu import EmulatedKernel
from tests.support import emulator
from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.common import int32_fields, uint64_fields
from tokenloom.kernels.gemm.launch import TILE_COLUMNS, TILE_HEIGHTS

pytestmark = pytest.mark.skipif(emulator.CXX is None, reason="no g++")


class StoredTileArgs(ctypes.Structure):
    """Mirror of StoredTileArgs in stored_tile.cuh."""

    _fields_ = [*uint64_fields("peers", "homes", "fault_claimed"), *int32_fields("expires", "turns")]


@pytest.mark.parametrize("turns", [0, 100])
@pytest.mark.parametrize("expires", [False, True])
def test_a_wait_that_expires_while_a_tile_is_awaited(expires: bool, turns: int) -> None:
    """The storing warps wait for the tile already. Its rows have no homes then: those of others lie there."""
    path = str(Path(__file__).with_name("stored_tile.cuh"))
    threads = 2 * 128 + 64
    kernel = EmulatedKernel(KernelSpec("stored_tile", path, (), StoredTileArgs, threads, shared_bytes=80 * 1024), 0)
    (rows,), columns = TILE_HEIGHTS["block"], TILE_COLUMNS["block"]
    results = torch.zeros(rows, 2 * columns, dtype=torch.uint8)
    homes = torch.arange(rows, dtype=torch.int32).flip(0)
    peers, fault_claimed = torch.tensor([results.data_ptr()]), torch.zeros(1, dtype=torch.int32)
    for name, tensor in (("peers", peers), ("homes", homes), ("fault_claimed", fault_claimed)):
        setattr(kernel.args, name, tensor.data_ptr())
    kernel.args.expires, kernel.args.turns = expires, turns
    kernel.launch(1, 0)
    assert (results == (not expires)).all()
