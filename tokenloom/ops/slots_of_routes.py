"""Expert ids to physical slots: which of its expert's slots each route goes to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenloom.errors import InvalidArgument
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.common import spec_of
from tokenloom.kernels.slots_of_routes import launch


def require_room(device: torch.device, num_experts: int) -> None:
    """Raise InvalidArgument unless routes to so many experts can be placed on the device."""
    if device.type == "cuda" and num_experts > launch.MAX_EXPERTS:
        raise InvalidArgument(
            f"num_experts is {num_experts}, on GPUs a placement has at most {launch.MAX_EXPERTS}; leave it out"
        )


class SlotTable:
    """The slots of each expert, in device memory that stays where it is.

    Whatever :meth:`write` wrote last counts for a CUDA graph's replay, whenever it was captured.

    Args:
        num_experts: E. num_slots: most slots of all experts together.
        rank: this one, whose routes are placed.
        device: of the routes.

    Attributes:
        starts: int32 [E + 1], where the slots of each expert begin in ``slots``.
        slots: int32 [num_slots].
    """

    def __init__(self, num_experts: int, num_slots: int, rank: int, device: torch.device) -> None:
        self.starts = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
        self.slots = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self._rank, self._num_experts = rank, num_experts
        self._kernel: Kernel | None = None

    def write(self, slots_by_expert: Sequence[Sequence[int]]) -> None:
        """Replace the slots of all experts, in the order of the current stream.

        Args:
            slots_by_expert: slots of each expert, ascending; none where all are on ranks that are gone.
        """
        starts, flat = [0], list[int]()
        for slots in slots_by_expert:
            flat += slots
            starts.append(len(flat))
        flat += [0] * (len(self.slots) - len(flat))
        write_numbers(self.starts, starts)
        write_numbers(self.slots, flat)

    def slots_of_routes(self, topk_ids: torch.Tensor, stream: int | None = None) -> torch.Tensor:
        """Return the slot of each route.

        A route goes to slot number (rank + index among this rank's routes of the expert) mod (slots of the expert).

        Args:
            topk_ids: int32 or int64 [T, K], contiguous. Ids that name no expert count as -1.
            stream: handle of the current stream, where the caller knows it.

        Returns:
            int32 [T, K], -1 where there is no route, or its expert has no slot.
        """
        if not topk_ids.is_cuda:
            return find_slots(topk_ids, self.starts, self.slots, self._rank)
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


def find_slots(topk_ids: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor, rank: int) -> torch.Tensor:
    """Return what :meth:`SlotTable.slots_of_routes` does, by torch alone."""
    num_experts = len(starts) - 1
    ids = topk_ids.flatten().long()
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)  # the last: no route
    ordered, order = torch.sort(ids, stable=True)
    index = torch.empty_like(ids)
    index[order] = torch.arange(len(ids), device=ids.device) - torch.searchsorted(ordered, ordered)
    begins = torch.nn.functional.pad(starts, (0, 1)).long()
    replicas = torch.nn.functional.pad(starts.diff(), (0, 1)).long()[ids]
    places = begins[ids] + (rank + index) % replicas.clamp(min=1)
    found = slots[places.clamp(max=len(slots) - 1)]
    return torch.where(replicas > 0, found, -1).view(topk_ids.shape)
