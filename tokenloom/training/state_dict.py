"""Checkpoints of models with expert-parallel layers, for any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from tokenloom.comm.communicator import Communicator
from tokenloom.errors import InvalidArgument, ShapeMismatch, require_type
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.rendezvous import agree
from tokenloom.training.expert_module import RoutedExperts
from tokenloom.training.shards import local_part, own_part
from tokenloom.training.state_by_expert import by_expert

__all__ = ["gather_state_dict", "shard_state_dict"]

LEAST_STEP_BYTES = 1 << 20
"""Bytes of a rank that travel at a time, at least."""


def gather_state_dict(module: nn.Module, *, to: Literal["all", "rank0"] = "all") -> dict[str, torch.Tensor]:
    """Gather the full state dict of a module with ExpertParallelMoE layers. Collective.

    Expert weights become [E, 2I, H] and [E, H, I], or as the layer's ``weight_layout`` says; biases [E, 2I] and
    [E, H]. DTensors, such as FSDP2 makes, become whole. Everything else is this rank's own (replicated) value.

    Memory: the result lies on the CPU, of each rank or of one. Beside it there are, on the layer's device, one expert
    (or 1 MiB of each rank, if that is more), or one whole tensor of those that FSDP2 has sharded. With a placement
    there is also one weight of this rank's experts. Nothing else is copied.

    To hold no full weights anywhere, save ``module.state_dict()`` with ``torch.distributed.checkpoint``: each
    rank writes its own experts.

    Args:
        module: module that holds the layers, or ``RoutedExperts`` by themselves.
        to: ranks that get the result: "all" ranks, or "rank0", the first of ``torch.distributed``.

    Returns:
        Tensors on the CPU, by name, and what else modules keep (``get_extra_state``). ``module.load_state_dict`` takes
        the dict on any number of ranks. Where this rank gets nothing, an empty dict.

    Raises:
        InvalidArgument: ``to`` is something else; or ranks are masked, so nobody here has the weights of their
            experts; or a layer's experts are not in the state dict as they are, since they are parametrized, say.
        PlanMismatch: another rank gathers something else.
    """
    require_type("module", module, nn.Module, "a torch.nn.Module")
    comms = [layer.comm for layer in module.modules() if isinstance(layer, RoutedExperts)]
    for comm in comms:
        _require_all(comm)

    def prepare() -> tuple[dict[str, Any], None]:
        if to not in ("all", "rank0"):
            raise InvalidArgument(f"to is {to!r}, expected 'all' or 'rank0'")
        _sharded_names(module, module.state_dict(keep_vars=True))
        return {"to": to}, None

    groups: list[RankGroup] = list(dict.fromkeys(comm.engine.ranks for comm in comms))
    for ranks in groups:
        agree(ranks, prepare, "gather_state_dict")
    if not groups:
        prepare()
    keeps = to == "all" or not dist.is_initialized() or dist.get_rank() == 0
    state = module.state_dict(keep_vars=True)
    sharded = _sharded_names(module, state)
    full: dict[str, Any] = {}
    for name, value in state.items():
        kept = value
        if name in sharded:
            layer = sharded[name]
            own = by_expert(layer, {name: value}, "by all slots", "gather_state_dict")[name]
            kept = _gather(layer.comm, name, local_part(own.detach()), keeps)
        elif isinstance(value, torch.Tensor):  # else a module's extra state
            whole: Any = value.detach()
            whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
            kept = whole.cpu().clone() if keeps else None
        if keeps:
            full[name] = kept
    for ranks in groups:  # a rank that failed in the last rows is found here
        agree(ranks, lambda: ({}, None), "gather_state_dict")
    for comm in comms:
        _require_all(comm)
    return full


def shard_state_dict(module: nn.Module, full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Take this rank's part of a full state dict. Not collective.

    ``module.load_state_dict`` takes full weights of experts too. Their part alone is less to keep in memory.

    Args:
        module: module that holds the layers, made for the present number of ranks.
        full: dict from ``gather_state_dict``, on any number of ranks.

    Returns:
        Dict that ``module.load_state_dict`` takes on this rank. Experts are DTensors where there is a process group.

    Raises:
        ShapeMismatch: an expert weight has another number of experts than the layer.
        InvalidArgument: a layer's experts are not in the state dict as they are, or ``full`` has those of one rank.
    """
    require_type("module", module, nn.Module, "a torch.nn.Module")
    require_type("full", full, Mapping, "the dict from gather_state_dict")
    state = module.state_dict(keep_vars=True)
    part = dict(full)
    for name, layer in _sharded_names(module, state).items():
        weights = part.pop(name, None)
        if weights is None:
            weights = part.pop(_former_name(name), None)
        if weights is None:
            continue  # load_state_dict reports missing names
        num_experts = layer.comm.plan.num_experts
        if weights.shape[0] != num_experts:
            raise ShapeMismatch(f"{name} has {weights.shape[0]} experts, the layer has {num_experts}")
        part[name] = own_part(name, weights, layer.mesh, num_experts, layer.local_experts)
    return part


