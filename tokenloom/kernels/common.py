"""What the host sides of kernels share: dtypes by number, how rows are cut into stages, how a call opens."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from tokenloom.errors import InvalidArgument
from tokenloom.plan import align_up

HOPPER = (9, 0)
"""Compute capability of the GPUs that kernels are compiled for."""
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""As in device/tile/values.cuh."""
LAYOUTS = {"token": 0, "expert": 1, "rank": 2}
"""As in device/sync/symmetric.cuh."""
MAX_SHARED_BYTES = 232448
"""Shared memory that one block of an sm_90 GPU may have."""
LARGEST_STAGE_BYTES = 7168
"""Four rows of 7 KB in flight per warp fill the links; larger stages only make the ring shorter."""
MOST_STAGES = 8
CONTROL_BYTES = 32
"""Of each stage: an mbarrier, and its part of the tags of RowStream."""
STAGE_UNIT = 128
"""Stages are aligned to this many bytes."""


def ring(row_bytes: int, warps: int, other_bytes: int, least_bytes: int) -> tuple[int, int, int]:
    """How a row streams through the rings of ``warps`` warps: (bytes of a stage, stages, shared memory of the block).

    Args:
        other_bytes: shared memory beside the rings.
        least_bytes: what the rings' memory is used for before; the block has at least that and ``other_bytes``.

    Raises:
        InvalidArgument: the block needs so much other shared memory that no ring fits beside it.
    """
    room = MAX_SHARED_BYTES - other_bytes - 1024
    largest = min(LARGEST_STAGE_BYTES, (room // (2 * warps) - CONTROL_BYTES) // STAGE_UNIT * STAGE_UNIT)
    if largest < STAGE_UNIT or room < least_bytes + 2 * warps * CONTROL_BYTES:
        raise InvalidArgument(
            f"a block's counts per expert take {other_bytes + least_bytes} of its {MAX_SHARED_BYTES} bytes of shared "
            "memory, which leaves no room for rows; use fewer experts, another layout, or backend='collective'"
        )
    segments = -(-row_bytes // largest)
    stage_bytes = align_up(-(-row_bytes // segments), STAGE_UNIT)
    stages = min(MOST_STAGES, room // (warps * (stage_bytes + CONTROL_BYTES)))
    stages = min(stages, (room - least_bytes) // (warps * CONTROL_BYTES))
    rings = max(warps * stages * stage_bytes, least_bytes)
    return stage_bytes, stages, rings + warps * stages * CONTROL_BYTES + other_bytes + 512


NUM_FIELDS = 13
"""What ranks must agree on, at most; kFields of device/sync/call.cuh."""


def uint64_fields(*names: str) -> list[tuple[str, Any]]:
    """Fields of a ctypes.Structure that hold addresses or offsets."""
    return [(name, ctypes.c_uint64) for name in names]


def int32_fields(*names: str) -> list[tuple[str, Any]]:
    """Fields of a ctypes.Structure that hold 32-bit integers."""
    return [(name, ctypes.c_int32) for name in names]


class Call(ctypes.Structure):
    """Mirror of Call in device/sync/call.cuh, which says what each value is."""

    _fields_ = [
        *uint64_fields("peers", "flags", "rows", "epoch", "blocks_out", "claimed", "record", "fault", "fault_claimed"),
        *uint64_fields("timeout_ns", "trace"),
        *int32_fields("rank", "status", "region"),
        ("fields", ctypes.c_int32 * NUM_FIELDS),
    ]
