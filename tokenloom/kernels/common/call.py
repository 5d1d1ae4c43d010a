"""Arguments of kernels as ctypes structures, and those of every call."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

HEADER_WORDS = 4
"""Words of what ranks tell each other when a call opens, before counts; kHeaderWords of device/transport/call.cuh."""
STAMPED_WORD_BYTES = 8
"""Of a word that carries its call; StampedWord of device/ptx/types.cuh."""
TURNS = 4
"""Calls that take turns in headers, and in regions that ranks write before others have opened; kTurns of
device/sync/wait.cuh."""
TURN_WORDS = 3
"""int32 words of device memory that say which call is next, and who takes no part; kTurnWords of
device/transport/call.cuh."""
CLAIMS = 3
"""Kinds of work in one kernel that warps claim; kClaims there."""
MOST_ARRIVALS = 8
"""Buffers of a communicator in which rows say by themselves that they are here; kMostArrivals there."""
MARKS = ("begun", "counted", "heard", "placed", "sent", "notified", "filled", "summed", "done")
"""What a block has done, by Mark of device/transport/call.cuh, when ``Call.trace`` asks.

It has begun; its counts are known; all ranks' counts are here; places are known; its own rows are sent; the others are
notified; further or staged places are filled, or own tokens packed (MegaMoE); its own tokens are summed (combine); it
is about to leave."""
MARK_WORDS = 16
"""Words of a block's times; kMarks there."""
PARTS = {"whole": 0, "send": 1, "receive": 2}
"""Which part of a call a kernel is; Part there."""


def uint64_fields(*names: str) -> list[tuple[str, Any]]:
    """Fields of a ctypes.Structure that hold addresses or offsets."""
    return [(name, ctypes.c_uint64) for name in names]


def int32_fields(*names: str) -> list[tuple[str, Any]]:
    """Fields of a ctypes.Structure that hold 32-bit integers."""
    return [(name, ctypes.c_int32) for name in names]


class Deadline(ctypes.Structure):
    """Mirror of Deadline in device/sync/wait.cuh, which says what each value is."""

    _fields_ = uint64_fields("fault", "fault_claimed", "timeout_ns")


class Call(ctypes.Structure):
    """Mirror of Call in device/transport/call.cuh, which says what each value is."""

    _fields_ = [
        *uint64_fields("peers", "headers", "epoch", "half_epoch", "blocks_out", "claimed", "fault"),
        *uint64_fields("fault_claimed", "open_timeout_ns", "timeout_ns", "trace", "some_flags", "num_some_flags"),
        *uint64_fields("block_flags", "left_flags", "arrivals", "options_hash", "record"),
        *int32_fields("status", "region"),
        ("sequence", ctypes.c_uint32),
        *int32_fields("rank"),
    ]


_FORMATS = {ctypes.c_uint64: "Q", ctypes.c_int32: "i", ctypes.c_uint32: "I"}


class FieldsAtOnce:
    """Adjacent fields of a structure, written by one ``struct.pack_into``.

    Args:
        structure: of uint64 and 32-bit fields.
        names: of its fields, in their order.

    Attributes:
        offset: bytes before the first of them.
        write: ``write(instance, offset, *values)``, a value for each name.
    """

    def __init__(self, structure: type[ctypes.Structure], *names: str) -> None:
        types: dict[str, Any] = {field[0]: field[1] for field in structure._fields_}
        packer = struct.Struct("=" + "".join(_FORMATS[types[name]] for name in names))
        self.offset: int = getattr(structure, names[0]).offset
        last = getattr(structure, names[-1])
        assert packer.size == last.offset + last.size - self.offset, f"{names} do not lie side by side"
        self.write = packer.pack_into


OPENING_FIELDS = FieldsAtOnce(Call, "options_hash", "record", "status", "region", "sequence")
"""Opening fields that every launch writes. The structure of a kernel begins with :class:`Call`."""
