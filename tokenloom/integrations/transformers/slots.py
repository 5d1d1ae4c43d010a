"""Weights of a model's experts, which lie by expert, in the slots of a placement."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tokenloom.comm.placement import Placement
from tokenloom.comm.slot_rows import sum_at_owners
from tokenloom.ops.experts import Tensors
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.training.slot_moves import agreed_beside, moved, moves_between, moves_to_owners, terms_of

NAMES = ("w1", "w2", "w1_bias", "w2_bias")
TO_SLOTS = "experts to their slots"
"""The phase, for errors."""


class SlotWeights:
    """The weights of one module in the slots of this rank, kept while they need no gradient and stay as they are."""

    def __init__(self) -> None:
        self._kept: Tensors | None = None
        self._kept_for: tuple[object, ...] = ()

    def of(self, find_ranks: Callable[[], RankGroup], placement: Placement, tensors: Tensors) -> Tensors:
        """Give w1, w2 and their biases of this rank's slots. Collective, unless they are kept. Differentiable once.

        Args:
            find_ranks: gives the ranks, for collectives beside those of communicators.
            placement: which slots hold which experts.
            tensors: w1, w2 and their biases of this rank's experts.
        """
        given = {name: each for name, each in zip(NAMES, tensors, strict=True) if each is not None}
        trains = torch.is_grad_enabled() and any(each.requires_grad for each in given.values())
        wanted = (placement, *((each.data_ptr(), _changes(each)) for each in given.values()))
        if self._kept is not None and not trains and wanted == self._kept_for:
            return self._kept
        self._kept, self._kept_for = None, ()
        found = dict(zip(given, _InSlots.apply(find_ranks(), placement, *given.values()), strict=True))
        w1, w2, w1_bias, w2_bias = (found.get(name) for name in NAMES)
        assert w1 is not None
        assert w2 is not None
        in_slots: Tensors = (w1, w2, w1_bias, w2_bias)
        if not trains:
            self._kept, self._kept_for = in_slots, wanted
        return in_slots


def home_of(placement: Placement) -> Placement:
    """Give the placement of the model's own weights."""
    return Placement.default(placement.num_experts, placement.num_ranks)


def without_empty_slots(placement: Placement) -> Placement:
    """Put the first of a rank's own experts, which does not travel, into its empty slots."""
    table, own = placement.to_tensor(), home_of(placement).to_tensor()
    return Placement(torch.where(table < 0, own[:, :1], table), num_experts=placement.num_experts)


def rows_in_slots(ranks: RankGroup, placement: Placement, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copy rows of this rank's experts, of any dtypes, to their slots. Collective, where the ranks have agreed."""
    moves = moves_between(home_of(placement), placement, "by all slots")
    return [moved(ranks, moves, each, placement.slots_per_rank, TO_SLOTS) for each in tensors]


def _changes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _InSlots(torch.autograd.Function):
    """Rows of experts to their slots; gradients of slots, summed at the owner, to the experts' own ranks."""

    @staticmethod
    def forward(ctx: Any, ranks: RankGroup, placement: Placement, *tensors: torch.Tensor) -> Any:
        ctx.ranks, ctx.placement = ranks, placement
        named = {str(number): each for number, each in enumerate(tensors)}
        with agreed_beside(ranks, TO_SLOTS, lambda: terms_of(named)):
            return tuple(rows_in_slots(ranks, placement, tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        placement, home, phase = ctx.placement, home_of(ctx.placement), "gradients of slots"
        to_owners, to_home = moves_to_owners(placement), moves_between(placement, home, "by owners")
        named = {str(number): each for number, each in enumerate(grads) if each is not None}
        found: list[torch.Tensor | None] = []
        with agreed_beside(ctx.ranks, phase, lambda: terms_of(named)) as ranks:
            for grad in grads:
                if grad is None:
                    found.append(None)
                    continue
                sums = grad.clone()
                sum_at_owners(ranks, to_owners, sums, phase)
                found.append(moved(ranks, to_home, sums, home.slots_per_rank, phase))
        return None, None, *found
