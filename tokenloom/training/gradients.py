"""Small autograd nodes: sums over ranks and scaled gradients."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tokenloom.ops.router import RouterSums
from tokenloom.runtime.rank_group import RankGroup


def sum_over_ranks(
    ranks: RankGroup,
    sums: RouterSums,
    dtype: torch.dtype,
    host_waits: bool = True,
    bias: torch.Tensor | None = None,
    alike: tuple[tuple[str, str], ...] = (),
    fault: Exception | None = None,
) -> RouterSums:
    """Sum over the tokens of all ranks. Differentiable, because each rank's loss depends on all ranks' tokens.

    Args:
        dtype: dtype of the sums of probabilities. Counts of routes are summed as integers.
        host_waits: see :meth:`RankGroup.all_reduce_sums`; backward does the same.
        bias: the router's correction bias, if it has one. It must be the same on all ranks.
        alike: what else must be, by name.
        fault: see :meth:`RankGroup.all_reduce_sums`.
    """
    parts = (sums.probabilities, sums.squared_lse, sums.num_tokens)
    own = torch.cat(parts)
    values = own.to(dtype)  # tokens may differ in dtype under autocast
    rest = (ranks, host_waits, bias, alike, fault)
    total, counts = _SumOverRanks.apply(values, sums.expert_counts.to(torch.int64), *rest)
    probabilities, squared_lse, num_tokens = total.to(own.dtype).split([len(part) for part in parts])
    return RouterSums(probabilities, squared_lse, counts, num_tokens)


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks, whose gradient is the sum over ranks too."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        counts: torch.Tensor,
        ranks: RankGroup,
        host_waits: bool,
        bias: torch.Tensor | None,
        others: tuple[tuple[str, str], ...],
        fault: Exception | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.ranks, ctx.host_waits = ranks, host_waits
        alike = dict(others)
        if bias is not None and host_waits:
            checksum = "without memory" if bias.is_meta else f"{zlib.crc32(bias.cpu().numpy().tobytes()):08x}"
            alike["correction_bias"] = checksum
        total, counts = ranks.all_reduce_sums([values, counts], "router losses", host_waits, alike, fault)
        ctx.mark_non_differentiable(counts)
        return total, counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        total = ctx.ranks.all_reduce_sums([grad.contiguous()], "router losses, gradient", ctx.host_waits)[0]
        return total, *[None] * 6


def in_backward() -> bool:
    """Tell whether a running backward has called this, for example to recompute an activation checkpoint."""
    return torch._C._current_graph_task_id() != -1


def has_saved_tensors_hooks() -> bool:
    """Tell whether hooks decide what autograd keeps. Activation checkpoints have such hooks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


class _OnceInBackward(torch.autograd.Function):
    """Identity whose backward runs an action, once."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, action: Callable[[], None]) -> torch.Tensor:
        ctx.action = action
        return value.detach()  # no view: users may change the value in place

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        action, ctx.action = ctx.action, None
        if action is not None:
            action()
        return grad, None


def once_in_backward(value: torch.Tensor, action: Callable[[], None]) -> torch.Tensor:
    """Return the value as it is, and run the action once its gradient is there."""
    return _OnceInBackward.apply(value, action)


class _Tied(torch.autograd.Function):
    """Identity of two values. If a loss leaves one out, the gradient of that one is zeros."""

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return first.detach(), second.detach()  # no views: users may change them in place

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads


def tied(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both values as they are. Backward goes through both on every rank, even if its loss has only one."""
    return _Tied.apply(first, second) if first.requires_grad and second.requires_grad else (first, second)


class _SumGradOverRanks(torch.autograd.Function):
    """Identity with a gradient that is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, ranks: RankGroup, host_waits: bool) -> torch.Tensor:
        ctx.ranks, ctx.host_waits = ranks, host_waits
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        total = ctx.ranks.all_reduce_sums([grad.contiguous()], "gradient of replicated parameters", ctx.host_waits)[0]
        return total, None, None


def sum_grad_over_ranks(parameter: torch.Tensor, ranks: RankGroup, host_waits: bool = True) -> torch.Tensor:
    """Return the parameter as it is, and sum its gradient over ranks; see :func:`sum_over_ranks`."""
    return _SumGradOverRanks.apply(parameter, ranks, host_waits)


class _ScaleGrad(torch.autograd.Function):
    """Identity with a gradient that is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.factor, None


def scale_grad(weight: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the weight as it is, and multiply its gradient by ``factor``."""
    return weight if factor == 1.0 else _ScaleGrad.apply(weight, factor)
