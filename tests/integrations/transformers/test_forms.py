"""What tokenloom takes experts of transformers for, and which it leaves to the model."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

OWN_GATES = {
    "GptOssExperts": ("gpt_oss", {"limit": 1.5, "alpha": 1.7}),
    "OpenAIPrivacyFilterExperts": ("openai_privacy_filter", {"limit": 1.5, "alpha": 1.7}),
    "MiniMaxM3VLExperts": ("minimax_m3_vl", {"swiglu_limit": 1.5, "swiglu_alpha": 1.7}),
    "DeepseekV4Experts": ("deepseek_v4", {"limit": 1.5, "act_fn": "silu"}),
    "Glm5NextTextExperts": ("glm5_next", {"swiglu_limit": 1.5}),
    "HYV4Experts": ("hy_v4", {"swiglu_limit": 1.5}),
}
"""Where a class with gates of its own is, and attributes that its gates need."""
EXPERTS, HIDDEN, WIDTH = 2, 4, 6


def forms() -> Any:
    return import_module("tokenloom.integrations.transformers.forms")


def make(family: str, model: str, attributes: dict[str, Any], **declared: Any) -> Any:
    """Experts of a class, as its decorator leaves them, without a configuration."""
    kind = getattr(import_module(f"transformers.models.{model}.modeling_{model}"), family)
    functions = import_module("transformers.activations").ACT2FN
    experts = kind.__new__(kind)
    torch.nn.Module.__init__(experts)
    flags = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True} | declared
    for name, value in (flags | attributes).items():
        setattr(experts, name, functions[value] if name == "act_fn" else value)
    rows = WIDTH * (1 + experts.has_gate)
    w1 = "gate_up_proj" if experts.has_gate else "up_proj"
    setattr(experts, w1, torch.nn.Parameter(torch.randn(EXPERTS, rows, HIDDEN)))
    experts.down_proj = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
    return experts


@pytest.mark.parametrize("family", OWN_GATES)
def test_gates_that_families_compute_themselves(family: str) -> None:
    apply_activation = import_module("tokenloom.ops.activation").apply_activation
    model, attributes = OWN_GATES[family]
    experts = make(family, model, attributes, is_concatenated=family != "GptOssExperts")
    form = forms().form_of(experts, family)
    hidden = 3 * torch.randn(64, 2 * WIDTH, generator=torch.Generator().manual_seed(0))
    want = experts._apply_gate(hidden)
    torch.testing.assert_close(apply_activation(hidden, form.activation, form.layout.interleaved), want)


def test_each_family_with_gates_of_its_own_is_tried() -> None:
    assert OWN_GATES.keys() == forms().OWN_GATES.keys()


@pytest.mark.parametrize("name", ["silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_python_tanh", "relu", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
def test_activations(name: str, gated: bool) -> None:
    apply_activation = import_module("tokenloom.ops.activation").apply_activation
    experts = make("MixtralExperts", "mixtral", {"act_fn": name}, has_gate=gated)
    form = forms().form_of(experts, "MixtralExperts")
    hidden = torch.randn(64, (1 + gated) * WIDTH, generator=torch.Generator().manual_seed(0))
    want = experts._apply_gate(hidden) if gated else experts.act_fn(hidden)
    torch.testing.assert_close(apply_activation(hidden, form.activation), want)


@pytest.mark.parametrize("name", ["silu", "gelu", "relu"])
def test_activations_that_are_functions(name: str) -> None:
    apply_activation = import_module("tokenloom.ops.activation").apply_activation
    experts = make("Lfm2MoeExperts", "lfm2_moe", {})
    experts.act_fn = getattr(torch.nn.functional, name)
    form = forms().form_of(experts, "Lfm2MoeExperts")
    hidden = torch.randn(64, 2 * WIDTH, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(apply_activation(hidden, form.activation), experts._apply_gate(hidden))


def test_lfm2_moe() -> None:
    """Its own constructor, which sets a function where other families have a module."""
    configuration = import_module("transformers").Lfm2MoeConfig(num_experts=2, hidden_size=4, moe_intermediate_size=6)
    experts = import_module("transformers.models.lfm2_moe.modeling_lfm2_moe").Lfm2MoeExperts(configuration)
    assert str(forms().form_of(experts, "Lfm2MoeExperts")) == "gated silu"


def test_names_of_parameters() -> None:
    experts = make("MixtralExperts", "mixtral", {"act_fn": "silu"}, has_bias=True)
    experts.gate_up_proj_bias = torch.nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH))
    experts.down_proj_bias = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN))
    form = forms().form_of(experts, "MixtralExperts")
    assert [each is not None and each.shape for each in form.tensors(experts)] == [
        (EXPERTS, 2 * WIDTH, HIDDEN),
        (EXPERTS, HIDDEN, WIDTH),
        (EXPERTS, 2 * WIDTH),
        (EXPERTS, HIDDEN),
    ]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"has_post_expert_norm": True}, "a norm follows each expert"),
        ({"act_fn": "quick_gelu"}, "the activation is QuickGELUActivation"),
        ({"has_bias": True}, "the parameters are down_proj, gate_up_proj"),
        ({"has_gate": None}, "has_gate is not declared"),
        ({"scale": torch.nn.Parameter(torch.ones(1))}, "the parameters are down_proj, gate_up_proj, scale"),
        ({"down_proj": torch.nn.Parameter(torch.ones(2, 4, 6).to(torch.float8_e4m3fn), False)}, "down_proj is torch"),
    ],
)
def test_experts_that_stay_with_the_model(change: dict[str, Any], why: str) -> None:
    experts = make("MixtralExperts", "mixtral", {"act_fn": "silu"})
    for name, value in change.items():
        setattr(experts, name, import_module("transformers.activations").ACT2FN[value] if name == "act_fn" else value)
    with pytest.raises(forms().NotOurs, match=why):
        forms().form_of(experts, "MixtralExperts")


def test_functions_that_nobody_knows() -> None:
    experts = make("Lfm2MoeExperts", "lfm2_moe", {})
    experts.act_fn = torch.tanh
    with pytest.raises(forms().NotOurs, match="the activation is tanh"):
        forms().form_of(experts, "Lfm2MoeExperts")


def test_gates_that_nobody_knows() -> None:
    experts = make("BeamExperts", "beam", {"act_fn": "silu"})
    with pytest.raises(forms().NotOurs, match="computes its gates by itself"):
        forms().form_of(experts, "BeamExperts")
