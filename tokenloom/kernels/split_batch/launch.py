"""The host side of the kernel that splits a batch over ranks."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from tokenloom.errors import InvalidArgument
from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.common import MAX_RANKS, MAX_SHARED_BYTES, int32_fields, uint64_fields

THREADS = 512
"""Of the one block. With more of them, each would have too few registers for 16 sources at once."""
WORDS_OF_SLOT = 4
"""Of shared memory."""
SHARE_WORDS, SUMMARY_WORDS = 4, 4


class SplitBatchArgs(ctypes.Structure):
    """Mirror of SplitBatchArgs in split_batch.cuh, which says what each value is."""

    _fields_ = [
        *uint64_fields("counts", "starts", "slots", "experts", "masked"),
        *uint64_fields("shares", "summary", "slot_experts", "before", "heads"),
        *int32_fields("rank", "rows_per_pull", "always", "padding"),
    ]


@dataclass(frozen=True)
class SplitBatchVariant:
    """One compiled form of the kernel.

    Attributes:
        num_ranks: W. num_experts: E. slots_per_rank: S.
    """

    num_ranks: int
    num_experts: int
    slots_per_rank: int

    def __str__(self) -> str:
        return f"split_batch, ep{self.num_ranks} e{self.num_experts} s{self.slots_per_rank}"

    def spec(self) -> KernelSpec:
        """What to compile and how to launch it: with one block."""
        require_room(self.num_ranks, self.slots_per_rank)
        shape = {
            "num_ranks": self.num_ranks,
            "num_experts": self.num_experts,
            "slots_per_rank": self.slots_per_rank,
            "threads": THREADS,
        }
        return KernelSpec(
            "split_batch",
            "kernels/split_batch/split_batch.cuh",
            tuple(shape.items()),
            SplitBatchArgs,
            threads=THREADS,
            shared_bytes=shared_bytes(self.num_ranks, self.slots_per_rank),
        )


def shared_bytes(num_ranks: int, slots_per_rank: int) -> int:
    """Count what SplitMemory of split_batch.cuh takes."""
    return 4 * (WORDS_OF_SLOT * num_ranks * slots_per_rank + num_ranks + 1)


def require_room(num_ranks: int, slots_per_rank: int) -> None:
    """Raise InvalidArgument unless batches over so many ranks and slots can be split on a GPU."""
    if num_ranks > MAX_RANKS:
        raise InvalidArgument(f"num_ranks is {num_ranks}, on GPUs at most {MAX_RANKS} ranks share a batch")
    if shared_bytes(num_ranks, slots_per_rank) > MAX_SHARED_BYTES:
        most = (MAX_SHARED_BYTES // 4 - 1 - num_ranks) // (WORDS_OF_SLOT * num_ranks)
        raise InvalidArgument(
            f"slots_per_rank is {slots_per_rank}, on GPUs a batch of {num_ranks} ranks is split over at most {most} "
            "slots of each; use fewer slots or balance no batches"
        )


def make_outputs(
    variant: SplitBatchVariant, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make int32 tensors for the results, parts of one that has not been written.

    Returns:
        shares [(W - 1) * S, 4], summary [4], slot_experts, before and heads [W * S].
    """
    num_slots = variant.num_ranks * variant.slots_per_rank
    of_shares = SHARE_WORDS * (num_slots - variant.slots_per_rank)
    # Shares come first, since they are loaded in 16 bytes.
    sizes = [of_shares, SUMMARY_WORDS, num_slots, num_slots, num_slots]
    shares, *others = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    summary, slot_experts, before, heads = others
    return shares.view(-1, SHARE_WORDS), summary, slot_experts, before, heads


def point(
    args: SplitBatchArgs,
    counts: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    rank: int,
    rows_per_pull: int,
    always: bool,
) -> None:
    """Fill in the arguments. A launch has one block.

    Args:
        counts: int32 [W, E], contiguous.
        table: starts [E + 1], slots and experts [W * S], masked [W], all int32.
        outputs: as :func:`make_outputs` makes them, written.
        rank: this source. rows_per_pull, always: when a split pays.
    """
    args.counts = counts.data_ptr()
    args.starts, args.slots, args.experts, args.masked = (each.data_ptr() for each in table)
    args.shares, args.summary, args.slot_experts, args.before, args.heads = (each.data_ptr() for each in outputs)
    args.rank, args.rows_per_pull, args.always = rank, rows_per_pull, always
