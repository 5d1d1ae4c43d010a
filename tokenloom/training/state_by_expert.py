"""What a layer keeps, by expert and by slot: tensors of all experts in their order, whatever the placement.

Of a tensor of all experts, [E, ...], each rank has its ``local_experts``, as without a placement. So state dicts and
checkpoints are the same for any placement, and hold each expert once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokenloom.comm.placement import Placement
from tokenloom.comm.slot_rows import Move
from tokenloom.errors import InvalidArgument, ShapeMismatch
from tokenloom.ops.split_batch import EMPTY
from tokenloom.training.shards import local_part, own_part, spread
from tokenloom.training.slot_moves import Held, agreed, moved, moves_between, rows_of_slots, terms_of


def by_expert(layer: Any, slots: Mapping[str, torch.Tensor], held: Held, phase: str) -> dict[str, Any]:
    """Give tensors of slots as tensors of all experts. Collective if rows have to travel.

    Args:
        layer: a RoutedExperts, whose placement says where experts lie.
        slots: by name, spread over the ranks as the weights are.
        held: who has an expert's row.
        phase: what is going on, for errors.

    Returns:
        Spread likewise; in the same memory where each rank's first slots hold its ``local_experts``.

    Raises:
        InvalidArgument: rows have to travel while ranks are masked.
    """
    if layer.placement is None:
        return dict(slots)
    home = _home(layer)
    parts = {name: local_part(each.detach()) for name, each in slots.items()}
    found = _carried(layer, moves_between(layer.placement, home, held), parts, home.slots_per_rank, phase)
    return {name: spread(each, layer.mesh) for name, each in found.items()}


def by_slot(layer: Any, experts: Mapping[str, torch.Tensor], held: Held, phase: str) -> dict[str, Any]:
    """Give tensors of all experts as tensors of slots, zeros where nothing is held. Collective if rows have to travel.

    Args:
        layer: a RoutedExperts, whose placement says where experts lie.
        experts: by name. DTensors with this rank's experts, or plain and whole, whose rows need not travel.
        held: who is to have an expert's row.
        phase: what is going on, for errors.

    Returns:
        Spread over the ranks as the weights are. Without a placement, a value of another shape as it is.

    Raises:
        ShapeMismatch: with a placement, a tensor has another number of experts.
        InvalidArgument: the experts are those of another rank, or rows have to travel while ranks are masked.
    """
    num_experts, own, mesh = layer.comm.plan.num_experts, layer.local_experts, layer.mesh
    if layer.placement is None:
        return {name: own_part(name, value, mesh, num_experts, own) for name, value in experts.items()}
    home = _home(layer)
    moves = moves_between(home, layer.placement, held)
    slots: dict[str, Any] = {}
    parts: dict[str, torch.Tensor] = {}
    for name, value in experts.items():
        if not hasattr(value, "device_mesh") and value.ndim and len(value) == num_experts:
            here = [EMPTY] * layer.placement.slots_per_rank
            for move in moves:
                if move.rank == layer.comm.rank:
                    here[move.slot] = home.experts_of(move.source_rank)[move.source]
            slots[name] = spread(rows_of_slots(value, here), mesh)
            continue
        part = own_part(name, value, mesh, num_experts, own)
        if part.ndim == 0 or len(part) != num_experts:
            raise ShapeMismatch(
                f"{name} is {list(part.shape)}, expected {num_experts} experts in their order, as state dicts of any "
                "placement have them"
            )
        parts[name] = local_part(part.detach())
    found = _carried(layer, moves, parts, layer.placement.slots_per_rank, phase) if parts else {}
    return slots | {name: spread(each, mesh) for name, each in found.items()}


def _home(layer: Any) -> Placement:
    """Where experts are in tensors of all experts: ``local_experts``, in their order."""
    return Placement.default(layer.comm.plan.num_experts, layer.comm.num_ranks)


def _carried(
    layer: Any, moves: list[Move], parts: dict[str, torch.Tensor], num_slots: int, phase: str
) -> dict[str, torch.Tensor]:
    """Carry this rank's parts along the moves, to ``num_slots`` rows each."""
    if any(each.is_meta for each in parts.values()):
        return {name: each.new_empty(num_slots, *each.shape[1:]) for name, each in parts.items()}
    ranks = layer.comm.engine.ranks
    if all((move.source_rank, move.source) == (move.rank, move.slot) for move in moves):
        return {
            name: each[:num_slots] if len(each) >= num_slots else moved(ranks, moves, each, num_slots, phase)
            for name, each in parts.items()
        }
    if all(move.source_rank == move.rank for move in moves):
        return {name: moved(ranks, moves, each, num_slots, phase) for name, each in parts.items()}

    def prepare() -> dict[str, Any]:
        if layer.comm.engine.masked:
            raise InvalidArgument(
                f"rank(s) {', '.join(map(str, sorted(layer.comm.engine.masked)))} are masked, and experts in their "
                f"order are on all ranks; unmask them before {phase}"
            )
        return terms_of(parts)

    with agreed(layer.comm.engine, phase, prepare):
        return {name: moved(ranks, moves, each, num_slots, phase) for name, each in parts.items()}
