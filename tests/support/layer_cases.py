"""Layers to test, their inputs, and a dense oracle: the same mathematics with every expert on every token.

The oracle shares the router (tested by itself against a loop) with the layer, and nothing else: no dispatch, no
grouping, no ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import tokenloom as tl
from tokenloom import Activation, Router, WeightLayout
from tokenloom.training.shards import local_part

EXPERT_WEIGHTS = ("w1", "w2", "w1_bias", "w2_bias")
NUM_EXPERTS = 8
"""Divisible by every group size."""
HIDDEN = 16
TOP_K = 3

ROUTERS = {
    "softmax_topk": Router(NUM_EXPERTS, TOP_K),
    "renormalized": Router(NUM_EXPERTS, TOP_K, renormalize=True),
    "topk_softmax": Router(NUM_EXPERTS, TOP_K, "topk_softmax"),
    "deepseek_v3": Router(NUM_EXPERTS, TOP_K, "sigmoid", True, 2.5, True, num_groups=4, top_groups=2),
    "gpt_oss": Router(NUM_EXPERTS, TOP_K, "topk_softmax", bias=True),
    "ernie": Router(NUM_EXPERTS, TOP_K, renormalize=True, correction_bias=True, least_sum=1e-12),
}

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}
"""Relative to the largest value of a tensor. float64, float32: sums in another order. bfloat16: each of the rows,
the partial sums, the gates and the output is rounded once, by up to 2^-9 of its size, and sums cancel."""


@dataclass(frozen=True)
class LayerCase:
    """A layer, its inputs and the options that matter to its gradients.

    Attributes:
        tokens: of rank r: ``tokens[r]``; uneven, none on the second rank.
        x_grad: whether the input wants a gradient (the first layer of a model has none).
        frozen: names of parameters that want none.
    """

    router: str = "softmax_topk"
    dtype: torch.dtype = torch.float64
    intermediate: int = 12
    shared: int = 8
    balance_coef: float = 0.3
    z_coef: float = 0.05
    router_grad: Literal["local", "sum"] = "local"
    expert_grad_scale: float = 1.0
    tokens: tuple[int, ...] = (5, 0, 7, 3, 1, 4, 0, 6)
    x_grad: bool = True
    frozen: tuple[str, ...] = ()
    activation: Activation | str = "swiglu"
    biases: bool = False
    layout: WeightLayout = WeightLayout()  # noqa: RUF009
    shared_gate: bool = False


def make_layer(case: LayerCase, group: dist.ProcessGroup | None, **options: Any) -> tl.ExpertParallelMoE:
    """The layer, with the same full weights for any number of ranks, and a bias that changes choices."""
    layer = tl.ExpertParallelMoE(
        group,
        **{
            "hidden": HIDDEN,
            "intermediate": case.intermediate,
            "num_experts": NUM_EXPERTS,
            "top_k": TOP_K,
            "max_tokens_per_rank": max(1, sum(case.tokens)),
            "router": ROUTERS[case.router],
            "shared_intermediate": case.shared,
            "activation": case.activation,
            "biases": case.biases,
            "weight_layout": case.layout,
            "shared_gate": case.shared_gate,
            "balance_coef": case.balance_coef,
            "z_coef": case.z_coef,
            "router_grad": case.router_grad,
            "expert_grad_scale": case.expert_grad_scale,
            "dtype": case.dtype,
            **options,
        },
    )
    layer.reset_parameters(seed=3)
    with torch.no_grad():
        layer.router_weight.mul_(4)  # decisions that differ between tokens
        if layer.correction_bias is not None:
            layer.correction_bias.copy_(torch.linspace(-0.2, 0.2, NUM_EXPERTS, dtype=torch.float32, device="cpu"))
    for name in case.frozen:
        layer.get_parameter(f"experts.{name}" if name in EXPERT_WEIGHTS else name).requires_grad_(False)
    return layer


def short(name: str) -> str:
    """Name of a layer's parameter as cases and the oracle have it: "w1" of "experts.w1"."""
    return name.removeprefix("experts.")


def full_weights(layer: tl.ExpertParallelMoE) -> dict[str, torch.Tensor]:
    """All experts, and all else, by short names. Collective."""
    return {short(name): value for name, value in tl.gather_state_dict(layer).items()}


