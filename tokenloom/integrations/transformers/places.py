"""Experts of a loaded model, placed anew."""

from __future__ import annotations

import torch

from tokenloom.comm.placement import Placement
from tokenloom.errors import InvalidArgument, require_type
from tokenloom.integrations.transformers.implementation import ATTRIBUTE, TokenloomExperts


def place_experts(model: torch.nn.Module, placement: Placement) -> None:
    """Place the experts of all layers of a model anew, from its next call on. All ranks call it alike.

    The model's weights stay where they are. The next call copies those of each layer to their slots.

    Args:
        model: loaded with ``register(placement=)`` or ``register(spare_slots=)``.
        placement: with the experts, ranks and slots of a rank of that one.

    Raises:
        InvalidArgument: no model or no placement, the model's experts do not go by one, or it has another number of
            experts, ranks or slots.
        PlanMismatch, PeerError: as in ``Communicator.set_placement``.
    """
    require_type("model", model, torch.nn.Module, "a model")
    require_type("placement", placement, Placement, "a tokenloom.Placement")
    found = [getattr(module, ATTRIBUTE, None) for module in model.modules()]
    placed = [each for each in found if isinstance(each, TokenloomExperts) and each.options.placed]
    if not placed:
        raise InvalidArgument(
            "no experts of this model go by a placement; call register(placement=) or register(spare_slots=) before "
            "it is loaded"
        )
    for shared in {id(each.shared): each.shared for each in placed}.values():
        shared.place(placement)
