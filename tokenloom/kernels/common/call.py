"""Arguments of kernels as ctypes structures, and those of every call."""

from __future__ import annotations

import ctypes
from typing import Any

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
