"""Routers: scores -> (topk_ids, topk_weights), and the losses that keep experts balanced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tokenloom.errors import InvalidArgument
from tokenloom.plan import MAX_TOP_K

Score = Literal["softmax_topk", "topk_softmax", "sigmoid"]
SCORES = ("softmax_topk", "topk_softmax", "sigmoid")
RENORMALIZE_EPS = 1e-20


@dataclass(frozen=True)
class Router:
    """How logits become routes.

    Attributes:
        num_experts: E.
        top_k: K, at most 32.
        score: "softmax_topk": probabilities over all experts, then the K largest (Switch, Mixtral's paper form,
            DeepSeek-V2, Qwen3). "topk_softmax": the K largest logits, then probabilities over those (Mixtral's
            code, gpt-oss). "sigmoid": one sigmoid per expert (DeepSeek-V3).
        renormalize: divide the K weights by their sum ("topk_softmax" sums to 1 already).
        scale: multiplies the weights at the end (DeepSeek-V3: 2.5).
        correction_bias: choose by score + bias, weight by score alone (DeepSeek-V3's balance without a loss).
        num_groups: equal groups that the experts lie in. A group's value is the sum of its two best scores for
            "sigmoid" (DeepSeek-V3), its best score otherwise (DeepSeek-V2).
        top_groups: how many of the best groups may be chosen from; equal to ``num_groups``, it is no limit.

    Raises:
        InvalidArgument: values that no router can have.
    """

    num_experts: int
    top_k: int
    score: Score = "softmax_topk"
    renormalize: bool = False
    scale: float = 1.0
    correction_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise InvalidArgument(f"score is {self.score!r}, expected one of {', '.join(SCORES)}")
        if not 1 <= self.top_k <= min(MAX_TOP_K, self.num_experts):
            raise InvalidArgument(
                f"top_k is {self.top_k}, expected 1..{min(MAX_TOP_K, self.num_experts)} "
                f"(num_experts is {self.num_experts})"
            )
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise InvalidArgument(f"num_groups is {self.num_groups}, it must divide num_experts={self.num_experts}")
        if not 1 <= self.top_groups <= self.num_groups:
            raise InvalidArgument(f"top_groups is {self.top_groups}, expected 1..num_groups={self.num_groups}")
        if self.top_k > self.top_groups * (self.num_experts // self.num_groups):
            raise InvalidArgument(
                f"top_k is {self.top_k}, but top_groups={self.top_groups} leave only "
                f"{self.top_groups * (self.num_experts // self.num_groups)} experts to choose from"
            )
        if self.correction_bias and self.score == "topk_softmax":
            raise InvalidArgument("correction_bias needs scores before the choice; use 'sigmoid' or 'softmax_topk'")

    def route(
        self, logits: torch.Tensor, correction_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Choose experts. Differentiable in ``logits``.

        Args:
            logits: float32 or float64 [T, E].
            correction_bias: [E], added to the scores for the choice only.

        Returns:
            topk_ids int64 [T, K]; topk_weights [T, K]; probabilities [T, E] that sum to 1, for the balance loss.
        """
        if self.score == "sigmoid":
            scores = logits.sigmoid()
            probabilities = scores / (scores.sum(-1, keepdim=True) + RENORMALIZE_EPS)
        else:
            probabilities = logits.softmax(-1)
            scores = logits if self.score == "topk_softmax" else probabilities
        choice = scores.detach()
        if correction_bias is not None:
            choice = choice + correction_bias
        ids = self._limit_groups(choice).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, ids)
        if self.score == "topk_softmax":
            weights = weights.softmax(-1)
        elif self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + RENORMALIZE_EPS)
        return ids, weights * self.scale, probabilities

    def _limit_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """``choice`` with -inf outside the best groups."""
        if self.top_groups == self.num_groups:
            return choice
        groups = choice.unflatten(-1, (self.num_groups, -1))
        best = min(2 if self.score == "sigmoid" else 1, groups.shape[-1])
        value = groups.topk(best, dim=-1).values.sum(-1)
        allowed = torch.zeros_like(value, dtype=torch.bool)
        allowed.scatter_(-1, value.topk(self.top_groups, dim=-1).indices, True)
        return groups.masked_fill(~allowed[..., None], -torch.inf).flatten(-2)


