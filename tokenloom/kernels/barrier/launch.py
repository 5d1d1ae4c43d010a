"""The host side of the barrier kernel: its arguments and its variants."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.common import Call, describe, uint64_fields
from tokenloom.plan import Plan

THREADS = 128


class MeetRanksArgs(ctypes.Structure):
    """Mirror of MeetRanksArgs in meet_ranks.cuh, which says what each value is."""

    _fields_ = [("call", Call), *uint64_fields("met", "taken")]


@dataclass(frozen=True, kw_only=True)
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
            "experts_per_rank": self.plan.experts_per_rank,
            "threads": THREADS,
        }
        path = "kernels/moe/meet_ranks.cuh"
        return KernelSpec("meet_ranks", path, tuple(shape.items()), MeetRanksArgs, threads=THREADS)
