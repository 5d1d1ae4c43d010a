"""What ``tokenloom bench train`` gives the layer to do."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenloom.bench.cases import Shape
from tokenloom.comm.strategy import Strategy
from tokenloom.errors import InvalidArgument
from tokenloom.plan import Plan
from tokenloom.tune.samples import draw_topk_ids

STEER = 8.0
"""Added to the logits of experts that are to be chosen: several times what random logits differ by."""


@dataclass(frozen=True)
class TrainShape:
    """A layer and its tokens.

    Attributes:
        num_tokens: T of all ranks together; each has as many. hidden: H. intermediate: I. num_experts: E. top_k: K.
    """

    num_tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int

    def plan(self, num_ranks: int) -> Plan:
        """Its sizes on that many ranks.

        Raises:
            InvalidArgument: tokens or experts cannot be spread over them, or experts are fewer than a token chooses.
        """
        if self.num_tokens % num_ranks:
            raise InvalidArgument(
                f"{self.num_tokens} tokens in --thiek are those of all ranks, and not divisible by the {num_ranks} "
                "ranks; choose a multiple, or other --ranks"
            )
        return Shape(self.num_tokens // num_ranks, self.hidden, self.top_k, self.num_experts).plan(num_ranks)

    def forward_flops(self, num_tokens: int) -> int:
        """Of the experts' products for so many tokens; backward has twice as many."""
        return 6 * num_tokens * self.top_k * self.hidden * self.intermediate

    def kept_bytes(self, num_tokens: int, dtype: torch.dtype) -> int:
        """Of a row and its pre-activations, for each route of so many tokens."""
        return num_tokens * self.top_k * (self.hidden + 2 * self.intermediate) * dtype.itemsize


@dataclass(frozen=True)
class TrainOptions:
    """How the layer runs, and what is asked of it; see ExpertParallelMoE.

    Attributes:
        dtype: "bf16" or "fp32".
        skew: experts are drawn with probability proportional to 1 / place^skew; 0: as a random router chooses.
        strategy: None: what the layer picks.
        check: compare with the reference.
        iterations: samples of each number.
    """

    dtype: str
    skew: float
    strategy: Strategy | None
    overlap: bool
    redispatch_in_backward: bool
    pool_rows: int | None
    check: bool
    iterations: int


@dataclass(frozen=True)
class Weights:
    """Of a layer on one rank: router [E, H], w1 [L, 2I, H], w2 [L, H, I]. All want gradients."""

    router: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor


@dataclass(frozen=True)
class Problem:
    """What a layer is given on one rank: x [T, H], which wants a gradient, weights, and the gradient [T, H] of the
    output."""

    x: torch.Tensor
    weights: Weights
    grad: torch.Tensor

    def gradients(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of x, router, w1 and w2, from the layer's output."""
        wanted = (self.x, self.weights.router, self.weights.w1, self.weights.w2)
        return torch.autograd.grad(out, wanted, self.grad)


def make_problem(num_tokens: int, weights: Weights, top_k: int, skew: float = 0.0, seed: int = 0) -> Problem:
    """Random tokens and gradients for these weights.

    Args:
        skew: move tokens so that the router chooses as :func:`tokenloom.tune.samples.draw_topk_ids` draws.
        seed: of the tokens; the rank.

    Raises:
        InvalidArgument: a skew for more experts than a token has values.
    """
    num_experts, hidden = weights.router.shape
    device, dtype = weights.w1.device, weights.w1.dtype
    generator = torch.Generator(device).manual_seed(seed)
    x, grad = (torch.randn(num_tokens, hidden, generator=generator, device=device, dtype=dtype) for _ in range(2))
    if skew:
        require_steerable(num_experts, hidden)
        ids = draw_topk_ids(seed, num_tokens, num_experts, top_k, skew).to(device, torch.int64)
        wanted = torch.zeros(num_tokens, num_experts, device=device).scatter_(1, ids, STEER)
        # Each of its rows raises one logit and leaves the others as they are.
        x += (wanted @ torch.linalg.pinv(weights.router.detach().float()).t()).to(dtype)
    return Problem(x.requires_grad_(), weights, grad)


def require_steerable(num_experts: int, hidden: int) -> None:
    """Raises InvalidArgument where tokens cannot be made that the router sends wherever one likes."""
    if num_experts > hidden:
        raise InvalidArgument(
            f"--skew with {num_experts} experts needs a hidden size of at least as many, {hidden} given; leave it out"
        )
