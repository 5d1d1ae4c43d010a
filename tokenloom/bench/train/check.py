"""Compares outputs and gradients of a layer with a dense float32 reference of all tokens and all experts.

The reference computes expert by expert, in chunks of tokens, so it needs little memory. It shares nothing with the
layer but the router's choice of experts. Each rank computes its own tokens with everybody's experts, for outputs and
gradients of tokens and router. It computes its own experts with everybody's tokens, for the experts' gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

from tokenloom.bench.train.work import Problem
from tokenloom.ops.router import Router, router_logits
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.rank_group import RankGroup

TENSORS = ("o", "dx", "d router_weight", "dw1", "dw2")
LIMITS = {"bf16": 2**-6, "fp32": 1e-5}
"""Most relative difference, by dtype. Both sides start from the same values."""
REASONS = {
    "bf16": "a value is rounded to bfloat16 at most 8 times on its way, by up to 2^-8 each, and 8 independent errors "
    "add up to less than 4",
    "fp32": "sums of thousands of terms in another order, each rounded by 2^-24",
}
LARGEST_SHARE = 1 / 16
"""Most difference of a single value, as a share of the largest value. A lost token is off by about all of it, which
the relative difference does not show among thousands of tokens."""
CHUNK_ROWS = 8192
"""Rows in one GEMM of the reference."""

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """Distance of a tensor, or a part of it, from its reference.

    Attributes:
        max_ref, sum_ref: maximum and sum of the reference's absolute values.
        count: number of values.
        max_diff: largest absolute difference.
        squares_diff, squares_ref: sums of squares.
    """

    max_ref: float
    sum_ref: float
    count: int
    max_diff: float
    squares_diff: float
    squares_ref: float

    @property
    def mean_ref(self) -> float:
        """Mean absolute value of the reference."""
        return self.sum_ref / self.count if self.count else 0.0

    @property
    def relative(self) -> float:
        """Norm of the difference over the norm of the reference."""
        if self.squares_ref == 0:
            return 0.0 if self.squares_diff == 0 else float("inf")
        return float((self.squares_diff / self.squares_ref) ** 0.5)

    def within(self, limit: float) -> bool:
        """Whether both the relative and the largest difference are small enough; never with NaN."""
        return self.relative <= limit and self.max_diff <= LARGEST_SHARE * self.max_ref


def compare(got: torch.Tensor, ref: torch.Tensor) -> Difference:
    """Compare two tensors of one shape, in float32 and with sums in float64."""
    if not ref.numel():
        return Difference(0.0, 0.0, 0, 0.0, 0.0, 0.0)
    got, ref = got.detach().float(), ref.detach().float()
    diff = got - ref

    def sum_of(tensor: torch.Tensor) -> float:
        return float(tensor.sum(dtype=torch.float64))

    squares = [sum_of(each.square()) for each in (diff, ref)]
    return Difference(float(ref.abs().max()), sum_of(ref.abs()), ref.numel(), float(diff.abs().max()), *squares)


def total(parts: Iterable[Difference]) -> Difference:
    """The difference of a whole tensor, from those of its parts."""
    found = list(parts)

    def values(name: str) -> list[float]:
        return [getattr(part, name) for part in found]

    # numpy's maximum keeps NaN, which is the largest difference of all.
    largest = {name: float(np.max(values(name))) for name in ("max_ref", "max_diff")}
    sums = {name: sum(values(name)) for name in ("sum_ref", "squares_diff", "squares_ref")}
    return Difference(**largest, **sums, count=sum(part.count for part in found))


def compare_all(got: Iterable[torch.Tensor], ref: Iterable[torch.Tensor]) -> dict[str, Difference]:
    """Compare all TENSORS of one layer with those of another."""
    return {name: compare(*pair) for name, *pair in zip(TENSORS, got, ref, strict=True)}


@torch.no_grad()
def compare_with_reference(
    context: RankContext, problem: Problem, top_k: int, got: tuple[torch.Tensor, ...]
) -> dict[str, Difference]:
    """Compare this rank's TENSORS, ``got``, with the reference. Collective."""
    weights, ids = choose(problem, top_k)
    reference = _own_tokens(context, problem, weights, ids)
    found = {name: compare(*pair) for name, *pair in zip(TENSORS[:3], got[:3], reference, strict=True)}
    del reference
    parts: dict[str, list[Difference]] = {name: [] for name in TENSORS[3:]}
    for expert, grads in _own_experts(context, problem, weights, ids):
        for name, mine, grad in zip(TENSORS[3:], got[3:], grads, strict=True):
            parts[name].append(compare(mine[expert], grad))
    return found | {name: total(each) for name, each in parts.items()}


