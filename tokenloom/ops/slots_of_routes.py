"""Expert ids to physical slots: which of its expert's slots each route goes to."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from tokenloom.errors import InvalidArgument
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.common import spec_of
from tokenloom.kernels.slots_of_routes import launch
from tokenloom.ops.split_batch import EMPTY, routes_of_slots, split_batch


def require_room(device: torch.device, num_experts: int) -> None:
    """Raise InvalidArgument unless routes to so many experts can be placed on the device."""
    if device.type == "cuda" and num_experts > launch.MAX_EXPERTS:
        raise InvalidArgument(
            f"num_experts is {num_experts}, on GPUs a placement has at most {launch.MAX_EXPERTS}; leave it out"
        )


class BatchSplit(NamedTuple):
    """Who computes what in one batch, see :mod:`tokenloom.ops.split_batch`. Tensors are int32, on the device.

    Attributes:
        slot_experts: [W * S], the expert in each slot of all ranks, -1 for none.
        before: [W * S], how many routes of earlier source ranks each slot has by the placement.
        shares: [n, 3], the slot, the first route and the target of each share, ascending.
        summary: [3], routes of the fullest rank by the placement and by the split, and most experts that a rank pulls.
    """

    slot_experts: torch.Tensor
    before: torch.Tensor
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
    """

    def __init__(self, num_experts: int, num_ranks: int, slots_per_rank: int, rank: int, device: torch.device) -> None:
        self.starts = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
        self.slots = torch.zeros(num_ranks * slots_per_rank, dtype=torch.int32, device=device)
        self._rank, self._num_experts, self._slots_per_rank = rank, num_experts, slots_per_rank
        self._kernel: Kernel | None = None

    def write(self, slots_by_expert: Sequence[Sequence[int]], masked: Collection[int] = ()) -> None:
        """Replace the slots of all experts, in the order of the current stream.

        Args:
            slots_by_expert: slots of each expert, ascending; none where all are on ranks that are gone.
            masked: ranks that are gone.
        """
        starts, flat, experts = [0], list[int](), [EMPTY] * len(self.slots)
        for expert, slots in enumerate(slots_by_expert):
            flat += slots
            starts.append(len(flat))
            for slot in slots:
                experts[slot] = expert
        flat += [0] * (len(self.slots) - len(flat))
        write_numbers(self.starts, starts)
        write_numbers(self.slots, flat)
        self._experts, self._masked = experts, frozenset(masked)

    def split(self, counts: torch.Tensor, rows_per_pull: int, always: bool) -> BatchSplit:
        """Split a batch over the slots of experts and empty ones; see :mod:`tokenloom.ops.split_batch`.

        Args:
            counts: integers [W, E], routes of each source rank to each expert, none of masked ranks.
            rows_per_pull, always: when it pays.
        """
        per_rank, experts = self._slots_per_rank, self._experts
        table = [experts[first : first + per_rank] for first in range(0, len(experts), per_rank)]
        found = counts.cpu().numpy()
        split = split_batch(found, table, self._masked, rows_per_pull=rows_per_pull, always=always)
        before = routes_of_slots(found[: self._rank], experts).sum(0)
        numbers = split.slot_experts, before, sorted(split.shares), (split.rows_before, split.rows, split.pulls)
        experts_now, before_now, shares, summary = (
            torch.as_tensor(each).to(counts.device, torch.int32) for each in numbers
        )
        return BatchSplit(experts_now, before_now, shares.view(-1, 3), summary)

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
        if self._kernel is None:
            variant = launch.SlotsOfRoutesVariant(self._num_experts)
            self._kernel = Kernel(spec_of(variant), topk_ids.device.index)
        slot_ids = torch.empty(topk_ids.shape, dtype=torch.int32, device=topk_ids.device)
        blocks = launch.point(self._kernel.args, topk_ids, slot_ids, self.starts, self.slots, self._rank)
        if blocks:
            if stream is None:
                stream = torch.cuda.current_stream(topk_ids.device).cuda_stream
            self._kernel.launch(blocks, stream)
        return slot_ids


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
    if split is not None and len(split.shares) and len(found):
        found = in_shares(found, split.before[found] + index // number, split.shares)
    return torch.where(replicas > 0, found, EMPTY).view(topk_ids.shape)


def in_shares(slots: torch.Tensor, places: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return the target of each route's share, or its slot where it belongs to none.

    Args:
        slots: of routes. places: of routes among all routes of their slots. shares: as in :class:`BatchSplit`.
    """
    owners, firsts, targets = shares.long().unbind(1)
    most = int(max(places.max(), firsts.max())) + 1
    share = torch.searchsorted(owners * most + firsts, slots * most + places, right=True) - 1
    belongs = (share >= 0) & (owners[share.clamp(min=0)] == slots)
    return torch.where(belongs, targets[share.clamp(min=0)], slots).to(slots.dtype)
