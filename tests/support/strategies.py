"""Combines carried by any strategy, as layers have them. ``Communicator.combine`` offers what sums differently."""

from __future__ import annotations

import torch

import tokenloom as tl
from tokenloom.backends.seam import CombineKind, CombineOptions, Upcoming
from tokenloom.comm import autograd


def combine_by(
    comm: tl.Communicator, strategy: str, y: torch.Tensor, routed: tl.Routed, *, weighted: bool = True
) -> torch.Tensor:
    """As ``comm.combine(y, routed)``, carried by a strategy of combine. Differentiable, collective.

    Args:
        weighted: multiply rows of layout "expert" by their weights. Other layouts have none to multiply by.
    """
    engine, weights = comm.engine, routed._weights if weighted else None
    needs_grad = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (y, weights))
    options = CombineOptions(weights is not None, y.dtype, y.dtype, needs_grad, strategy)
    engine.raise_known_errors()
    if strategy == "all_to_all" and routed._gradient_order is not None:  # as comm.combine(mode="per_route") does
        routed._gradient_order.per_route = True
    with engine.sequence(Upcoming("combine")):
        handle, rows = routed._handle, y.view(-1, comm.plan.hidden)
        prepared = engine.prepare_combine(CombineKind(routed.layout, y.dtype, options), handle.number)
        return autograd.send_combine(engine, handle, prepared, rows, weights, options).receive()
