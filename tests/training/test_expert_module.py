"""RoutedExperts: the experts of a layer by themselves, and the names that they had in older checkpoints."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import tokenloom as tl
from tests.conftest import Ranks
from tests.support import emulator
from tests.support.layer_cases import (
    EXPERT_WEIGHTS,
    HIDDEN,
    NUM_EXPERTS,
    TOP_K,
    LayerCase,
    make_inputs,
    make_layer,
    short,
)
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.processes import RankContext
from tokenloom.training.shards import local_part

FP32 = torch.float32
CASE = LayerCase(balance_coef=0.0, z_coef=0.0, shared=0, biases=True, expert_grad_scale=0.25, dtype=FP32)
ONE_EXPERT = {"hidden": HIDDEN, "intermediate": 12, "num_experts": NUM_EXPERTS, "top_k": TOP_K}


def make_experts(**options: Any) -> tl.RoutedExperts:
    given = {**ONE_EXPERT, "max_tokens_per_rank": 64, "biases": True, "expert_grad_scale": 0.25, "dtype": FP32}
    experts = tl.RoutedExperts(**(given | options))
    experts.reset_parameters(seed=3)
    return experts


# -- the experts of a layer -----------------------------------------------------------------------------------


@on_ranks
def test_the_experts_of_a_layer_by_themselves(context: RankContext) -> None:
    """The layer's own routes, from outside: values, gradients and weights of a seed are the same bits."""
    layer = make_layer(CASE, context.group)
    experts = make_experts(group=context.group)
    xs, factors = (given[context.rank].to(context.device) for given in make_inputs(CASE, context.num_ranks))
    x, again = xs.clone().requires_grad_(), xs.clone().requires_grad_()
    out, _ = layer(x)
    (out * factors).sum().backward()

    ids, weights, _ = layer.router.route(again @ layer.router_weight.T)
    shape = (1, len(xs))
    found = experts(again.view(*shape, HIDDEN), ids.view(*shape, TOP_K), weights.view(*shape, TOP_K))
    assert found.shape == (*shape, HIDDEN)
    (found[0] * factors).sum().backward()

    assert torch.equal(found[0], out)
    torch.testing.assert_close(again.grad, x.grad)
    assert [name for name, _ in experts.named_parameters()] == list(EXPERT_WEIGHTS)
    for name, parameter in experts.named_parameters():
        other = layer.get_parameter(f"experts.{name}")
        assert torch.equal(local_part(parameter), local_part(other)), name
        assert torch.equal(local_part(parameter.grad), local_part(other.grad)), name
    assert experts.local_experts == layer.local_experts
    assert {id(each) for each in experts.expert_parameters()} == {id(each) for each in experts.parameters()}


def test_places_without_a_route() -> None:
    """And weights of another floating-point dtype, which are exact in float32."""
    experts, x = make_experts(), torch.randn(3, HIDDEN)
    ids = torch.tensor([[0, 5, -1], [-1, -1, -1], [7, -1, -1]])
    weights = torch.tensor([[0.5, 0.25, 9.0], [9.0, 9.0, 9.0], [1.0, 9.0, 9.0]])
    out = experts(x, ids, weights.bfloat16())
    assert not out[1].any()
    assert torch.equal(out, experts(x, ids.int(), weights.double()))
    assert torch.equal(out[2], experts(x[2], ids[2], weights[2]))


def test_work_beside_the_dispatch() -> None:
    experts, x, seen = make_experts(), torch.randn(3, HIDDEN), []
    ids, weights = torch.zeros(3, TOP_K, dtype=torch.int64), torch.ones(3, TOP_K)
    experts(x, ids, weights, lambda: seen.append(1))
    assert seen == [1]


def test_main_grads() -> None:
    experts, plain = make_experts(main_grads=True), make_experts()
    for each in (experts, plain, copy.deepcopy(experts)):
        ids, weights = torch.arange(3 * TOP_K).view(3, TOP_K) % NUM_EXPERTS, torch.ones(3, TOP_K)
        each(torch.ones(3, HIDDEN), ids, weights).square().sum().backward()
    for summed, alone in zip(experts.parameters(), plain.parameters(), strict=True):
        assert summed.grad is None
        assert torch.equal(summed.main_grad, alone.grad)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, behind each break of a graph
def test_a_compiled_model_runs_them_between_its_graphs() -> None:
    experts, x = make_experts(), torch.randn(5, HIDDEN)
    ids, weights = torch.arange(5 * TOP_K).view(5, TOP_K) % NUM_EXPERTS, torch.rand(5, TOP_K)

    def function(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return experts(x.sin(), ids, weights.exp()).cos()

    torch._dynamo.reset()
    assert torch.equal(torch.compile(function, backend="aot_eager")(x, weights), function(x, weights))


# -- bad input ------------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[type[Exception], str]] = {
    "ids of other tokens": (tl.ShapeMismatch, r"topk_ids is \[2, 3\], expected \[4, 3\]"),
    "weights of other tokens": (tl.ShapeMismatch, r"topk_weights is \[3, 4\], expected \[4, 3\]"),
    "integer weights": (tl.DtypeMismatch, "topk_weights is torch.int64, expected floating point"),
    "no tensor": (tl.InvalidArgument, "topk_ids is a list"),
    "dtype of x": (tl.DtypeMismatch, "x is torch.float64, the layer is torch.float32"),
    "expert that is not there": (tl.InvalidExpertId, "8"),
    "too many tokens": (tl.ShapeMismatch, "x has 65 tokens"),
}


