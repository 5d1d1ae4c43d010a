"""Expert ids to physical slots: which of its expert's slots each route goes to."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from tokenloom.errors import InvalidArgument
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.common import spec_of
from tokenloom.kernels.slots_of_routes import launch
from tokenloom.kernels.split_batch import launch as split_launch
from tokenloom.ops.split_batch import EMPTY, TAKEN, Share, routes_of_slots, split_batch


def require_room(device: torch.device, num_experts: int) -> None:
    """Raise InvalidArgument unless routes to so many experts can be placed on the device."""
    if device.type == "cuda" and num_experts > launch.MAX_EXPERTS:
        raise InvalidArgument(
            f"num_experts is {num_experts}, on GPUs a placement has at most {launch.MAX_EXPERTS}; leave it out"
        )


def require_room_to_split(device: torch.device, num_ranks: int, slots_per_rank: int) -> None:
    """Raise InvalidArgument unless batches over so many ranks and slots can be split on the device."""
    if device.type == "cuda":
        split_launch.require_room(num_ranks, slots_per_rank)


class BatchSplit(NamedTuple):
    """Who computes what in one batch, see :mod:`tokenloom.ops.split_batch`. Tensors are int32, on the device.

    The shares of a slot are a chain from the one that begins first, of the slot's first routes, to that of its last.

    Attributes:
        slot_experts: [W * S], the expert in each slot of all ranks, -1 for none.
        before: [W * S], how many routes of earlier source ranks each slot has by the placement.
        heads: [W * S], the row of each slot's first share, -1 for none.
        shares: [n, 4], the slot, the first route and the target of each share, and the row of the share of the same
            slot that begins next, -1 for none. There may be further rows, which mean nothing.
        summary: [4], routes of the fullest rank by the placement and by the split, most experts that a rank pulls, and
            shares.
    """

    slot_experts: torch.Tensor
    before: torch.Tensor
    heads: torch.Tensor
    shares: torch.Tensor
    summary: torch.Tensor


class SlotTable:
    """The slots of each expert, in device memory that stays where it is.

    Whatever :meth:`write` wrote last counts for a CUDA graph's replay, whenever it was captured.

    Args:
        num_experts: E. num_ranks: W. slots_per_rank: S, slots of each rank.
        rank: this one, whose routes are placed.
        device: of the routes.

    Attributes:
        starts: int32 [E + 1], where the slots of each expert begin in ``slots``.
        slots: int32 [W * S].
        experts: int32 [W * S], the expert in each slot, -1 for none, and for all slots of ranks that are gone; -2 for
            slots that experts are on their way to.
        masked: int32 [W], 1 for ranks that are gone.
    """

    def __init__(self, num_experts: int, num_ranks: int, slots_per_rank: int, rank: int, device: torch.device) -> None:
        self.starts = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
        self.slots = torch.zeros(num_ranks * slots_per_rank, dtype=torch.int32, device=device)
        self.experts = torch.full_like(self.slots, EMPTY)
        self.masked = torch.zeros(num_ranks, dtype=torch.int32, device=device)
        self._rank, self._num_experts, self._slots_per_rank = rank, num_experts, slots_per_rank
        self._kernels: dict[bool, Kernel] = {}  # by whether routes go on by a split
        self._split_variant = split_launch.SplitBatchVariant(num_ranks, num_experts, slots_per_rank)
        self._split_kernel: Kernel | None = None

    def write(
        self, slots_by_expert: Sequence[Sequence[int]], masked: Collection[int] = (), taken: Collection[int] = ()
    ) -> None:
        """Replace the slots of all experts, in the order of the current stream.

        Args:
            slots_by_expert: slots of each expert, ascending; none where all are on ranks that are gone.
            masked: ranks that are gone.
            taken: slots that experts are on their way to.
        """
        starts, flat, experts = [0], list[int](), [EMPTY] * len(self.slots)
        for expert, slots in enumerate(slots_by_expert):
            flat += slots
            starts.append(len(flat))
            for slot in slots:
                experts[slot] = expert
        for slot in taken:
            if experts[slot] == EMPTY:
                experts[slot] = TAKEN
        flat += [0] * (len(self.slots) - len(flat))
        write_numbers(self.starts, starts)
        write_numbers(self.slots, flat)
        write_numbers(self.experts, experts)
        write_numbers(self.masked, [int(rank in masked) for rank in range(len(self.masked))])
        self._experts, self._masked = experts, frozenset(masked)

    def split(self, counts: torch.Tensor, rows_per_pull: int, always: bool, stream: int | None = None) -> BatchSplit:
        """Split a batch over the slots of experts and empty ones; see :mod:`tokenloom.ops.split_batch`.

        Args:
            counts: integers [W, E], routes of each source rank to each expert, none of masked ranks. On GPUs int32,
                contiguous; nobody waits for them.
            rows_per_pull, always: when it pays.
            stream: handle of the current stream, where the caller knows it.
        """
        if not counts.is_cuda:
            return self._split_here(counts, rows_per_pull, always)
        if self._split_kernel is None:
            self._split_kernel = Kernel(spec_of(self._split_variant), counts.device.index)
        outputs = split_launch.make_outputs(self._split_variant, counts.device)
        table = self.starts, self.slots, self.experts, self.masked
        split_launch.point(self._split_kernel.args, counts, table, outputs, self._rank, rows_per_pull, always)
        if stream is None:
            stream = torch.cuda.current_stream(counts.device).cuda_stream
        self._split_kernel.launch(1, stream)
        shares, summary, slot_experts, before, heads = outputs
        return BatchSplit(slot_experts, before, heads, shares, summary)

    def _split_here(self, counts: torch.Tensor, rows_per_pull: int, always: bool) -> BatchSplit:
        per_rank, experts = self._slots_per_rank, self._experts
        table = [experts[first : first + per_rank] for first in range(0, len(experts), per_rank)]
        found = counts.numpy()
        split = split_batch(found, table, self._masked, rows_per_pull=rows_per_pull, always=always)
        before = routes_of_slots(found[: self._rank], experts).sum(0)
        heads, shares = chained(split.shares, len(experts))
        summary = split.rows_before, split.rows, split.pulls, len(split.shares)
        numbers = split.slot_experts, before, heads, shares, summary
        experts_now, before_now, heads_now, rows, summary_now = (
            torch.as_tensor(each, dtype=torch.int32) for each in numbers
        )
        return BatchSplit(experts_now, before_now, heads_now, rows.view(-1, 4), summary_now)

    def slots_of_routes(
        self, topk_ids: torch.Tensor, stream: int | None = None, split: BatchSplit | None = None
    ) -> torch.Tensor:
        """Return the slot of each route.

        A route goes to slot number (rank + index among this rank's routes of the expert) mod (slots of the expert),
        or to the target of the share of it that the route belongs to.

        Args:
            topk_ids: int32 or int64 [T, K], contiguous. Ids that name no expert count as -1.
            stream: handle of the current stream, where the caller knows it.
            split: of the batch. None: there are no shares.

        Returns:
            int32 [T, K], -1 where there is no route, or its expert has no slot.
        """
        if not topk_ids.is_cuda:
            return find_slots(topk_ids, self.starts, self.slots, self._rank, split)
        kernel = self._kernels.get(split is not None)
        if kernel is None:
            variant = launch.SlotsOfRoutesVariant(self._num_experts, split is not None)
            kernel = self._kernels[split is not None] = Kernel(spec_of(variant), topk_ids.device.index)
        slot_ids = torch.empty(topk_ids.shape, dtype=torch.int32, device=topk_ids.device)
        blocks = launch.point(kernel.args, topk_ids, slot_ids, self.starts, self.slots, self._rank)
        if split is not None:
            launch.point_to_split(kernel.args, split.shares, split.heads, split.before)
        if blocks:
            if stream is None:
                stream = torch.cuda.current_stream(topk_ids.device).cuda_stream
            kernel.launch(blocks, stream)
        return slot_ids


def chained(shares: Sequence[Share], num_slots: int) -> tuple[list[int], list[tuple[int, int, int, int]]]:
    """Return heads and shares as :class:`BatchSplit` has them, of shares of which a slot's last routes come first."""
    heads, rows = [EMPTY] * num_slots, list[tuple[int, int, int, int]]()
    for row, (slot, first, target) in enumerate(shares):
        rows.append((slot, first, target, heads[slot]))
        heads[slot] = row
    return heads, rows


def write_numbers(out: torch.Tensor, numbers: Sequence[int]) -> None:
    """Write int32 numbers to a tensor, in the order of the current stream, which the host does not await."""
    out.copy_(torch.tensor(numbers, dtype=torch.int32, device="cpu", pin_memory=out.is_cuda), non_blocking=True)


def find_slots(
    topk_ids: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor, rank: int, split: BatchSplit | None = None
) -> torch.Tensor:
    """Return what :meth:`SlotTable.slots_of_routes` does, by torch alone."""
    num_experts = len(starts) - 1
    ids = topk_ids.flatten().long()
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)  # the last: no route
    ordered, order = torch.sort(ids, stable=True)
    index = torch.empty_like(ids)
    index[order] = torch.arange(len(ids), device=ids.device) - torch.searchsorted(ordered, ordered)
    begins = torch.nn.functional.pad(starts, (0, 1)).long()
    replicas = torch.nn.functional.pad(starts.diff(), (0, 1)).long()[ids]
    number = replicas.clamp(min=1)
    found = slots[(begins[ids] + (rank + index) % number).clamp(max=len(slots) - 1)]
    if split is not None:
        found = in_shares(found, split.before[found] + index // number, split)
    return torch.where(replicas > 0, found, EMPTY).view(topk_ids.shape)


def in_shares(slots: torch.Tensor, places: torch.Tensor, split: BatchSplit) -> torch.Tensor:
    """Return the target of each route's share, or its slot where it belongs to none.

    Args:
        slots: of routes. places: of routes among all routes of their slots.
    """
    targets, share = slots, split.heads[slots]
    while bool((share >= 0).any()):
        _, first, target, following = split.shares[share.clamp(min=0)].unbind(-1)
        belongs = (share >= 0) & (first <= places)
        targets = torch.where(belongs, target, targets)
        share = torch.where(belongs, following, EMPTY)
    return targets