def choose(problem: Problem, top_k: int) -> Pair:
    """Weights (float32 [T, K]) and experts (int64 [T, K]) of the tokens.

    The router itself chooses: experts whose scores are almost alike must be chosen alike.
    """
    x, router_weight = problem.x.detach(), problem.weights.router.detach()
    ids = Router(len(router_weight), top_k).route(router_logits(x, router_weight, torch.float32))[0]
    return _scores(x.float(), router_weight.float()).gather(-1, ids), ids


def _scores(x: torch.Tensor, router_weight: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, router_weight).softmax(-1)


def _own_tokens(
    context: RankContext, problem: Problem, weights: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs, gradients of x and of router_weight from this rank's tokens; all float32."""
    out, grad_weights = torch.zeros_like(problem.grad, dtype=torch.float32), torch.zeros_like(weights)
    grad_x = torch.zeros_like(out)
    for expert in range(len(problem.weights.router)):
        owner, place = divmod(expert, len(problem.weights.w1))
        # Others' weights go to new memory, never into this rank's own.
        pair = [
            (each[place] if owner == context.rank else torch.empty_like(each[0])) for each in _expert_weights(problem)
        ]
        for each in pair:
            dist.broadcast(each.view(torch.uint8), group=context.group, group_src=owner)
        w1, w2 = (each.float() for each in pair)
        for tokens, places in _chunks_of(ids, expert):
            rows = problem.x[tokens].detach().float()
            with torch.enable_grad():
                y = _expert(rows.requires_grad_(), w1, w2)
                dots = (y * problem.grad[tokens]).sum(-1)
            own_weights = weights[tokens, places]
            out.index_add_(0, tokens, own_weights[:, None] * y)
            grad_weights[tokens, places] = dots.detach()
            grad_x.index_add_(0, tokens, *torch.autograd.grad(dots, rows, own_weights))
    with torch.enable_grad():
        leaves = [each.detach().float().requires_grad_() for each in (problem.x, problem.weights.router)]
        chosen = _scores(*leaves).gather(-1, ids)
    through_router, grad_router = torch.autograd.grad(chosen, leaves, grad_weights)
    return out, grad_x + through_router, grad_router


def _own_experts(
    context: RankContext, problem: Problem, weights: torch.Tensor, ids: torch.Tensor
) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Gradients of this rank's experts from the tokens of all ranks.

    Yields:
        The expert, by its place on this rank, and float32 gradients of w1 [2I, H] and w2 [H, I].
    """
    ranks, local = RankGroup(context.group, device=context.device), len(problem.weights.w1)

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        flat = ranks.all_gather(tensor.detach().contiguous().view(torch.uint8).flatten(), "reference")
        return flat.view(tensor.dtype).view(-1, *tensor.shape[1:])

    x, grad, all_weights, all_ids = (gather(each) for each in (problem.x, problem.grad, weights, ids))
    for expert in range(local):
        leaves = [each[expert].float().requires_grad_() for each in _expert_weights(problem)]
        sums = [torch.zeros_like(leaf) for leaf in leaves]
        for tokens, places in _chunks_of(all_ids, context.rank * local + expert):
            with torch.enable_grad():
                dots = (_expert(x[tokens].float(), *leaves) * grad[tokens]).sum(-1)
            for each, part in zip(sums, torch.autograd.grad(dots, leaves, all_weights[tokens, places]), strict=True):
                each += part
        yield expert, sums


def _expert_weights(problem: Problem) -> Pair:
    """w1 and w2, detached."""
    return problem.weights.w1.detach(), problem.weights.w2.detach()


def _chunks_of(ids: torch.Tensor, expert: int) -> Iterator[Pair]:
    """Tokens that go to an expert, and which of their K routes does, in chunks."""
    tokens, places = (ids == expert).nonzero(as_tuple=True)
    return zip(tokens.split(CHUNK_ROWS), places.split(CHUNK_ROWS), strict=True)


def _expert(rows: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    gate, up = functional.linear(rows, w1).chunk(2, -1)
    return functional.linear(gate * torch.sigmoid(gate) * up, w2)
