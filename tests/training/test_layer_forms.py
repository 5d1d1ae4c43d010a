"""Layers whose experts, routers and shared expert are those of other models: values, gradients, layouts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.layer_cases import assert_near, make_layer
from tests.support.on_ranks import on_ranks
from tests.training.test_layer import BASE, BF16, FP32, compare_gradients, compare_with_reference, own_inputs
from tokenloom.runtime.processes import RankContext

pytestmark = pytest.mark.slow_on(4)

GPT_OSS = replace(
    BASE,
    router="gpt_oss",
    activation="swigluoai",
    biases=True,
    layout=tl.WeightLayout(transposed=True, interleaved=True),
)
FORMS = {
    "gpt_oss": GPT_OSS,
    "nemotron": replace(BASE, activation="relu2", router="deepseek_v3"),
    "qwen2_moe": replace(BASE, shared_gate=True, router="renormalized"),
    "geglu, biases": replace(BASE, activation="geglu", biases=True),
    "clamped, interleaved": replace(
        BASE, activation=tl.Activation("gelu_tanh", limit=0.5), layout=tl.WeightLayout(interleaved=True)
    ),
    "quick gelu": replace(BASE, activation=tl.Activation(alpha=1.702, gated=False), biases=True),
}


@pytest.mark.parametrize("dtype", [torch.float64, FP32, BF16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_experts_of_other_forms_are_those_of_the_reference(ranks: Ranks, form: str, dtype: torch.dtype) -> None:
    ranks.run(compare_with_reference, replace(FORMS[form], dtype=dtype))


@on_ranks
def test_layouts_hold_the_same_experts(context: RankContext) -> None:
    """A seed gives experts, not numbers in memory: the layer computes the same, and so it does after a step."""
    case = replace(BASE, biases=True)
    layouts = [tl.WeightLayout(*flags) for flags in product((False, True), repeat=2)]
    results: list[list[torch.Tensor]] = []
    for layout in layouts:
        layer, (x, factors) = make_layer(replace(case, layout=layout), context.group), own_inputs(context, case)
        out, _ = layer(x)
        (out * factors).sum().backward()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= 0.1 * (0 if parameter.grad is None else parameter.grad)
        results.append([out.detach(), layer(x)[0].detach()])
    for found in results[1:]:
        for got, want in zip(found, results[0], strict=True):
            assert_near(got, want, case.dtype, "out")


GRADIENT_CASES = {
    "gpt_oss": GPT_OSS,
    "gpt_oss_sum": replace(GPT_OSS, router_grad="sum", expert_grad_scale=0.25),
    "gpt_oss_float32": replace(GPT_OSS, dtype=FP32),
    "gpt_oss_bfloat16": replace(GPT_OSS, dtype=BF16),
    "relu2_without_gates": replace(BASE, activation="relu2", biases=True),
    "geglu_interleaved": replace(BASE, activation="geglu", layout=tl.WeightLayout(interleaved=True)),
    "reglu_transposed": replace(BASE, activation="reglu", layout=tl.WeightLayout(transposed=True)),
    "clamped": replace(BASE, activation=tl.Activation(limit=0.5)),
    "gated_shared_expert": replace(BASE, shared_gate=True, router_grad="sum"),
    "ernie": replace(BASE, router="ernie"),
    "biases_frozen": replace(BASE, biases=True, frozen=("w1_bias", "w2_bias")),
    "weights_frozen": replace(BASE, biases=True, frozen=("w1", "w2", "router_weight")),
}


@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_gradients(ranks: Ranks, name: str) -> None:
    ranks.run(compare_gradients, GRADIENT_CASES[name])
