"""Weights of experts as tensors of all experts, of which each rank holds its own: DTensors, as torch calls them.

So torch's own tools know that ranks differ. Checkpoints and optimiser states keep all experts, on any number of ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from tokenloom.errors import InvalidArgument, NotDifferentiable
from tokenloom.runtime.rank_group import RankGroup

_RANK = "ep_rank_"
"""Begins the name of a mesh's dimension."""


def make_mesh(ranks: RankGroup) -> DeviceMesh | None:
    """Make the mesh over which experts lie, or None for a process by itself, whose tensors stay plain."""
    if ranks.process_group is None:
        return None
    # The name differs from rank to rank. So torch refuses to take one rank's part, from a file say, for another's.
    name = f"{_RANK}{ranks.rank}"
    mesh = DeviceMesh.from_group(ranks.process_group, ranks.device.type, mesh_dim_names=(name,))
    # torch's caches keep meshes for ever. Without this they would keep the group, whose threads may abort Python as it
    # ends. torch finds a group by its name too.
    getattr(mesh, "_pg_registry", {}).clear()
    return mesh


def is_of_experts(mesh: DeviceMesh) -> bool:
    """Tell whether experts lie over a mesh. Another mesh of the same group has another name."""
    return any(name.startswith(_RANK) for name in mesh.mesh_dim_names or ())


def spread(local: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    """Give this rank's experts, [L, ...], as a part of [E, ...]. Memory is shared."""
    if mesh is None:
        return local
    from torch.distributed.tensor import DTensor, Shard  # takes a second: only where there are ranks

    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Give the part of a tensor that lies here. Differentiable; memory is shared. A plain tensor is its own part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def versions(tensors: Iterable[Any]) -> list[tuple[torch.Tensor, int]]:
    """Note how often each DTensor has been changed in place, for :func:`require_unchanged`."""
    dtensors = (each for each in tensors if hasattr(each, "to_local") and not each.is_inference())
    return [(each, each._version) for each in dtensors]


def require_unchanged(noted: Iterable[tuple[torch.Tensor, int]]) -> None:
    """Raise if a DTensor has changed since :func:`versions`. Autograd watches the local part, whose version stays.

    Raises:
        NotDifferentiable: a DTensor has changed.
    """
    if any(tensor._version != version for tensor, version in noted):
        raise NotDifferentiable(
            "a weight of experts has been modified by an inplace operation since forward, and gradients would be "
            "wrong; let the optimizer step after backward"
        )


def renew_hooks(parameter: torch.Tensor) -> None:
    """Let autograd run the hooks of a parameter again, which ``torch.utils.swap_tensors`` has made it forget."""
    parameter._backward_hooks = parameter._backward_hooks
    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks


def own_part(
    name: str, value: torch.Tensor, mesh: DeviceMesh | None, num_experts: int, experts: range
) -> torch.Tensor:
    """Turn the value of a state dict into this rank's experts: spread over the mesh, or plain.

    Args:
        name: name of the weight, for errors.
        value: DTensor of this rank, or plain tensor of all experts. A plain tensor of this rank's experts gives a
            warning.
        mesh: over which experts lie, or None.
        num_experts: of all ranks.
        experts: numbers of this rank's experts.

    Returns:
        [E, ...] over the mesh. A value of another shape is returned as it is.

    Raises:
        InvalidArgument: the value has the experts of another rank.
    """
    if hasattr(value, "device_mesh"):
        if mesh is not None and value.device_mesh == mesh:
            return value
        held = _held_experts(value)
        if held != experts:
            came = "parts of experts" if held is None else _named(held)
            raise InvalidArgument(
                f"{name} holds {came}, and this rank has {_named(experts)}; a state dict that one rank saves has its "
                "own experts alone: use torch.distributed.checkpoint, or save what gather_state_dict gives"
            )
        return spread(local_part(value.detach()), mesh)
    if mesh is None or value.ndim == 0:
        return value
    if len(value) == num_experts:
        # A copy: a part of all experts would keep them in memory.
        return spread(value[experts.start : experts.stop].clone(), mesh)
    if len(value) == len(experts):
        warnings.warn(
            f"{name} holds {len(value)} experts in a plain tensor, which cannot say whose they are; they are taken "
            f"for this rank's, {_named(experts)}",
            stacklevel=2,
        )
        return spread(value, mesh)
    return value


def _held_experts(value: Any) -> range | None:
    """Find the numbers of the experts in the local part of a DTensor, or None if it holds parts of experts."""
    if all(placement.is_replicate() for placement in value.placements):
        return range(len(value))
    (name, *more) = value.device_mesh.mesh_dim_names or ("",)
    if more or not name.startswith(_RANK) or not value.placements[0].is_shard(0):
        return None
    rank, local = int(name.removeprefix(_RANK)), len(local_part(value))
    return range(rank * local, (rank + 1) * local)


def _named(experts: range) -> str:
    return f"experts {experts.start} to {experts.stop - 1}"
