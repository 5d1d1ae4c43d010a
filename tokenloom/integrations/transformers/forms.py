"""Which experts of transformers are experts of tokenloom: what they compute, and how their weights lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from tokenloom.errors import InvalidArgument
from tokenloom.ops.experts import Tensors
from tokenloom.ops.quant import MXFP4, FourBits
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
PACKED_DTYPES = (torch.uint8, torch.int8)
STORED = {"_blocks": "_scales", "": "_scale_inv"}
"""Ends of the names of weights, and of their scales: of gpt_oss that ``keep_four_bits`` keeps packed, and of
transformers' experts in FP8 and FP4."""


class NotOurs(Exception):
    """These experts compute something else; the text says what."""


@dataclass(frozen=True)
class Form:
    """Experts as tokenloom has them.

    Attributes:
        activation: what lies between the products.
        layout: how the weights lie.
        names: of the parameters that are w1, w2, w1_bias, w2_bias; None for those that are missing.
        scale_names: of the parameters that are the scales of w1 and w2, or None.
        four_bits: how w1 and w2 hold values of four bits, or None.
    """

    activation: Activation
    layout: WeightLayout
    names: tuple[str, str, str | None, str | None]
    scale_names: tuple[str, str] | None = None
    four_bits: FourBits | None = None

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
        parts += ["interleaved"] * self.layout.interleaved
        if self.scale_names is not None:
            parts.append("from FP8" if self.four_bits is None else "from MXFP4")
        return ", ".join(parts)

    def tensors(self, experts: torch.nn.Module) -> Tensors:
        """Return the parameters w1, w2, w1_bias and w2_bias, as they are now."""
        w1, w2, w1_bias, w2_bias = (None if name is None else getattr(experts, name) for name in self.names)
        return w1, w2, w1_bias, w2_bias  # type: ignore[return-value]  # only biases may be missing

    def scales(self, experts: torch.nn.Module) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the scales of w1 and w2, as they are now."""
        if self.scale_names is None:
            return None, None
        w1_scales, w2_scales = (getattr(experts, name) for name in self.scale_names)
        return w1_scales, w2_scales


def form_of(experts: torch.nn.Module, family: str, with_scales: bool = False) -> Form:
    """Find the form of a module of experts.

    Args:
        experts: the module.
        family: its class, before others wrapped it.
        with_scales: also take weights in FP8 or four bits.

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
    parameters = dict(experts.named_parameters())
    end = next((end for end, of_scales in STORED.items() if with_scales and w1 + of_scales in parameters), None)
    form_names = (w1 + (end or ""), "down_proj" + (end or ""), *biases)
    scale_names = None if end is None else (w1 + STORED[end], "down_proj" + STORED[end])
    if parameters.keys() != {name for name in (*form_names, *(scale_names or ())) if name is not None}:
        raise NotOurs(f"the parameters are {', '.join(sorted(parameters))}")
    for name, parameter in parameters.items():
        if parameter.dtype not in DTYPES and scale_names is None:
            raise NotOurs(f"{name} is {parameter.dtype}")
    try:
        activation = _activation_of(experts, family, bool(declared["has_gate"]))
    except InvalidArgument as error:
        raise NotOurs(str(error)) from error
    interleaved = bool(declared["has_gate"]) and not getattr(experts, "is_concatenated", True)
    packed = scale_names is not None and parameters[form_names[0]].dtype in PACKED_DTYPES
    layout = WeightLayout(bool(declared["is_transposed"]) and scale_names is None, interleaved)
    return Form(activation, layout, form_names, scale_names, MXFP4 if packed else None)


def _activation_of(experts: Any, family: str, gated: bool) -> Activation:
    own = OWN_GATES.get(family) if gated else None
    if family == "FP8Experts" and gated:  # of any model, whose configuration it asks
        if experts.gate_softcap is not None:
            raise NotOurs("its gates have a softcap")
        own = OWN_GATES["MiniMaxM3VLExperts"] if experts.swiglu_alpha is not None else OWN_GATES["DeepseekV4Experts"]
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
