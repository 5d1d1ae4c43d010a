"""The host side of the kernel that sets signals to zero."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.common import int32_fields, uint64_fields

THREADS = 128


class SignalsArgs(ctypes.Structure):
    """Mirror of SignalsArgs in signals.cuh, which says what each value is."""

    _fields_ = [*uint64_fields("comm"), *int32_fields("signals", "padding")]


@dataclass(frozen=True)
class SignalsVariant:
    """The one form of the kernel. NCCL's headers come before its source."""

    def __str__(self) -> str:
        return "signals"

    def spec(self) -> KernelSpec:
        """What to compile behind NCCL's headers, and how to launch it: with one block."""
        path = "kernels/signals/signals.cuh"
        return KernelSpec("signals", path, (("threads", THREADS),), SignalsArgs, threads=THREADS)