def fail_on_one_rank(context: RankContext, fault: str) -> None:
    experts = make_experts(group=context.group)
    error, named = FAULTS[fault]

    def call(fault: str = "") -> torch.Tensor:
        num_tokens = 65 if fault == "too many tokens" else 4
        x = torch.ones(num_tokens, HIDDEN, device=context.device)
        ids: Any = torch.zeros(num_tokens, TOP_K, dtype=torch.int64, device=context.device)
        weights = torch.ones(num_tokens, TOP_K, device=context.device)
        if fault == "ids of other tokens":
            ids = ids[:2]
        elif fault == "weights of other tokens":
            weights = weights.T
        elif fault == "integer weights":
            weights = weights.long()
        elif fault == "no tensor":
            ids = ids.tolist()
        elif fault == "dtype of x":
            x = x.double()
        elif fault == "expert that is not there":
            ids[0, 0] = NUM_EXPERTS
        return experts(x, ids, weights)

    want, bad = call(), context.num_ranks - 1
    if context.rank == bad:
        with pytest.raises(error, match=named):
            call(fault)
    else:
        with pytest.raises(tl.PeerError, match=named) as peer:
            call()
        assert peer.value.rank == bad
    assert torch.equal(call(), want)


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_input_on_one_rank(ranks: Ranks, fault: str) -> None:
    if FAULTS[fault][0] is tl.InvalidExpertId and (emulator.ON or ranks.device == "cuda"):
        pytest.skip("kernels take ids that are too big for -1, without a word")
    ranks.run(fail_on_one_rank, fault)


# -- checkpoints ----------------------------------------------------------------------------------------------


def former(state: dict[str, Any]) -> dict[str, Any]:
    """As it was when the layer itself had the weights of experts."""
    return {name.replace("experts.", ""): value for name, value in state.items()}


@on_ranks
def test_checkpoints_with_the_former_names(context: RankContext) -> None:
    """A rank's own, and the full one of any number of ranks; of the layer, and of a model that has it."""
    layer = make_layer(CASE, context.group)
    for model in (layer, nn.ModuleDict({"moe": layer})):
        own, full = former(model.state_dict()), former(tl.gather_state_dict(model))
        assert not any("experts" in name for name in (*own, *full))
        want = {name: value.clone() for name, value in model.state_dict().items()}
        sharded = tl.shard_state_dict(model, full)
        assert all(len(local_part(sharded[name])) == len(local_part(want[name])) for name in want if "experts" in name)
        for part in (own, sharded):
            given = {name: value.clone() for name, value in part.items()}
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            model.load_state_dict(given)
            for name, value in model.state_dict().items():
                assert torch.equal(local_part(value), local_part(want[name])), name


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def test_former_names_of_computed_weights() -> None:
    """Those of torch.nn.utils, for parametrizations and for pruning."""
    layer = make_layer(CASE, None)
    parametrize.register_parametrization(layer.experts, "w1", Doubled())
    prune.random_unstructured(layer.experts, "w2", 0.5)
    want = {name: value.clone() for name, value in layer.state_dict().items()}
    old = former(want)
    assert {"parametrizations.w1.original", "w2_orig", "w2_mask"} < old.keys()
    layer.reset_parameters(seed=8)
    layer.load_state_dict(old)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, want[name]), name


def test_both_names() -> None:
    """Those of today count."""
    layer = make_layer(CASE, None)
    state = layer.state_dict()
    layer.load_state_dict({"w1": torch.zeros(1)} | state)


def gather_experts(context: RankContext) -> dict[str, list[float]]:
    model = nn.ModuleDict({"routed": make_experts(group=context.group)})
    full = tl.gather_state_dict(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(tl.shard_state_dict(model, full))
    return {name: value.flatten().tolist() for name, value in tl.gather_state_dict(model).items()}


def test_full_state_of_experts_by_themselves(ranks: Ranks) -> None:
    alone = {f"routed.{name}": value.flatten().tolist() for name, value in make_experts().state_dict().items()}
    for full in ranks.run(gather_experts):
        assert full == alone


def test_names_of_a_layer() -> None:
    layer = make_layer(replace(CASE, shared=8), None)
    assert [short(name) for name, _ in layer.named_parameters()] == [
        "router_weight",
        "shared_w1",
        "shared_w2",
        *EXPERT_WEIGHTS,
    ]
