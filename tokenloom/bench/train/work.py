"""What ``tokenloom bench train`` gives the layer to do."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenloom.backends.seam import Strategy
from tokenloom.bench.common.shape import Shape
from tokenloom.errors import InvalidArgument
from tokenloom.plan import Plan, align_up
from tokenloom.training.shards import local_part
from tokenloom.tune.samples import draw_topk_ids

STEER = 8.0
"""Added to the logits of experts that are to be chosen: several times the spread of random logits."""


@dataclass(frozen=True)
class TrainShape:
    """A layer and its tokens.

    Attributes:
        num_tokens: T of all ranks together, the same number on each.
        hidden, intermediate, num_experts, top_k: H, I, E and K.
    """

    num_tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int

    def plan(self, num_ranks: int) -> Plan:
        """The plan for these sizes on ``num_ranks`` ranks.

        Raises:
            InvalidArgument: tokens or experts cannot be spread over the ranks, or experts are fewer than a token
                chooses.
        """
        if self.num_tokens % num_ranks:
            raise InvalidArgument(
                f"--thiek has {self.num_tokens} tokens, those of all ranks, expected a multiple of the {num_ranks} "
                f"ranks; pass {align_up(self.num_tokens, num_ranks)}"
            )
        return Shape(self.num_tokens // num_ranks, self.hidden, self.top_k, self.num_experts).plan(num_ranks)

    def forward_flops(self, num_tokens: int) -> int:
        """Operations of the experts' GEMMs in a forward of ``num_tokens`` tokens. A backward has twice as many."""
        return 6 * num_tokens * self.top_k * self.hidden * self.intermediate

    def kept_bytes(self, num_tokens: int, dtype: torch.dtype) -> int:
        """Bytes of a row and its pre-activations, for each route of ``num_tokens`` tokens."""
        return num_tokens * self.top_k * (self.hidden + 2 * self.intermediate) * dtype.itemsize


@dataclass(frozen=True)
class TrainOptions:
    """How the layer runs, and what is asked of it. :class:`tokenloom.ExpertParallelMoE` describes the options.

    Attributes:
        dtype: "bf16" or "fp32".
        skew: s; experts are drawn with probability proportional to 1 / place^s. 0: as a random router chooses.
        strategy: what carries the payloads; None: the layer's own choice.
        overlap: whether transfers run beside GEMMs.
        redispatch_in_backward: whether tokens are kept and sent again, instead of their dispatched rows.
        pool_rows: most rows of a rank's experts; None: exact sizes.
        check: whether to compare with the reference.
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
    """A layer's weights on one rank, all of which require gradients.

    Attributes:
        router: [E, H].
        experts: w1 and w2 as parameters, DTensors of all ranks' experts where there are ranks.
    """

    router: torch.Tensor
    experts: tuple[torch.Tensor, torch.Tensor]

    @property
    def w1(self) -> torch.Tensor:
        """[L, 2I, H]."""
        return local_part(self.experts[0])

    @property
    def w2(self) -> torch.Tensor:
        """[L, H, I]."""
        return local_part(self.experts[1])


@dataclass(frozen=True)
class Problem:
    """What a layer is given on one rank.

    Attributes:
        x: [T, H], requires a gradient.
        weights: the layer's weights.
        grad: [T, H], gradient of the output.
    """

    x: torch.Tensor
    weights: Weights
    grad: torch.Tensor

    def gradients(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of x, router, w1 and w2, from the layer's output."""
        wanted = (self.x, self.weights.router, *self.weights.experts)
        return tuple(local_part(grad) for grad in torch.autograd.grad(out, wanted, self.grad))


def make_problem(num_tokens: int, weights: Weights, top_k: int, skew: float = 0.0, seed: int = 0) -> Problem:
    """Draw tokens and gradients for these weights.

    Args:
        skew: move tokens so that the router chooses what :func:`tokenloom.tune.samples.draw_topk_ids` draws.
        seed: seed of the tokens; the rank.

    Raises:
        InvalidArgument: a skew with more experts than a token has values.
    """
    num_experts, hidden = weights.router.shape
    device, dtype = weights.w1.device, weights.w1.dtype
    generator = torch.Generator(device).manual_seed(seed)
    x, grad = (torch.randn(num_tokens, hidden, generator=generator, device=device, dtype=dtype) for _ in range(2))
    if skew:
        require_steerable(num_experts, hidden)
        ids = draw_topk_ids(seed, num_tokens, num_experts, top_k, skew).to(device, torch.int64)
        wanted = torch.zeros(num_tokens, num_experts, dtype=torch.float32, device=device).scatter_(1, ids, STEER)
        # Each row of the pseudo-inverse raises one logit and leaves the others as they are.
        x += (wanted @ torch.linalg.pinv(weights.router.detach().float()).t()).to(dtype)
    return Problem(x.requires_grad_(), weights, grad)


def require_steerable(num_experts: int, hidden: int) -> None:
    """Check that tokens exist which the router sends wherever a skew wants them.

    Raises:
        InvalidArgument: there are more experts than a token has values.
    """
    if num_experts > hidden:
        raise InvalidArgument(
            f"hidden is {hidden}, expected at least {num_experts}, the experts, beside a skew; leave --skew out"
        )
