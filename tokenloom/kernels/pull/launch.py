"""The host side of the kernel that pulls experts: its arguments and its variants."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.common import int32_fields, uint64_fields

THREADS = 512
MOST_SLOTS = 4096
"""Of a rank: a block lists those that it fills in shared memory."""
UNIT_BYTES = 4
"""What a slot has of each tensor is a multiple of it; copies are fastest in multiples of 16."""


class PullExpertsArgs(ctypes.Structure):
    """Mirror of PullExpertsArgs in pull_experts.cuh, which says what each value is."""

    _fields_ = [
        *uint64_fields("peers", "parts", "experts", "shares", "num_shares"),
        *int32_fields("num_parts", "rank"),
    ]


@dataclass(frozen=True)
class PullExpertsVariant:
    """One compiled form of the kernel.

    Attributes:
        slots_per_rank: at most :data:`MOST_SLOTS`.
    """

    slots_per_rank: int

    def __str__(self) -> str:
        return f"pull_experts, {self.slots_per_rank} slots"

    def spec(self) -> KernelSpec:
        """What to compile and how to launch it: with any number of blocks."""
        shape = {"slots_per_rank": self.slots_per_rank, "threads": THREADS}
        path = "kernels/pull/pull_experts.cuh"
        return KernelSpec("pull_experts", path, tuple(shape.items()), PullExpertsArgs, threads=THREADS)
