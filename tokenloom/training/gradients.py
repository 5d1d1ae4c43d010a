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
    ranks: RankGroup, sums: RouterSums, dtype: torch.dtype, host_waits: bool = True, bias: torch.Tensor | None = None
) -> RouterSums:
    """Sum over the tokens of all ranks. Differentiable, because each rank's loss depends on all ranks' tokens.

    Args:
        dtype: in which probabilities are summed. Counts of routes are summed as integers.
        host_waits: as of :meth:`RankGroup.all_reduce_sums`, in backward too.
        bias: the router's correction bias, if it has one. It must be the same on all ranks.
    """
    parts = (sums.probabilities, sums.squared_lse, sums.num_tokens)
    own = torch.cat(parts)
    given = own.to(dtype), sums.expert_counts.to(torch.int64)  # tokens may differ in dtype under autocast
    total, counts = _SumOverRanks.apply(*given, ranks, host_waits, bias)
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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.ranks, ctx.host_waits = ranks, host_waits
        alike: dict[str, str] = {}
        if bias is not None and host_waits:
            checksum = "without memory" if bias.is_meta else f"{zlib.crc32(bias.cpu().numpy().tobytes()):08x}"
            alike["correction_bias"] = checksum
        total, counts = ranks.all_reduce_sums([values, counts], "router losses", host_waits, alike)
        ctx.mark_non_differentiable(counts)
        return total, counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        total = ctx.ranks.all_reduce_sums([grad.contiguous()], "router losses, gradient", ctx.host_waits)[0]
        return total, None, None, None, None


def in_backward() -> bool:
    """Whether autograd is running a backward that has called this: an activation checkpoint computes again, say."""
    return torch._C._current_graph_task_id() != -1


def has_saved_tensors_hooks() -> bool:
    """Whether somebody decides what autograd keeps, as activation checkpoints do that run a forward again."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


class _OnceInBackward(torch.autograd.Function):
    """Identity whose backward does something, the first time it runs."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, action: Callable[[], None]) -> torch.Tensor:
        ctx.action = action
        return value.detach()  # no view: users may change it in place

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
    """Two values of which a loss may leave one out: its gradient is zeros then."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return one.detach(), other.detach()  # no views: users may change them in place

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads


def tied(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as they are. Backward goes through both on every rank, whichever its loss has."""
    return _Tied.apply(one, other) if one.requires_grad and other.requires_grad else (one, other)


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
    """Return the parameter as it is, and sum its gradient over ranks; ``host_waits`` as of :func:`sum_over_ranks`."""
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
