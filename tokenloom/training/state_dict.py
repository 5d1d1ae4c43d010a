"""Checkpoints of models with expert-parallel layers, for any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from tokenloom.errors import InvalidArgument, ShapeMismatch
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.rendezvous import agree
from tokenloom.training.layer import EXPERT_WEIGHTS, ExpertParallelMoE

__all__ = ["gather_state_dict", "shard_state_dict"]


def gather_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """Gather the full state dict of a module with ExpertParallelMoE layers, on every rank. Collective.

    Expert weights become [E, 2I, H] and [E, H, I], or as the layer's ``weight_layout`` says; biases [E, 2I] and
    [E, H]. Everything else is this rank's own (replicated) value.

    Args:
        module: module that holds the layers.

    Returns:
        Tensors on the CPU, by name. The dict loads on any number of ranks through ``shard_state_dict``.

    Raises:
        InvalidArgument: ranks are masked, so nobody here has the weights of their experts. PlanMismatch: another rank
            gathers something else.
    """
    sharded = _sharded_names(module)
    full = {}
    for name, value in module.state_dict().items():
        if name in sharded:
            comm = sharded[name].comm
            if comm.engine.masked:
                raise InvalidArgument(
                    f"rank(s) {', '.join(map(str, sorted(comm.engine.masked)))} are masked, and the weights of their "
                    "experts are with them; gather the state dict before ranks are masked, or once they are back"
                )
            rows = _gather(comm.engine.ranks, name, value)
            value = rows.view(value.dtype).view(comm.plan.num_experts, *value.shape[1:])
        full[name] = value.detach().cpu().clone()
    return full


def shard_state_dict(module: nn.Module, full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Take this rank's part of a full state dict. Not collective.

    Args:
        module: module that holds the ExpertParallelMoE layers, made for the present number of ranks.
        full: dict from ``gather_state_dict``, on any number of ranks.

    Returns:
        Dict that ``module.load_state_dict`` takes on this rank.

    Raises:
        ShapeMismatch: an expert weight has another number of experts than the layer.
    """
    sharded = _sharded_names(module)
    part = dict(full)
    for name, layer in sharded.items():
        if name not in full:
            continue  # load_state_dict reports missing names
        num_experts = layer.comm.plan.num_experts
        if full[name].shape[0] != num_experts:
            raise ShapeMismatch(f"{name} has {full[name].shape[0]} experts, the layer has {num_experts}")
        part[name] = full[name][layer.local_experts.start : layer.local_experts.stop]
    return part


def _gather(ranks: RankGroup, name: str, value: torch.Tensor) -> torch.Tensor:
    """uint8 [W, bytes], the value of every rank."""
    what = {"name": name, "shape": tuple(value.shape), "dtype": value.dtype}
    agree(ranks, lambda: (what, None), "gather_state_dict")
    return ranks.all_gather(value.contiguous().view(torch.uint8).flatten(), "gather_state_dict")


def _sharded_names(module: nn.Module) -> dict[str, ExpertParallelMoE]:
    """Map the name of each sharded parameter to its layer."""
    return {
        f"{prefix}.{name}" if prefix else name: layer
        for prefix, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, ExpertParallelMoE)
        for name in EXPERT_WEIGHTS
    }
