"""Checkpoints of models with expert-parallel layers, for any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tokenloom.comm.torch_modes import is_plain
from tokenloom.errors import InvalidArgument, ShapeMismatch
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.rendezvous import agree
from tokenloom.training.expert_module import RoutedExperts
from tokenloom.training.parameters import EXPERT_WEIGHTS

__all__ = ["gather_state_dict", "shard_state_dict"]


def gather_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """Gather the full state dict of a module with ExpertParallelMoE layers, on every rank. Collective.

    Expert weights become [E, 2I, H] and [E, H, I], or as the layer's ``weight_layout`` says; biases [E, 2I] and
    [E, H]. Everything else is this rank's own (replicated) value.

    Args:
        module: module that holds the layers, or ``RoutedExperts`` by themselves.

    Returns:
        Tensors on the CPU, by name, and what else modules keep (``get_extra_state``). The dict loads on any number of
        ranks through ``shard_state_dict``.

    Raises:
        InvalidArgument: ranks are masked, so nobody here has the weights of their experts; or a layer's experts are
            not in the state dict as they are, say because they are parametrized. PlanMismatch: another rank
            gathers something else.
    """
    state = module.state_dict(keep_vars=True)
    sharded = _sharded_names(module, state)
    full: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):  # a module's extra state
            full[name] = value
            continue
        kept = value.detach()
        if name in sharded:
            comm = sharded[name].comm
            if comm.engine.masked:
                raise InvalidArgument(
                    f"rank(s) {', '.join(map(str, sorted(comm.engine.masked)))} are masked, and the weights of their "
                    "experts are with them; gather the state dict before ranks are masked, or once they are back"
                )
            rows = _gather(comm.engine.ranks, name, kept)
            kept = rows.view(kept.dtype).view(comm.plan.num_experts, *kept.shape[1:])
        full[name] = kept.cpu().clone()
    for ranks in dict.fromkeys(layer.comm.engine.ranks for layer in sharded.values()):
        agree(ranks, lambda: ({}, None), "gather_state_dict")  # the last rows too are of all ranks
    return full


def shard_state_dict(module: nn.Module, full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Take this rank's part of a full state dict. Not collective.

    Args:
        module: module that holds the layers, made for the present number of ranks.
        full: dict from ``gather_state_dict``, on any number of ranks.

    Returns:
        Dict that ``module.load_state_dict`` takes on this rank.

    Raises:
        ShapeMismatch: an expert weight has another number of experts than the layer. InvalidArgument: as above.
    """
    sharded = _sharded_names(module, module.state_dict(keep_vars=True))
    part = dict(full)
    for name, layer in sharded.items():
        weights = part.pop(name, None)
        if weights is None:
            weights = part.pop(_former_name(name), None)
        if weights is None:
            continue  # load_state_dict reports missing names
        num_experts = layer.comm.plan.num_experts
        if weights.shape[0] != num_experts:
            raise ShapeMismatch(f"{name} has {weights.shape[0]} experts, the layer has {num_experts}")
        # A copy: parameters that are views of all experts would keep them in memory, and in files.
        part[name] = weights[layer.local_experts.start : layer.local_experts.stop].clone()
    return part


def _former_name(name: str) -> str:
    """Name that a layer's experts had before they became a module: "moe.w1" of "moe.experts.w1"."""
    owner, _, weight = name.rpartition(".")
    return owner.removesuffix("experts") + weight


def _gather(ranks: RankGroup, name: str, value: torch.Tensor) -> torch.Tensor:
    """uint8 [W, bytes], the value of every rank."""
    what = {"name": name, "shape": tuple(value.shape), "dtype": value.dtype}
    agree(ranks, lambda: (what, None), "gather_state_dict")
    return ranks.all_gather(value.contiguous().view(torch.uint8).flatten(), "gather_state_dict")


def _sharded_names(module: nn.Module, state: Mapping[str, Any]) -> dict[str, RoutedExperts]:
    """Map the name of each sharded parameter in a state dict to its layer. Wrappers may have changed the names.

    Raises:
        InvalidArgument: a layer's experts are not in it as they are, say because they are parametrized.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, RoutedExperts)]
    weights = [(getattr(layer, name), layer) for layer in layers for name in EXPERT_WEIGHTS]
    owners = {id(weight): layer for weight, layer in weights if weight is not None}  # some have no biases
    found = {
        name: owners[id(value)]
        for name, value in state.items()
        if id(value) in owners and is_plain(value)  # of a DTensor only a part lies here
    }
    missing = owners.keys() - {id(state[name]) for name in found}
    if missing:
        raise InvalidArgument(
            f"{len(missing)} weights of experts are not in the state dict as their layers have them; gather it before "
            "they are parametrized or wrapped by something that cuts or renames parameters"
        )
    return found
