"""What stands for NCCL on the emulator: a device communicator that kernels see, and an all-to-all of the host's."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

CONTEXTS, MOST_RANKS = 4, 32


class DevComm(ctypes.Structure):
    """Mirror of ncclDevComm in gin.h."""

    _fields_ = [
        ("rank", ctypes.c_int),
        ("num_ranks", ctypes.c_int),
        ("signals", ctypes.c_uint64 * MOST_RANKS),
        ("num_signals", ctypes.c_uint64),
    ]


class AllToAll(ctypes.Structure):
    """Mirror of AllToAll in emulator.cpp."""

    _fields_ = [
        ("from", ctypes.c_uint64),
        ("to", ctypes.c_uint64),
        ("part_bytes", ctypes.c_uint64),
        ("sequence", ctypes.c_uint64),
        ("rank", ctypes.c_uint32),
        ("ranks", ctypes.c_uint32),
    ]


def signals_of(num_signals: int) -> torch.Tensor:
    """Memory for the signals of a rank, in all contexts."""
    return torch.zeros(CONTEXTS * num_signals, dtype=torch.int64)


def device_comm(rank: int, signals: Sequence[torch.Tensor], num_signals: int) -> DevComm:
    """That of a rank, with the signals of all."""
    comm = DevComm(rank, len(signals), num_signals=num_signals)
    for other, each in enumerate(signals):
        comm.signals[other] = each.data_ptr()
    return comm
