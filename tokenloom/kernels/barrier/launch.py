"""The host side of the barrier kernel: its arguments and its variants."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.common import Call, describe, int32_fields, uint64_fields
from tokenloom.plan import Plan

THREADS = 128


class BarrierArgs(ctypes.Structure):
    """Mirror of BarrierArgs in barrier.cuh, which says what each value is."""

    _fields_ = [("call", Call), *uint64_fields("opened", "cleared"), *int32_fields("num_cleared", "padding")]


@dataclass(frozen=True)
class BarrierVariant:
    """One compiled form of the barrier kernel.

    Attributes:
        plan: sizes of the group.
    """

    plan: Plan

    def __str__(self) -> str:
        return f"barrier, {describe(self.plan)}"

    def spec(self) -> KernelSpec:
        """What to compile and how to launch it: with one block."""
        shape = {
            "num_ranks": self.plan.num_ranks,
            "num_experts": self.plan.num_experts,
            "threads": THREADS,
        }
        path = "kernels/barrier/barrier.cuh"
        return KernelSpec("barrier", path, tuple(shape.items()), BarrierArgs, threads=THREADS)