def _former_name(name: str) -> str:
    """Name that a layer's experts had before they became a module: "moe.w1" of "moe.experts.w1"."""
    owner, _, weight = name.rpartition(".")
    return owner.removesuffix("experts") + weight


def _require_all(comm: Communicator) -> None:
    """Raise InvalidArgument where ranks are masked."""
    if comm.engine.masked:
        raise InvalidArgument(
            f"rank(s) {', '.join(map(str, sorted(comm.engine.masked)))} are masked, and the weights of their "
            "experts are with them; gather the state dict before ranks are masked"
        )


def _gather(comm: Communicator, name: str, part: torch.Tensor, keeps: bool) -> torch.Tensor | None:
    """Gather [E, ...] on the CPU from each rank's part. A rank that does not keep it gets None.

    Bytes travel in steps of the same length on all ranks.
    """
    ranks: RankGroup = comm.engine.ranks
    terms = {"name": name, "shape": tuple(part.shape), "dtype": part.dtype}
    agree(ranks, lambda: (terms, None), "gather_state_dict")
    sent = part.contiguous().view(torch.uint8).view(-1)
    full = torch.empty(comm.plan.num_experts, *part.shape[1:], dtype=part.dtype, device="cpu") if keeps else None
    rows = None if full is None else full.view(torch.uint8).view(comm.num_ranks, -1)
    step = max(LEAST_STEP_BYTES, part[0].nbytes // comm.num_ranks)
    for begin in range(0, len(sent), step):
        arrived = ranks.all_gather(sent[begin : begin + step], "gather_state_dict")
        if rows is not None:
            rows[:, begin : begin + step] = arrived
    return full


def _sharded_names(module: nn.Module, state: Mapping[str, Any]) -> dict[str, RoutedExperts]:
    """Map the name of each sharded parameter in a state dict to its layer. Wrappers may have changed the names.

    Raises:
        InvalidArgument: a layer's experts are not in it as they are, say because they are parametrized.
    """
    owners: dict[int, tuple[RoutedExperts, tuple[int, ...]]] = {}
    for layer in module.modules():
        if isinstance(layer, RoutedExperts):
            owners |= {
                id(getattr(layer, name)): (layer, shape)
                for name, shape in layer.shapes().items()
                if getattr(layer, name) is not None  # some have no biases
            }
    sharded = {
        name: owners[id(value)][0]
        for name, value in state.items()
        if id(value) in owners
        and local_part(value.detach()).shape == owners[id(value)][1]  # wrappers may cut it again
    }
    missing = owners.keys() - {id(state[name]) for name in sharded}
    if missing:
        raise InvalidArgument(
            f"{len(missing)} weights of experts are not in the state dict as their layers have them; gather it before "
            "they are parametrized or wrapped by something that cuts or renames parameters"
        )
    return sharded
