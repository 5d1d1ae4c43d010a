"""The host side of the grouped FP8 GEMM: its arguments and its variants."""

from __future__ import annotations

import ctypes

import torch

from tokenloom.jit.compiler import KernelSpec
from tokenloom.jit.kernel import TensorMap, tensor_map
from tokenloom.kernels.shape import MAX_SHARED_BYTES, uint64_fields

THREADS = 384
TILE_ROWS, TILE_COLUMNS, BLOCK = 128, 256, 128
"""kTileRows, kTileColumns and kBlock of grouped_gemm.cuh."""
STORE_BYTES = 2 * 64 * (64 * 2 + 16)
"""Two warpgroups' outputs on their way to memory."""


class GroupedGemmArgs(ctypes.Structure):
    """Mirror of GroupedGemmArgs in grouped_gemm.cuh, which says what each value is."""

    _fields_ = [
        ("a", TensorMap),
        ("b", TensorMap),
        *uint64_fields("a_scales", "b_scales", "offsets", "out"),
        ("spare", ctypes.c_uint64 * 4),
    ]


def grouped_gemm_spec(num_experts: int, n: int, k: int) -> tuple[KernelSpec, int]:
    """The variant for weights [num_experts, n, k]: (spec, dynamic shared memory)."""
    other_bytes = STORE_BYTES + 4 * (num_experts + 1) + 2048
    stage_bytes = (TILE_ROWS + TILE_COLUMNS) * BLOCK + 4 * TILE_ROWS + 16
    stages = min(4, (MAX_SHARED_BYTES - other_bytes) // stage_bytes)
    shared_bytes = stages * stage_bytes + other_bytes
    shape = {"num_experts": num_experts, "n": n, "k": k, "stages": stages, "shared_bytes": shared_bytes}
    spec = KernelSpec("grouped_gemm", "kernels/gemm/grouped_gemm.cuh", tuple(shape.items()), GroupedGemmArgs, THREADS)
    return spec, shared_bytes


def operand_map(tensor: torch.Tensor, box_rows: int) -> TensorMap:
    """Of a contiguous E4M3 matrix or stack of matrices, in boxes of 128 values x ``box_rows`` rows."""
    return tensor_map(tensor, (BLOCK, box_rows, *[1] * (tensor.dim() - 2)))
