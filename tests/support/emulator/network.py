"""What kernels on the emulator know of NCCL: a device communicator, and windows of ranks in this process."""

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


def signals_of(num_signals: int) -> torch.Tensor:
    """Memory for the signals of a rank, in all contexts."""
    return torch.zeros(CONTEXTS * num_signals, dtype=torch.int64)


def device_comm(rank: int, signals: Sequence[torch.Tensor], num_signals: int) -> DevComm:
    """That of a rank, with the signals of all."""
    comm = DevComm(rank, len(signals), num_signals=num_signals)
    for other, each in enumerate(signals):
        comm.signals[other] = each.data_ptr()
    return comm
