"""The host side of the grouped GEMM of bfloat16: its arguments and its variants."""

from __future__ import annotations

import ctypes

from tokenloom.errors import InvalidArgument
from tokenloom.jit.compiler import KernelSpec
from tokenloom.jit.kernel import TensorMap
from tokenloom.kernels.shape import MAX_SHARED_BYTES, int32_fields, uint64_fields

THREADS = 384
CLUSTER = 2
TILE_ROWS, TILE_COLUMNS, DEPTH = 128, 256, 64
"""kTileRows, kTileColumns and kDepth of args.cuh."""
MOST_STAGES = 4
MOST_ITEMS = 8
"""Pairs of tiles that a cluster takes before it leaves, so that a transfer that comes later waits a third of a ms."""
STAGE_BYTES = (TILE_ROWS + TILE_COLUMNS) * DEPTH * 2 + 16
OUT_BYTES = TILE_ROWS * TILE_COLUMNS
"""Of half of a tile's columns on their way to memory."""


class Gemm16Args(ctypes.Structure):
    """Mirror of Gemm16Args in args.cuh, which says what each value is."""

    _fields_ = [
        ("a", TensorMap),
        ("b", TensorMap),
        *uint64_fields("offsets", "out", "activations", "row_weights", "claimed"),
        *int32_fields("most_items", "padding"),
        ("spare", ctypes.c_uint64 * 2),
    ]


def rows_spec(num_experts: int, n: int, k: int, across: bool, swiglu: bool = False) -> tuple[KernelSpec, int]:
    """Rows times weights [num_experts, n, k]; across: [num_experts, k, n]. (spec, dynamic shared memory)."""
    return _spec(num_experts, m=0, n=n, k=k, of_weights=0, b_across=int(across), swiglu=int(swiglu), adds=0)


def weights_spec(num_experts: int, m: int, n: int, adds: bool) -> tuple[KernelSpec, int]:
    """Sums of outer products of rows, [num_experts, m, n]: (spec, dynamic shared memory)."""
    return _spec(num_experts, m=m, n=n, k=0, of_weights=1, b_across=1, swiglu=0, adds=int(adds))


def clusters(num_experts: int, rows: int, spec: KernelSpec) -> int:
    """As many as take all items of work, of products of at most so many rows."""
    shape = dict(spec.shape)
    pair, strip = 2 * TILE_ROWS, TILE_COLUMNS // (2 if shape["swiglu"] else 1)
    columns = shape["n"] // (2 if shape["swiglu"] else 1)
    pairs = num_experts * -(-shape["m"] // pair) if shape["of_weights"] else rows // pair + num_experts
    return -(-pairs * -(-columns // strip) // MOST_ITEMS)


def _spec(num_experts: int, **shape: int) -> tuple[KernelSpec, int]:
    other_bytes = OUT_BYTES + 4 * (num_experts + 1) + 64
    stages = min(MOST_STAGES, (MAX_SHARED_BYTES - other_bytes) // STAGE_BYTES)
    if stages < 2:
        raise InvalidArgument(f"{num_experts} experts on a rank leave {stages} stages of shared memory for operands")
    shared_bytes = -(-(stages * STAGE_BYTES + other_bytes) // 1024) * 1024  # what holds it is aligned to 1024 bytes
    shape |= {"num_experts": num_experts, "stages": stages, "shared_bytes": shared_bytes}
    path = "kernels/gemm16/grouped_gemm16.cuh"
    return KernelSpec("grouped_gemm16", path, tuple(shape.items()), Gemm16Args, THREADS, cluster=CLUSTER), shared_bytes
