"""The host side of the kernel that gathers counts: its arguments and its variants."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.common import Call, describe, uint64_fields
from tokenloom.plan import Plan

THREADS = 256


class GatherCountsArgs(ctypes.Structure):
    """Mirror of GatherCountsArgs in gather_counts.cuh, which says what each value is."""

    _fields_ = [("call", Call), *uint64_fields("counts", "all_counts")]


@dataclass(frozen=True)
class GatherCountsVariant:
    """One compiled form of the kernel.

    Attributes:
        plan: sizes of the group, whose experts are slots.
        told: counts of each rank, at most as many as there are ranks and slots.
    """

    plan: Plan
    told: int

    def __str__(self) -> str:
        return f"gather_counts, {self.told} counts, {describe(self.plan)}"

    def spec(self) -> KernelSpec:
        """What to compile and how to launch it: with one block."""
        shape = {
            "num_ranks": self.plan.num_ranks,
            "num_experts": self.plan.num_experts,
            "told": self.told,
            "threads": THREADS,
        }
        path = "kernels/counts/gather_counts.cuh"
        return KernelSpec("gather_counts", path, tuple(shape.items()), GatherCountsArgs, threads=THREADS)