def make_inputs(case: LayerCase, num_ranks: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(tokens, factors) of every rank, on the CPU; a rank's loss is the sum of outputs times factors."""
    generator = torch.Generator().manual_seed(11)

    def draw() -> list[torch.Tensor]:
        return [torch.randn(t, HIDDEN, generator=generator).to(case.dtype) for t in case.tokens[:num_ranks]]

    return draw(), draw()


class Dense(NamedTuple):
    """One rank's tokens through the oracle."""

    out: torch.Tensor
    logits: torch.Tensor
    probabilities: torch.Tensor
    ids: torch.Tensor


def dense_activation(hidden: torch.Tensor, activation: Activation, interleaved: bool) -> torch.Tensor:
    """By torch's functions, of [..., 2I] or [..., I]."""
    function = {
        "silu": lambda x: x * torch.sigmoid(activation.alpha * x),
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "relu": torch.nn.functional.relu,
        "relu2": lambda x: torch.nn.functional.relu(x) ** 2,
    }[activation.function]
    if not activation.gated:
        return function(hidden)
    gate, up = hidden.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else hidden.chunk(2, -1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return function(gate) * (up + activation.up_offset)


def dense_layer(
    x: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    router: Router,
    bias: torch.Tensor | None,
    case: LayerCase = LayerCase(),
) -> Dense:
    """Every expert on every token, then the weighted sum over experts.

    Args:
        x: [T, H] float64; weights: full, by the layer's names, float64.
    """
    activation, layout = Activation.of(case.activation), case.layout
    logits = x @ weights["router_weight"].T + weights.get("router_bias", 0.0)
    ids, topk_weights, probabilities = router.route(logits, bias)
    mix = torch.zeros_like(logits).scatter_add(1, ids, topk_weights)
    first, second = ("th,ehi->tei", "tei,eih->teh") if layout.transposed else ("th,eih->tei", "tei,ehi->teh")
    hidden = torch.einsum(first, x, weights["w1"]) + weights.get("w1_bias", 0.0)
    y = torch.einsum(second, dense_activation(hidden, activation, layout.interleaved), weights["w2"])
    out = torch.einsum("te,teh->th", mix, y + weights.get("w2_bias", 0.0))
    if "shared_w1" in weights:
        shared = dense_activation(x @ weights["shared_w1"].T, activation, False) @ weights["shared_w2"].T
        gate = torch.sigmoid(x @ weights["shared_gate_weight"].T) if case.shared_gate else 1.0
        out = out + gate * shared
    return Dense(out, logits, probabilities, ids)


def dense_aux_loss(case: LayerCase, parts: Sequence[Dense]) -> torch.Tensor:
    """Both losses over all tokens, from their definitions."""
    logits = torch.cat([part.logits for part in parts])
    probabilities = torch.cat([part.probabilities for part in parts])
    ids = torch.cat([part.ids for part in parts])
    if not len(ids):
        return logits.new_zeros(())
    share = torch.bincount(ids.flatten(), minlength=NUM_EXPERTS).double() / ids.numel()
    balance = NUM_EXPERTS * (share * probabilities.mean(0)).sum()
    return case.balance_coef * balance + case.z_coef * torch.logsumexp(logits, -1).square().mean()


@dataclass(frozen=True)
class Expected:
    """What the oracle says; gradients are of the sum over ranks of each rank's loss.

    Attributes:
        outs: of each rank. aux_loss: of all.
        x_grads: of each rank. grads: by name, of expert weights and, summed over ranks, of the replicated ones.
        local_grads: by name, of the replicated weights, each rank's own part.
        ids: chosen experts, of each rank.
    """

    outs: list[torch.Tensor]
    aux_loss: torch.Tensor
    x_grads: list[torch.Tensor]
    grads: dict[str, torch.Tensor]
    local_grads: list[dict[str, torch.Tensor]]
    ids: list[torch.Tensor]


def expect(
    case: LayerCase, full: Mapping[str, torch.Tensor], xs: Sequence[torch.Tensor], factors: Sequence[torch.Tensor]
) -> Expected:
    """The oracle on all ranks' tokens. Each rank has its own copy of the replicated weights: its part of the gradient.

    Args:
        full: all of the layer, from :func:`full_weights`.
    """
    bias = full.get("correction_bias")
    experts = {name: full[name].double().requires_grad_() for name in EXPERT_WEIGHTS if name in full}
    names = [name for name in full if name not in (*EXPERT_WEIGHTS, "correction_bias")]
    replicas = [{name: full[name].double().clone().requires_grad_() for name in names} for _ in xs]
    inputs = [x.double().requires_grad_() for x in xs]
    parts = [
        dense_layer(x, {**experts, **replica}, ROUTERS[case.router], bias, case)
        for x, replica in zip(inputs, replicas, strict=True)
    ]
    aux_loss = dense_aux_loss(case, parts)
    loss = aux_loss + torch.stack([(p.out * f.double()).sum() for p, f in zip(parts, factors, strict=True)]).sum()
    loss.backward()

    def grad(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad

    local_grads = [{name: grad(value) for name, value in replica.items()} for replica in replicas]
    grads = {name: grad(value) * case.expert_grad_scale for name, value in experts.items()}
    grads |= {name: torch.stack([local[name] for local in local_grads]).sum(0) for name in names}
    return Expected(
        outs=[part.out.detach() for part in parts],
        aux_loss=aux_loss.detach(),
        x_grads=[grad(x) for x in inputs],
        grads=grads,
        local_grads=local_grads,
        ids=[part.ids for part in parts],
    )


def assert_near(got: torch.Tensor | None, want: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    """Within TOLERANCE of the largest value; of a DTensor, the part that lies here."""
    assert got is not None, f"{what} is missing"
    limit = TOLERANCE[dtype] * max(1.0, want.abs().max().item() if want.numel() else 0.0)
    found = local_part(got.detach()).double().cpu()
    torch.testing.assert_close(found, want.double().cpu(), rtol=0, atol=limit, msg=lambda text: f"{what}: {text}")


def keeping_products() -> Any:
    """Contexts of a selective activation checkpoint that computes all but products again."""
    kept = [torch.ops.aten.mm.default, torch.ops.aten._grouped_mm.default]
    return create_selective_checkpoint_contexts(kept)
