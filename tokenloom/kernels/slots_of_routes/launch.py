"""The host side of the kernel that finds the physical slot of each route."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.common import int32_fields, uint64_fields

THREADS = 1024
"""Routes of a block, too."""
MAX_EXPERTS = 6000
"""Two words for each lie in static shared memory."""


class SlotsOfRoutesArgs(ctypes.Structure):
    """Mirror of SlotsOfRoutesArgs in slots_of_routes.cuh, which says what each value is."""

    _fields_ = [
        *uint64_fields("topk_ids", "slot_ids", "starts", "slots"),
        ("routes", ctypes.c_int64),
        *int32_fields("ids_are_int64", "rank"),
        *uint64_fields("shares", "heads", "before"),
    ]


@dataclass(frozen=True)
class SlotsOfRoutesVariant:
    """One compiled form of the kernel.

    Attributes:
        num_experts: E, at most :data:`MAX_EXPERTS`.
        split: routes go on by the split of a batch.
    """

    num_experts: int
    split: bool = False

    def __str__(self) -> str:
        return f"slots_of_routes, e{self.num_experts}{', split' if self.split else ''}"

    def spec(self) -> KernelSpec:
        """What to compile and how to launch it: with a block for each THREADS routes."""
        shape = {"num_experts": self.num_experts, "split": int(self.split), "threads": THREADS}
        path = "kernels/slots_of_routes/slots_of_routes.cuh"
        return KernelSpec("slots_of_routes", path, tuple(shape.items()), SlotsOfRoutesArgs, threads=THREADS)


def point(
    args: SlotsOfRoutesArgs,
    topk_ids: torch.Tensor,
    slot_ids: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    rank: int,
) -> int:
    """Fill in the arguments. Returns the blocks to launch, 0 where there is no route.

    Args:
        topk_ids: int32 or int64 [T, K]. slot_ids: int32 [T, K], written. Both contiguous.
        starts: int32 [E + 1]. slots: int32, the slots of all experts.
        rank: of this source.
    """
    args.topk_ids, args.slot_ids = topk_ids.data_ptr(), slot_ids.data_ptr()
    args.starts, args.slots, args.rank = starts.data_ptr(), slots.data_ptr(), rank
    args.routes, args.ids_are_int64 = topk_ids.numel(), topk_ids.dtype == torch.int64
    return -(-topk_ids.numel() // THREADS)


def point_to_split(args: SlotsOfRoutesArgs, shares: torch.Tensor, heads: torch.Tensor, before: torch.Tensor) -> None:
    """Fill in what the form by a split has besides.

    Args:
        shares: int32 [n, 4]. heads, before: int32 [W * S]. As the kernel ``split_batch`` leaves them.
    """
    args.shares, args.heads, args.before = shares.data_ptr(), heads.data_ptr(), before.data_ptr()
