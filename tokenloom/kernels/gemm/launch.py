"""The host side of the grouped FP8 GEMM: its arguments and its variants."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from tokenloom.errors import InvalidArgument
from tokenloom.jit.compiler import KernelSpec
from tokenloom.jit.kernel import TensorMap, tensor_map
from tokenloom.kernels.common import MAX_SHARED_BYTES, int32_fields, uint64_fields

THREADS = 384
CLUSTER = 2
TILE_ROWS, TILE_COLUMNS, BLOCK = 128, 256, 128
"""kTileRows, kTileColumns and kBlock of args.cuh."""
A_BOX_ROWS, B_BOX_ROWS = 32, 128
OUT_ROW_BYTES = {False: TILE_COLUMNS * 2 + 16, True: TILE_COLUMNS // 2 + 16}
"""Of a tile's rows on their way to memory, without and with SwiGLU."""
SCALE_BLOCKS = 8
SCALE_BYTES = 2 * 4 * SCALE_BLOCKS * (TILE_ROWS + 2)
"""Two buffers with the scales of 8 blocks of K."""
MOST_STAGES = 4
TRACE_ROLES = ("load", "gather", "multiply 0", "multiply 1", "epilogue 0", "epilogue 1", "store")
TRACED_TILES = 128
"""TraceRole and kTracedTiles of trace.cuh."""


@dataclass(frozen=True)
class Swiglu:
    """What becomes of sums that are gates and ups; tokenloom/gemm.py says what each option means."""

    clamped: bool
    power_of_two_scales: bool
    fast_math: bool


class GroupedGemmArgs(ctypes.Structure):
    """Mirror of GroupedGemmArgs in args.cuh, which says what each value is."""

    _fields_ = [
        ("a", TensorMap),
        ("b", TensorMap),
        ("a_scale_map", TensorMap),
        *uint64_fields("a_rows", "a_scales", "row_index", "copied", "b_scales", "offsets", "out", "row_targets"),
        *uint64_fields("out_scales", "row_weights"),
        ("clamp", ctypes.c_float),
        *int32_fields("padding"),
        *uint64_fields("trace"),
        *int32_fields("first_expert", "end_expert"),
        ("spare", ctypes.c_uint64 * 3),
    ]


def grouped_gemm_spec(
    num_experts: int,
    n: int,
    k: int,
    swiglu: Swiglu | None = None,
    gathers: bool = False,
    scatters: bool = False,
    traced: bool = False,
) -> KernelSpec:
    """The variant for weights [num_experts, n, k].

    Args:
        gathers: rows of a are where an index says.
        scatters: rows of the output go to addresses of their own.
        traced: it writes when each role of each block works on each tile, see :func:`trace_times`.

    Raises:
        InvalidArgument: so many experts that too little shared memory is left.
    """
    other_bytes = TILE_ROWS * OUT_ROW_BYTES[swiglu is not None] + SCALE_BYTES + 4 * (num_experts + 1) + 264
    if gathers:
        other_bytes += 4 * TILE_ROWS
    if swiglu is not None:
        other_bytes += 4 * TILE_ROWS
    stage_bytes = (TILE_ROWS + TILE_COLUMNS) * BLOCK + 16
    stages = min(MOST_STAGES, (MAX_SHARED_BYTES - other_bytes) // stage_bytes)
    if stages < 2:
        raise InvalidArgument(f"{num_experts} experts on a rank leave {stages} stages of shared memory for operands")
    shared_bytes = -(-(stages * stage_bytes + other_bytes) // 1024) * 1024  # what holds it is aligned to 1024 bytes
    shape = {
        "num_experts": num_experts,
        "n": n,
        "k": k,
        "gathers": int(gathers),
        "scatters": int(scatters),
        "traced": int(traced),
        "swiglu": int(swiglu is not None),
        "clamped": int(swiglu is not None and swiglu.clamped),
        "power_of_two": int(swiglu is not None and swiglu.power_of_two_scales),
        "fast_math": int(swiglu is not None and swiglu.fast_math),
        "stages": stages,
    }
    path = "kernels/gemm/grouped_gemm.cuh"
    items = tuple(shape.items())
    return KernelSpec(
        "grouped_gemm", path, items, GroupedGemmArgs, THREADS, cluster=CLUSTER, shared_bytes=shared_bytes
    )


def trace_times(blocks: int, device: torch.device) -> torch.Tensor:
    """Zeros, int64 [blocks, role, tile, 2], in which a traced variant leaves nanoseconds of beginnings and ends."""
    return torch.zeros(blocks, len(TRACE_ROLES), TRACED_TILES, 2, dtype=torch.int64, device=device)


def operand_map(tensor: torch.Tensor, box_rows: int) -> TensorMap:
    """Of a contiguous E4M3 matrix or stack of matrices, in boxes of 128 values x ``box_rows`` rows."""
    return tensor_map(tensor, (BLOCK, box_rows, *[1] * (tensor.dim() - 2)), swizzle=True)


def wide_scales(k: int) -> bool:
    """Whether TMA can find the scales of rows of ``k`` values: 16 bytes at a time."""
    return k % (4 * BLOCK) == 0


def scale_map(scales: torch.Tensor) -> TensorMap:
    """Of a contiguous float32 matrix whose rows are multiples of 16 bytes, in boxes of 8 values x 128 rows."""
    return tensor_map(scales, (SCALE_BLOCKS, TILE_ROWS))
