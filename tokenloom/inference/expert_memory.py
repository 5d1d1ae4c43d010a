"""The memory of a MegaMoE that only its rank's kernels write."""

from __future__ import annotations

import math

import torch

from tokenloom.kernels.common import block_count_words
from tokenloom.kernels.gemm.launch import BLOCK, tile_places
from tokenloom.kernels.moe.launch import packed_bytes
from tokenloom.plan import Plan
from tokenloom.runtime.deferred_release import keep_until_idle

FP8 = torch.float8_e4m3fn
LINE = 32
"""Words from one count to the next, so that each has a line of the cache to itself."""


class ExpertMemory:
    """Memory in which kernels meet. routes_to_send.cuh and grouped_gemm.cuh say what each part is.

    Nothing can overflow: there is room for the worst routing. Nothing is allocated before :meth:`allocate`.

    Args:
        plan: of the communicator.
        intermediate: I. num_shared_experts: experts that every token of this rank goes to.
        recipe: one of ``RECIPES``.

    Attributes:
        num_local: experts on this rank, shared ones included.
        num_places: most rows that they can have.
        sizes: shape and dtype of each part.
        counted: what is 0 before each call: ``begun``, claims of rows that are ``quantized``, and ``stored`` tiles of
            rows. The meeting sets it back.
        packed: own tokens as they are sent.
        activations: FP8 [places, I]. With recipe "row" they are bfloat16 first; FP8 values become the first half of
            each row.
        activation_scales: [places, I / 128], with recipe "row" [places].
    """

    offsets: torch.Tensor
    expected: torch.Tensor
    counted: torch.Tensor
    begun: torch.Tensor
    stored: torch.Tensor
    quantized: torch.Tensor
    met: torch.Tensor
    block_counts: torch.Tensor
    order: torch.Tensor
    packed: torch.Tensor
    activations: torch.Tensor
    activation_scales: torch.Tensor

    def __init__(self, plan: Plan, intermediate: int, num_shared_experts: int, recipe: str) -> None:
        self.num_local, self._intermediate = plan.experts_per_rank + num_shared_experts, intermediate
        tokens, by_row = plan.max_tokens_per_rank, recipe == "row"
        self.num_places = places = plan.worst_case_rows("expert") + num_shared_experts * tokens
        int32, float32 = torch.int32, torch.float32
        self.sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "offsets": ((self.num_local + 1,), int32),
            "expected": ((self.num_local, plan.num_ranks), int32),
            "counted": ((2 * LINE + tile_places(places, self.num_local),), int32),
            "met": ((1,), int32),
            "block_counts": ((block_count_words(plan),), int32),
            "order": ((tokens * plan.top_k, 4), int32),
            "packed": ((tokens, packed_bytes(plan.hidden, recipe)), torch.uint8),
            "activations": ((places, intermediate), torch.bfloat16 if by_row else FP8),
            "activation_scales": ((places,) if by_row else (places, intermediate // BLOCK), float32),
        }

    def quantised_rows(self) -> torch.Tensor:
        """Return FP8 [places, I], a view of ``activations``."""
        return self.activations.view(FP8)[:, : self._intermediate]

    @property
    def num_bytes(self) -> int:
        """Of all parts."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.sizes.values())

    def allocate(self, device: torch.device) -> None:
        """Make all parts, filled with zeros."""
        with torch.inference_mode(False):  # calls write to them in any mode
            for name, (shape, dtype) in self.sizes.items():
                made = torch.zeros(shape, dtype=torch.uint8 if dtype == FP8 else dtype, device=device)
                setattr(self, name, made.view(dtype))
            self.begun, self.quantized, self.stored = self.counted.split([LINE, LINE, len(self.counted) - 2 * LINE])
        keep_until_idle(self, device, *(getattr(self, name) for name in self.sizes))
