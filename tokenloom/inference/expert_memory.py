"""The memory of a MegaMoE between the kernels of a call, which only its rank writes."""

from __future__ import annotations

import math

import torch

from tokenloom.kernels.gemm.launch import BLOCK, tile_places
from tokenloom.plan import Plan
from tokenloom.runtime.leftovers import keep_until_idle

FP8 = torch.float8_e4m3fn
COPY_ROOM = 1.25
"""Room for copies of rows, relative to the routes that a rank has when routing is even."""


class ExpertMemory:
    """Route lists, and activations of the worst routing. route_lists.cuh and grouped_gemm.cuh say what each part is.

    Almost any other routing leaves enough room of the activations' for copies of its rows. Nothing is allocated before
    :meth:`allocate`.

    Args:
        plan: of the communicator.
        intermediate: I. num_shared_experts: experts that every token of this rank goes to.

    Attributes:
        num_local: experts on this rank, shared ones included.
        sizes: shape and dtype of each part.
        counted: what kernels count from 0 in each call: ``taken``, and ``stored`` tiles of rows.
        activations: [routes, I], in the order of the route lists.
        copy_room: rows of ``copies``.
        copies: the same memory as rows of H. The part behind a call's last activation has room for received rows.
    """

    offsets: torch.Tensor
    rows: torch.Tensor
    row_weights: torch.Tensor
    targets: torch.Tensor
    counted: torch.Tensor
    copied: torch.Tensor
    met: torch.Tensor
    activation_scales: torch.Tensor
    activation_values: torch.Tensor
    taken: torch.Tensor
    stored: torch.Tensor
    activations: torch.Tensor
    copies: torch.Tensor
    copy_room: int

    def __init__(self, plan: Plan, intermediate: int, num_shared_experts: int) -> None:
        self.num_local = plan.experts_per_rank + num_shared_experts
        self._hidden, self._intermediate = plan.hidden, intermediate
        # Most routes of this rank's experts under any routing.
        self._most_routes = most = plan.worst_case_rows("expert") + num_shared_experts * plan.max_tokens_per_rank
        even_routes = plan.max_tokens_per_rank * (plan.top_k + num_shared_experts)
        copied = min(int(even_routes * COPY_ROOM), most)
        activations = max(most * intermediate, copied * (intermediate + plan.hidden))
        int32, float32 = torch.int32, torch.float32
        self.sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "offsets": ((self.num_local + 1,), int32),
            "rows": ((most,), int32),
            "row_weights": ((most,), float32),
            "targets": ((most,), torch.int64),
            "counted": ((self.num_local + tile_places(most, self.num_local),), int32),
            "copied": ((2,), int32),
            "met": ((1,), int32),
            "activation_values": ((max(activations, plan.hidden),), FP8),
            "activation_scales": ((most, intermediate // BLOCK), float32),
        }

    @property
    def num_bytes(self) -> int:
        """Of all parts."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.sizes.values())

    def allocate(self, device: torch.device) -> None:
        """Make all parts, filled with zeros."""
        for name, (shape, dtype) in self.sizes.items():
            setattr(self, name, torch.zeros(shape, dtype=torch.uint8 if dtype == FP8 else dtype, device=device))
        values: torch.Tensor = self.activation_values.view(FP8)
        self.activations = values[: self._most_routes * self._intermediate].view(-1, self._intermediate)
        self.copies = values[: len(values) // self._hidden * self._hidden].view(-1, self._hidden)
        self.copy_room = len(self.copies)
        self.taken, self.stored = self.counted.split([self.num_local, len(self.counted) - self.num_local])
        keep_until_idle(self, device, *(getattr(self, name) for name in self.sizes))
