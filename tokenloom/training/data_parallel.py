"""Data parallelism for models with experts, whose parameters differ from rank to rank."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from tokenloom.errors import InvalidArgument, require_type
from tokenloom.runtime.openings import UNNAMED
from tokenloom.runtime.rank_group import NO_WORDS
from tokenloom.runtime.siblings import siblings_of
from tokenloom.training.expert_module import RoutedExperts
from tokenloom.training.shards import is_of_experts, local_part, spread

CLIPPING = "clip_grad_norm_"
__all__ = ["clip_grad_norm_", "data_parallel", "split_parameters"]


def split_parameters(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Part the parameters of a module into those of experts and all others.

    torch does not mix DTensors with plain tensors in one call. So an optimiser takes two groups,
    ``AdamW([{"params": others}, {"params": experts}])``. FSDP2 takes ``ignored_params=set(experts)``.

    Args:
        module: module that holds ExpertParallelMoE or RoutedExperts.

    Returns:
        (parameters of experts, all others), each in the order of ``module.parameters()``.

    Raises:
        InvalidArgument: ``module`` is no module.
    """
    require_type("module", module, nn.Module, "a torch.nn.Module")
    owned = {each for layer in _layers(module) for each in layer.parameters()}
    experts: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in module.parameters():
        (experts if parameter in owned else others).append(parameter)
    return experts, others


def data_parallel(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """Wrap a module in torch's DistributedDataParallel, which leaves the experts alone. Collective.

    Args:
        module: module that holds ExpertParallelMoE or RoutedExperts.
        options: of DistributedDataParallel, such as ``process_group`` and ``device_ids``.

    Returns:
        The wrapper. It averages gradients over ranks, so the experts need ``expert_grad_scale=1/W``.

    Raises:
        InvalidArgument: ``module`` is no module, or there is no process group.
    """
    require_type("module", module, nn.Module, "a torch.nn.Module")
    if options.get("process_group") is None and not (dist.is_available() and dist.is_initialized()):
        raise InvalidArgument("there is no process group; call torch.distributed.init_process_group() first")
    owned = {id(each) for layer in _layers(module) for each in chain(layer.parameters(), layer.buffers())}
    tensors = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    ignored = {name for name, each in tensors if id(each) in owned}
    ignored |= set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))  # what the caller set
    # torch 2.13 has no public way to set this.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    return DistributedDataParallel(module, **options)


@torch.no_grad()
def clip_grad_norm_(parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale gradients so that their norm, over the whole model, is at most ``max_norm``. Collective.

    Gradients that are DTensors, such as those of experts and of FSDP2, count with the parts of all their ranks. Plain
    ones are the same on every rank, and count once. So the norm is the same on every rank. Where ``grad`` is None,
    ``main_grad`` is taken. Where experts have replicas, call ``reduce_replica_gradients`` first: before it, the parts
    of an expert's gradient count apart.

    Args:
        parameters: all of the model, in the same order on every rank, or one.
        max_norm: largest norm.

    Returns:
        The norm before, a scalar of at least float32.

    Raises:
        InvalidArgument: something is no tensor.
        PlanMismatch: over gloo, another rank of the experts' group makes another call. It may have one batch more.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    grads_by_kind: dict[Any, list[torch.Tensor]] = {}  # torch mixes neither meshes nor dtypes
    for parameter in parameters:
        require_type("a parameter", parameter, torch.Tensor, "a torch.Tensor")
        grad = parameter.grad
        if grad is None and hasattr(parameter, "main_grad"):
            grad = spread(parameter.main_grad, getattr(parameter, "device_mesh", None))
        if grad is not None:
            grads_by_kind.setdefault((getattr(grad, "device_mesh", None), grad.dtype), []).append(grad)
    for mesh in dict.fromkeys(mesh for mesh, _ in grads_by_kind if mesh is not None):
        _meet(mesh)
    norms = []
    for (mesh, dtype), grads in grads_by_kind.items():
        norm: Any = nn.utils.get_total_norm(grads)
        norms.append((norm if mesh is None else norm.full_tensor()).to(torch.promote_types(dtype, torch.float32)))
    if not norms:
        return torch.zeros(())
    total = torch.linalg.vector_norm(torch.stack(norms))
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grads in grads_by_kind.values():
        torch._foreach_mul_([local_part(grad) for grad in grads], factor)
    return total


def _meet(mesh: DeviceMesh) -> None:
    """Open a call of all ranks over which experts lie, unless the host would wait for a GPU.

    torch's own sums would wait for a rank that makes another call, or pair with a collective of that call.
    """
    if not is_of_experts(mesh):  # a layer has one, so all ranks have a communicator on its group
        return
    groups = [ranks for ranks in siblings_of(mesh.get_group()).groups if not (ranks.is_broken or ranks.masks_late)]
    if groups and all(ranks.device.type == "cpu" and not ranks.masked for ranks in groups):
        first = min(groups, key=lambda ranks: int(ranks.notes.number))
        first.open({"call": CLIPPING, "communicator": UNNAMED}, NO_WORDS, CLIPPING)


def _layers(module: nn.Module) -> list[RoutedExperts]:
    return [layer for layer in module.modules() if isinstance(layer, RoutedExperts)]