def router_logits(tokens: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tokens @ weight.T`` in ``dtype``, which keeps the tokens as they are for backward, not as ``dtype``.

    Args:
        tokens: [T, H]. weight: [E, H]. dtype: at least as wide as theirs.

    Returns:
        [T, E] of ``dtype``.
    """
    return _Logits.apply(tokens, weight, dtype)


class _Logits(torch.autograd.Function):
    saved_names = ("tokens", "weight")

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(tokens, weight)
        if _by_tensor_cores(tokens, weight, dtype):
            return torch.mm(tokens, weight.t(), out_dtype=dtype)
        return functional.linear(tokens.to(dtype), weight.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        tokens, weight = ctx.saved_tensors
        grad_tokens = grad_weight = None
        if _by_tensor_cores(tokens, weight, grad.dtype):
            # The gradient as the sum of two bfloat16 numbers, which keeps 16 bits of it; float32 sums.
            high = grad.bfloat16()
            parts = torch.cat([high, (grad - high).bfloat16()], 1)
            if ctx.needs_input_grad[0]:
                grad_tokens = parts @ torch.cat([weight, weight])
            if ctx.needs_input_grad[1]:
                halves = torch.mm(parts.t(), tokens, out_dtype=grad.dtype)
                grad_weight = (halves[: len(weight)] + halves[len(weight) :]).to(weight.dtype)
            return grad_tokens, grad_weight, None
        if ctx.needs_input_grad[0]:
            grad_tokens = (grad @ weight.to(grad.dtype)).to(tokens.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (grad.t() @ tokens.to(grad.dtype)).to(weight.dtype)
        return grad_tokens, grad_weight, None


def _by_tensor_cores(tokens: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether torch multiplies these with float32 sums: of bfloat16 that loses nothing, and is much faster."""
    return tokens.is_cuda and tokens.dtype == weight.dtype == torch.bfloat16 and dtype == torch.float32


@dataclass(frozen=True)
class RouterSums:
    """What the losses need of one batch; sums over ranks are the sums of the whole batch.

    Attributes:
        probabilities: [E], summed over tokens.
        squared_lse: [1], log-sum-exp of the logits, squared, summed over tokens.
        expert_counts: [E], routes of each expert.
        num_tokens: [1].
    """

    probabilities: torch.Tensor
    squared_lse: torch.Tensor
    expert_counts: torch.Tensor
    num_tokens: torch.Tensor


def router_sums(logits: torch.Tensor, probabilities: torch.Tensor, topk_ids: torch.Tensor) -> RouterSums:
    """Sums over this rank's tokens.

    Args:
        logits: [T, E]; probabilities: [T, E]; topk_ids: int64 [T, K], all valid.
    """
    counts = torch.bincount(topk_ids.flatten(), minlength=logits.shape[-1])
    return RouterSums(
        probabilities=probabilities.sum(0),
        squared_lse=logits.logsumexp(-1).square().sum().reshape(1),
        expert_counts=counts.to(logits.dtype),
        num_tokens=logits.new_full((1,), logits.shape[0]),
    )


def balance_loss(sums: RouterSums, top_k: int) -> torch.Tensor:
    """E * sum over experts of (share of routes) * (mean probability): 1 when both are even.

    Switch Transformer (Fedus et al., 2021, eq. 4), with K routes a token. Scalar; 0 without tokens.
    """
    tokens = sums.num_tokens.clamp_min(1)
    share = sums.expert_counts / (tokens * top_k)
    return len(share) * (share * sums.probabilities / tokens).sum()


def z_loss(sums: RouterSums) -> torch.Tensor:
    """Mean over tokens of log-sum-exp of the logits, squared (ST-MoE, Zoph et al., 2022, eq. 5). Scalar."""
    return (sums.squared_lse / sums.num_tokens.clamp_min(1)).squeeze(0)
