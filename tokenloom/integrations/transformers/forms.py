"""Which experts of transformers are experts of tokenloom: what they compute, and how their weights lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from tokenloom.errors import InvalidArgument
from tokenloom.ops.experts import Tensors
from tokenloom.plan import Activation, WeightLayout

FUNCTIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
}
"""What an activation of transformers or torch computes, by its class."""
PLAIN_FUNCTIONS: dict[object, str] = {functional.silu: "silu", functional.gelu: "gelu", functional.relu: "relu"}
"""The same for activations that are no modules, as lfm2_moe has one."""
DEFAULT_GATE = "transformers.integrations.moe"
"""The module of ``_apply_gate`` of experts that have no other: ``act_fn(gate) * up``, gates first."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class OwnGate:
    """Gates that a family computes by itself: clamped, perhaps with a factor and an offset.

    Attributes:
        limit, alpha: names of the experts' attributes, "" for none.
        up_offset: added to ups.
        silu: the function, whatever ``act_fn`` is.
    """

    limit: str
    alpha: str = ""
    up_offset: float = 0.0
    silu: bool = True


OWN_GATES = {
    "GptOssExperts": OwnGate("limit", "alpha", 1.0),
    "OpenAIPrivacyFilterExperts": OwnGate("limit", "alpha", 1.0),
    "MiniMaxM3VLExperts": OwnGate("swiglu_limit", "swiglu_alpha", 1.0),
    "DeepseekV4Experts": OwnGate("limit", silu=False),
    "Glm5NextTextExperts": OwnGate("swiglu_limit"),
    "HYV4Experts": OwnGate("swiglu_limit"),
}
"""By the class of the experts. Other classes with gates of their own run their own experts."""


class NotOurs(Exception):
    """These experts compute something else; the text says what."""


@dataclass(frozen=True)
class Form:
    """Experts as tokenloom has them.

    Attributes:
        activation: what lies between the products.
        layout: how the weights lie.
        names: of the parameters that are w1, w2, w1_bias, w2_bias; None for those that are missing.
    """

    activation: Activation
    layout: WeightLayout
    names: tuple[str, str, str | None, str | None]

    def __str__(self) -> str:
        what = self.activation
        parts = [f"gated {what.function}" if what.gated else what.function]
        if what.limit is not None:
            parts.append(f"limit {what.limit:g}")
        if what.alpha != 1:
            parts.append(f"alpha {what.alpha:g}")
        if what.up_offset:
            parts.append(f"up + {what.up_offset:g}")
        parts += ["biases"] * (self.names[2] is not None) + ["transposed"] * self.layout.transposed
        return ", ".join(parts + ["interleaved"] * self.layout.interleaved)

    def tensors(self, experts: torch.nn.Module) -> Tensors:
        """Return the parameters w1, w2, w1_bias and w2_bias, as they are now."""
        w1, w2, w1_bias, w2_bias = (None if name is None else getattr(experts, name) for name in self.names)
        return w1, w2, w1_bias, w2_bias  # type: ignore[return-value]  # only biases may be missing


def form_of(experts: torch.nn.Module, family: str) -> Form:
    """Find the form of a module of experts.

    Args:
        experts: the module.
        family: its class, before others wrapped it.

    Raises:
        NotOurs: tokenloom has no such experts.
    """
    declared = {name: getattr(experts, name, None) for name in ("has_gate", "has_bias", "is_transposed")}
    for name, value in declared.items():
        if not isinstance(value, bool):
            raise NotOurs(f"{name} is not declared")
    if getattr(experts, "has_post_expert_norm", False):
        raise NotOurs("a norm follows each expert")
    w1 = "gate_up_proj" if declared["has_gate"] else "up_proj"
    biases = (f"{w1}_bias", "down_proj_bias") if declared["has_bias"] else (None, None)
    form_names = (w1, "down_proj", *biases)
    found = {name for name, _ in experts.named_parameters()}
    if found != {name for name in form_names if name is not None}:
        raise NotOurs(f"the parameters are {', '.join(sorted(found))}")
    for name, parameter in experts.named_parameters():
        if parameter.dtype not in DTYPES:
            raise NotOurs(f"{name} is {parameter.dtype}")
    try:
        activation = _activation_of(experts, family, bool(declared["has_gate"]))
    except InvalidArgument as error:
        raise NotOurs(str(error)) from error
    interleaved = bool(declared["has_gate"]) and not getattr(experts, "is_concatenated", True)
    return Form(activation, WeightLayout(bool(declared["is_transposed"]), interleaved), form_names)


def _activation_of(experts: Any, family: str, gated: bool) -> Activation:
    own = OWN_GATES.get(family) if gated else None
    if own is None and gated and type(experts)._apply_gate.__module__ != DEFAULT_GATE:
        raise NotOurs("it computes its gates by itself")
    given = getattr(experts, "act_fn", None)
    kind = type(given).__name__
    function = "silu" if own is not None and own.silu else FUNCTIONS.get(kind) or PLAIN_FUNCTIONS.get(given)
    if function is None:
        raise NotOurs(f"the activation is {getattr(given, '__name__', kind)}")
    if own is None:
        return Activation(function, gated)
    alpha = getattr(experts, own.alpha) if own.alpha else 1.0
    return Activation(function, limit=getattr(experts, own.limit), alpha=alpha, up_offset=own.up_offset)
