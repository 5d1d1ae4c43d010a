"""Work of ``tokenloom bench train``, and the dense float32 reference that checks its results.

The reference computes expert by expert, in chunks of tokens, so it needs little memory. It shares nothing with the
layer but the router's choice of experts. Each rank computes its own tokens with everybody's experts, for outputs and
gradients of tokens and router. It computes its own experts with everybody's tokens, for the experts' gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional

from tokenloom.backends.seam import Strategy
from tokenloom.bench.differences import Difference, compare, total
from tokenloom.bench.workload import CallSizes
from tokenloom.errors import InvalidArgument
from tokenloom.ops.router import Router, router_logits
from tokenloom.plan import Plan, align_up
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.training.layer import ExpertParallelMoE
from tokenloom.training.replicas import reduce_replica_gradients
from tokenloom.training.shards import local_part
from tokenloom.tune.samples import draw_topk_ids

TENSORS = ("o", "dx", "d router_weight", "dw1", "dw2")
LIMITS = {"bf16": 2**-6, "fp32": 1e-5}
"""Most relative difference, by dtype. Both sides start from the same values."""
REASONS = {
    "bf16": "a value is rounded to bfloat16 at most 8 times on its way, by up to 2^-8 each, and 8 independent errors "
    "add up to less than 4",
    "fp32": "sums of thousands of terms in another order, each rounded by 2^-24",
}
CHUNK_ROWS = 8192
"""Rows in one GEMM of the reference."""
Pair = tuple[torch.Tensor, torch.Tensor]

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
        """The plan for these sizes on ``num_ranks`` ranks."""
        if self.num_tokens % num_ranks:
            raise InvalidArgument(
                f"--thiek has {self.num_tokens} tokens, those of all ranks, expected a multiple of the {num_ranks} "
                f"ranks; pass {align_up(self.num_tokens, num_ranks)}"
            )
        return CallSizes(self.num_tokens // num_ranks, self.hidden, self.top_k, self.num_experts).plan(num_ranks)

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
        max_vio: largest expected load of an expert over the mean, less 1. 0: as a random router chooses.
        strategy: what carries the payloads; None: the layer's own choice.
        pool_rows: most rows of a rank's experts; None: exact sizes.
        spare_slots: measure the layer with so many more slots of each rank too, with replicas in them, and with each
            batch split over the ranks; None: do not.
    """

    dtype: str
    max_vio: float
    strategy: Strategy | None
    overlap: bool
    redispatch_in_backward: bool
    pool_rows: int | None
    check: bool
    iterations: int
    spare_slots: int | None = None


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
class TrainProblem:
    """Inputs of a layer on one rank.

    Attributes:
        x: [T, H], requires a gradient.
        grad: [T, H], gradient of the output.
    """

    x: torch.Tensor
    weights: Weights
    grad: torch.Tensor

    def gradients(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of x, router, w1 and w2, from the layer's output."""
        return tuple(local_part(grad) for grad in self._gradients(out))

    def gradients_at_owners(self, out: torch.Tensor, layer: ExpertParallelMoE) -> tuple[torch.Tensor, ...]:
        """The same of a layer with replicas, whose slots' gradients are summed as before a user's step. Collective."""
        found = self._gradients(out)
        for weight, grad in zip(self.weights.experts, found[2:], strict=True):
            weight.grad = grad
        reduce_replica_gradients(layer)
        return tuple(map(local_part, found))

    def _gradients(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, (self.x, self.weights.router, *self.weights.experts), self.grad)


def make_problem(num_tokens: int, weights: Weights, top_k: int, max_vio: float = 0.0, seed: int = 0) -> TrainProblem:
    """Draw tokens and gradients for these weights.

    Args:
        max_vio: move tokens so that the router chooses what :func:`tokenloom.tune.samples.draw_topk_ids` draws.
        seed: seed of the tokens; the rank.
    """
    num_experts, hidden = weights.router.shape
    device, dtype = weights.w1.device, weights.w1.dtype
    generator = torch.Generator(device).manual_seed(seed)
    x, grad = (torch.randn(num_tokens, hidden, generator=generator, device=device, dtype=dtype) for _ in range(2))
    if max_vio:
        require_steerable(num_experts, hidden)
        ids = draw_topk_ids(seed, num_tokens, num_experts, top_k, max_vio).to(device, torch.int64)
        wanted = torch.zeros(num_tokens, num_experts, dtype=torch.float32, device=device).scatter_(1, ids, STEER)
        # Each row of the pseudo-inverse raises one logit and leaves the others as they are.
        x += (wanted @ torch.linalg.pinv(weights.router.detach().float()).t()).to(dtype)
    return TrainProblem(x.requires_grad_(), weights, grad)


def require_steerable(num_experts: int, hidden: int) -> None:
    """Check that tokens exist which the router sends wherever a draw wants them."""
    if num_experts > hidden:
        raise InvalidArgument(
            f"hidden is {hidden}, expected at least {num_experts}, the experts, for a routing that is drawn; "
            "leave --max-vio out"
        )


def compare_all(got: Iterable[torch.Tensor], ref: Iterable[torch.Tensor]) -> dict[str, Difference]:
    """Compare all TENSORS of one layer with those of another."""
    return {name: compare(*pair) for name, *pair in zip(TENSORS, got, ref, strict=True)}


@torch.no_grad()
def compare_with_reference(
    context: RankContext, problem: TrainProblem, top_k: int, got: tuple[torch.Tensor, ...]
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


def choose(problem: TrainProblem, top_k: int) -> Pair:
    """Weights (float32 [T, K]) and experts (int64 [T, K]) of the tokens.

    The router itself chooses: experts whose scores are almost alike must be chosen alike.
    """
    x, router_weight = problem.x.detach(), problem.weights.router.detach()
    ids = Router(len(router_weight), top_k).route(router_logits(x, router_weight, torch.float32))[0]
    return _scores(x.float(), router_weight.float()).gather(-1, ids), ids


def _scores(x: torch.Tensor, router_weight: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, router_weight).softmax(-1)


def _own_tokens(
    context: RankContext, problem: TrainProblem, weights: torch.Tensor, ids: torch.Tensor
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
    context: RankContext, problem: TrainProblem, weights: torch.Tensor, ids: torch.Tensor
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


def _expert_weights(problem: TrainProblem) -> Pair:
    """w1 and w2, detached."""
    return problem.weights.w1.detach(), problem.weights.w2.detach()


def _chunks_of(ids: torch.Tensor, expert: int) -> Iterator[Pair]:
    """Tokens that go to an expert, and which of their K routes does, in chunks."""
    tokens, places = (ids == expert).nonzero(as_tuple=True)
    return zip(tokens.split(CHUNK_ROWS), places.split(CHUNK_ROWS), strict=True)


def _expert(rows: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    gate, up = functional.linear(rows, w1).chunk(2, -1)
    return functional.linear(gate * torch.sigmoid(gate) * up, w2)
