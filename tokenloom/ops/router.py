"""Routers, which turn logits into (topk_ids, topk_weights), and losses that balance the experts."""

from __future__ import annotations

import math
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
    """Rule that turns a token's logits into routes.

    Attributes:
        num_experts: E, experts to choose from.
        top_k: K, experts per token, at most 32.
        score: "softmax_topk" takes the K largest probabilities over all experts (Switch, Mixtral's paper,
            DeepSeek-V2, Qwen3). "topk_softmax" takes the K largest logits and their softmax (Mixtral's code,
            gpt-oss). "sigmoid" gives each expert a sigmoid of its own (DeepSeek-V3).
        renormalize: divide the K weights by their sum. Changes nothing for "topk_softmax", which sums to 1 already.
            With ``top_k=1`` either makes every weight 1, from which a router cannot learn; a layer warns.
        least_sum: with ``renormalize``, divide by this where the sum is smaller (ERNIE 4.5).
        scale: factor of the final weights (DeepSeek-V3: 2.5).
        correction_bias: choose experts by score + bias, but weight them by score alone (DeepSeek-V3's balancing
            without a loss; with "softmax_topk", ERNIE 4.5).
        bias: the layer adds a learned bias to the logits (gpt-oss). ``route`` takes logits that have it.
        num_groups: number of equal groups of experts. A group's value is the sum of its two best scores for
            "sigmoid" (DeepSeek-V3), its best score otherwise (DeepSeek-V2).
        top_groups: number of best groups to choose experts from. Equal to ``num_groups``, it sets no limit.

    Raises:
        InvalidArgument: the values do not make a router.
    """

    num_experts: int
    top_k: int
    score: Score = "softmax_topk"
    renormalize: bool = False
    scale: float = 1.0
    correction_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    bias: bool = False
    least_sum: float = 0.0

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise InvalidArgument(f"score is {self.score!r}, expected one of {', '.join(SCORES)}")
        for name in ("num_experts", "top_k", "num_groups", "top_groups"):
            if not isinstance(getattr(self, name), int):
                raise InvalidArgument(f"{name} is {getattr(self, name)!r}, expected an integer")
        for name in ("scale", "least_sum"):
            if not isinstance(getattr(self, name), int | float) or not math.isfinite(getattr(self, name)):
                raise InvalidArgument(f"{name} is {getattr(self, name)!r}, expected a finite number")
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
        if not 0 <= self.least_sum < math.inf:
            raise InvalidArgument(f"least_sum is {self.least_sum!r}, expected a finite number of at least 0")
        if self.least_sum and (not self.renormalize or self.score == "topk_softmax"):
            raise InvalidArgument("least_sum needs renormalize=True, and a score other than 'topk_softmax'")
        if self.correction_bias and self.score == "topk_softmax":
            raise InvalidArgument("correction_bias needs scores before the choice; use 'sigmoid' or 'softmax_topk'")

    @property
    def is_constant(self) -> bool:
        """Whether all weights are the same number, whatever the logits: nothing can be learnt from them."""
        divides = self.score == "topk_softmax" or self.renormalize
        return self.top_k == 1 and divides and self.least_sum <= 1 / self.num_experts

    def route(
        self,
        logits: torch.Tensor,
        correction_bias: torch.Tensor | None = None,
        topk_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Choose experts for each token, or weight those that are given. Differentiable in ``logits``.

        Args:
            logits: float32 or float64 [T, E].
            correction_bias: [E], added to the scores for the choice only, or None.
            topk_ids: int64 [T, K], experts that somebody has chosen, -1 for a place without a route; or None. They get
                the weights that they would have as the router's choice. Groups and the correction bias do not matter.

        Returns:
            topk_ids int64 [T, K], topk_weights [T, K], and probabilities [T, E] that sum to 1, for the balance loss.
            Both have the dtype of ``logits``.
        """
        if self.score == "sigmoid":
            scores = logits.sigmoid()
            probabilities = scores / (scores.sum(-1, keepdim=True) + RENORMALIZE_EPS)
        else:
            probabilities = logits.softmax(-1)
            scores = logits if self.score == "topk_softmax" else probabilities
        if topk_ids is not None:
            unused = topk_ids < 0
            # An id that is too large is an error of the dispatch. Here it would end a process on GPUs.
            weights = self._weights(scores.gather(-1, topk_ids.clamp(0, self.num_experts - 1)), unused)
            return topk_ids, weights.masked_fill(unused, 0.0), probabilities
        choice = scores.detach()
        if correction_bias is not None:
            choice = choice + correction_bias
        ids = self._limit_groups(choice).topk(self.top_k, dim=-1).indices
        return ids, self._weights(scores.gather(-1, ids), None), probabilities

    def _weights(self, scores: torch.Tensor, unused: torch.Tensor | None) -> torch.Tensor:
        """Turn the scores of each token's experts into weights. Places that are ``unused`` have no part in them."""
        if self.score == "topk_softmax":
            # Not -inf: a token without a single route would get NaN, in its gradient too.
            scores = scores if unused is None else scores.masked_fill(unused, torch.finfo(scores.dtype).min)
            scores = scores.softmax(-1)
        elif self.renormalize:
            scores = scores if unused is None else scores.masked_fill(unused, 0.0)
            total = scores.sum(-1, keepdim=True) + RENORMALIZE_EPS
            scores = scores / (total.clamp_min(self.least_sum) if self.least_sum else total)
        return scores * self.scale

    def _limit_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """Replace scores outside the best groups by -inf."""
        if self.top_groups == self.num_groups:
            return choice
        groups = choice.unflatten(-1, (self.num_groups, -1))
        best = min(2 if self.score == "sigmoid" else 1, groups.shape[-1])
        value = groups.topk(best, dim=-1).values.sum(-1)
        allowed = torch.zeros_like(value, dtype=torch.bool)
        allowed.scatter_(-1, value.topk(self.top_groups, dim=-1).indices, True)
        return groups.masked_fill(~allowed[..., None], -torch.inf).flatten(-2)


def router_logits(tokens: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute ``tokens @ weight.T`` in ``dtype``, saving the tokens for backward in their own dtype.

    Args:
        tokens: [T, H].
        weight: [E, H].
        dtype: dtype of the result, at least as wide as the operands'.

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
        with torch.autocast(grad.device.type, enabled=False):  # the caller's, if backward runs inside of it
            return _Logits._gradients(ctx, grad)

    @staticmethod
    def _gradients(ctx: Any, grad: torch.Tensor) -> Any:
        tokens, weight = ctx.saved_tensors
        grad_tokens = grad_weight = None
        if _by_tensor_cores(tokens, weight, grad.dtype):
            # As the sum of two bfloat16 numbers the gradient keeps 16 bits. Sums are float32.
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
    """Return whether tensor cores can compute this: bfloat16 operands with float32 sums lose nothing and are fast."""
    return tokens.is_cuda and tokens.dtype == weight.dtype == torch.bfloat16 and dtype == torch.float32


@dataclass(frozen=True)
class RouterSums:
    """Sums over tokens that the losses need. Added up over ranks, they are those of the whole batch.

    Attributes:
        probabilities: [E], sum of the probabilities.
        squared_lse: [1], sum of the squared log-sum-exp of the logits.
        expert_counts: [E], routes of each expert.
        num_tokens: [1], T.
    """

    probabilities: torch.Tensor
    squared_lse: torch.Tensor
    expert_counts: torch.Tensor
    num_tokens: torch.Tensor


def router_sums(logits: torch.Tensor, probabilities: torch.Tensor, topk_ids: torch.Tensor) -> RouterSums:
    """Compute the sums over this rank's tokens.

    Args:
        logits: [T, E].
        probabilities: [T, E].
        topk_ids: int64 [T, K]. Ids of no expert count nowhere.
    """
    num_experts = logits.shape[-1]
    places = torch.where((topk_ids >= 0) & (topk_ids < num_experts), topk_ids, num_experts).flatten()
    counts = torch.bincount(places, minlength=num_experts + 1)[:num_experts]
    return RouterSums(
        probabilities=probabilities.sum(0),
        squared_lse=logits.logsumexp(-1).square().sum().reshape(1),
        expert_counts=counts.to(logits.dtype),
        num_tokens=logits.new_full((1,), logits.shape[0]),
    )


def balance_loss(sums: RouterSums, top_k: int) -> torch.Tensor:
    """Compute E * sum over experts of (share of routes) * (mean probability), a scalar: 1 when both are even.

    Without tokens it is 0. Source: Switch Transformer (Fedus et al., 2021, eq. 4), extended to K routes per token.
    """
    tokens = sums.num_tokens.clamp_min(1)
    share = sums.expert_counts / (tokens * top_k)
    return len(share) * (share * sums.probabilities / tokens).sum()


def z_loss(sums: RouterSums) -> torch.Tensor:
    """Compute the mean over tokens of the squared log-sum-exp of the logits, a scalar. Without tokens it is 0.

    Source: ST-MoE (Zoph et al., 2022, eq. 5).
    """
    return (sums.squared_lse / sums.num_tokens.clamp_min(1)).squeeze(0)
