"""The layer as one writes it in torch: the rival of ``tokenloom bench train`` and, without a network, its baselines.

A good layer without kernels of its own. Routes are sorted by expert; a row for each route travels by
``all_to_all_single`` with its weight, is sorted by expert again, and passes ``grouped_mm``, SwiGLU and ``grouped_mm``.
Rows return the same way and a token's rows are added. A forward reads on the host once, for the sizes. Orders are
undone by their inverse, not by atomic additions. Weights apply between the two GEMMs, so outputs are not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tokenloom.bench.train_work import Weights
from tokenloom.ops.expert_gemms import ExpertGemms, gemms_for
from tokenloom.ops.experts import run_experts
from tokenloom.ops.router import Router, router_logits
from tokenloom.runtime.rank_group import RankGroup

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes rows [R, H], offsets int32 [L + 1], w1, w2 and the rows' weights [R]; gives [R, H]."""


def torch_layer(
    x: torch.Tensor, weights: Weights, top_k: int, experts: Experts, ranks: RankGroup | None = None
) -> torch.Tensor:
    """A layer with the router "softmax_topk". Differentiable once; collective if there are ranks.

    Args:
        experts: the computation between the two transfers.
        ranks: the ranks that hold experts, L each in their order; None: all experts are here.
    """
    num_experts = len(weights.router)
    ids, topk_weights, _ = Router(num_experts, top_k).route(router_logits(x, weights.router, torch.float32))
    flat = ids.flatten()
    order, inverse = _sorting(flat)
    rows = _FanOut.apply(x, order, inverse, top_k)
    row_weights = _Permute.apply(topk_weights.reshape(-1, 1), order, inverse)
    counts = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))
    if ranks is None:
        rows = experts(rows, _offsets(counts), weights.w1, weights.w2, row_weights[:, 0])
    else:
        rows = _on_other_ranks(rows, row_weights, counts, weights, experts, ranks)
    return _FanIn.apply(rows, order, inverse, top_k)


def torch_experts(
    rows: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, row_weights: torch.Tensor
) -> torch.Tensor:
    """The rival's experts: ``grouped_mm`` and torch's SwiGLU."""
    gemms = gemms_for(rows, w1, w2, offsets)
    gate, up = _Gemm.apply(rows, w1, gemms).chunk(2, -1)
    activations = functional.silu(gate) * up * row_weights[:, None].to(rows.dtype)
    return _Gemm.apply(activations, w2, gemms)


def own_experts(
    rows: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, row_weights: torch.Tensor
) -> torch.Tensor:
    """The experts of ExpertParallelMoE, its GEMMs and SwiGLU. The host waits for the offsets."""
    return run_experts(rows, offsets, w1, w2, row_weights, offsets.tolist())


def _on_other_ranks(
    rows: torch.Tensor,
    row_weights: torch.Tensor,
    counts: torch.Tensor,
    weights: Weights,
    experts: Experts,
    ranks: RankGroup,
) -> torch.Tensor:
    """Send rows to the ranks of their experts, compute, and bring the results back.

    Args:
        rows, row_weights: sorted by expert.
        counts: int64 [E], rows of each expert.
    """
    num_ranks, local = ranks.num_ranks, len(weights.w1)
    ones = [1] * num_ranks
    arriving = ranks.start_all_to_all(counts.view(num_ranks, local), ones, ones, "counts").wait()
    out_counts, in_counts = torch.stack([counts.view(num_ranks, local).sum(1), arriving.sum(1)]).tolist()
    rows = _AllToAll.apply(rows, ranks, out_counts, in_counts)
    row_weights = _AllToAll.apply(row_weights, ranks, out_counts, in_counts)
    of_expert = torch.arange(local, dtype=torch.int64, device=rows.device).repeat(num_ranks)
    order, inverse = _sorting(of_expert.repeat_interleave(arriving.flatten(), output_size=sum(in_counts)))
    rows = _Permute.apply(rows, order, inverse)
    row_weights = _Permute.apply(row_weights, order, inverse)
    rows = experts(rows, _offsets(arriving.sum(0)), weights.w1, weights.w2, row_weights[:, 0])
    return _AllToAll.apply(_Permute.apply(rows, inverse, order), ranks, in_counts, out_counts)


def _sorting(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The order that sorts keys stably, and its inverse."""
    order = keys.argsort(stable=True)
    places = torch.arange(len(order), dtype=order.dtype, device=order.device)
    return order, torch.empty_like(order).scatter_(0, order, places)


def _offsets(counts: torch.Tensor) -> torch.Tensor:
    return functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


class _Gemm(torch.autograd.Function):
    """Rows of each expert times its transposed weights: [R, k] and [L, n, k] give [R, n]."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, gemms: ExpertGemms) -> torch.Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.gemms = gemms
        return gemms.multiply(rows, weights.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows, weights = ctx.saved_tensors
        return ctx.gemms.multiply(grad, weights), ctx.gemms.weight_gradient(grad, rows), None


class _Permute(torch.autograd.Function):
    """Rows in another order."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _FanOut(torch.autograd.Function):
    """[T, H] -> [T * K, H]: each token K times, in the order of its routes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, top_k: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x.index_select(0, order // top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return _sum_of_routes(grad, inverse, ctx.top_k), None, None, None


class _FanIn(torch.autograd.Function):
    """[T * K, H] -> [T, H]: the sum of a token's rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, top_k: int) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return _sum_of_routes(rows, inverse, top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (order,) = ctx.saved_tensors
        return grad.index_select(0, order // ctx.top_k), None, None, None


def _sum_of_routes(rows: torch.Tensor, inverse: torch.Tensor, top_k: int) -> torch.Tensor:
    return rows.index_select(0, inverse).unflatten(0, (-1, top_k)).sum(1)


class _AllToAll(torch.autograd.Function):
    """Rows to the other ranks, by counts of each; the gradient goes back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, ranks: RankGroup, out_counts: list[int], in_counts: list[int]
    ) -> torch.Tensor:
        ctx.ranks, ctx.out_counts, ctx.in_counts = ranks, out_counts, in_counts
        return ranks.start_all_to_all(rows, out_counts, in_counts, "rows").wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        back = ctx.ranks.start_all_to_all(grad.contiguous(), ctx.in_counts, ctx.out_counts, "gradients of rows").wait()
        return back, None, None, None
