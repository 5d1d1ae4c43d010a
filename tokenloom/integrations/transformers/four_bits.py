"""MXFP4 checkpoints whose experts stay packed until a layer in FP8 takes them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.distributed.expert_parallel import EPImplementationInterface
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import Mxfp4Config

from tokenloom.errors import InvalidArgument, a_type
from tokenloom.integrations.transformers.implementation import TokenloomExperts
from tokenloom.ops.quant import MXFP4

METHOD = "tokenloom_mxfp4"
"""How a configuration asks for it, where checkpoints say mxfp4."""
EXPERTS = "GptOssExperts"
PROJECTIONS = ("gate_up_proj", "down_proj")
STORED_NAMES = {name: [f"{name}_blocks", f"{name}_scales"] for name in PROJECTIONS}
"""Of the parameters that stand for a weight."""


def keep_four_bits(config: Any) -> Any:
    """Copy a configuration, so that a model loaded with it keeps MXFP4 experts packed.

    Its experts must run on an implementation that was registered with ``experts="fp8"`` or ``"four_bits"``. A layer
    takes them at its first call, by ``MegaMoE.load_weights(four_bits=MXFP4)``. Without this, transformers makes
    bfloat16 weights of them, and the layer rounds those or refuses them.

    Args:
        config: of a gpt_oss model with an MXFP4 checkpoint, from ``AutoConfig.from_pretrained``.

    Returns:
        The copy, for ``from_pretrained(..., config=)``.

    Raises:
        InvalidArgument: the checkpoint has no MXFP4 experts, or experts of another family.
    """
    given = getattr(config, "quantization_config", None)
    method = given.get("quant_method") if isinstance(given, dict) else getattr(given, "quant_method", None)
    if getattr(config, "model_type", None) != "gpt_oss" or method != "mxfp4":
        kind = getattr(config, "model_type", a_type(config))
        raise InvalidArgument(
            f"config is of {kind} with quant_method {method!r}, expected gpt_oss with 'mxfp4'; load other models "
            "without keep_four_bits"
        )
    kept = copy.deepcopy(config)
    kept.quantization_config = {"quant_method": METHOD}
    return kept


@register_quantization_config(METHOD)
class PackedConfig(Mxfp4Config):
    """What transformers makes of ``quant_method``."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.__dict__["quant_method"] = METHOD  # where transformers has an enumeration, of strings


@register_quantizer(METHOD)
class PackedExperts(HfQuantizer):
    """Quantiser of transformers that gives experts the parameters of checkpoints, such as ``down_proj_blocks``."""

    requires_calibration = False
    serialized_names = STORED_NAMES

    def _process_model_before_weight_loading(self, model: torch.nn.Module, **_: Any) -> None:
        distributed = getattr(model.config, "distributed_config", None)
        name = distributed.ep_implementation if distributed is not None and distributed.ep_size > 1 else None
        found = EPImplementationInterface().get(name)
        ours = isinstance(found, type) and issubclass(found, TokenloomExperts) and found.options.fused
        if not ours:
            raise InvalidArgument(
                f"ep_implementation is {name!r}, which cannot compute packed experts; pass "
                "DistributedConfig(ep_size=, ep_implementation=) with one that register(..., experts='fp8') made, or "
                "experts='four_bits', or leave out keep_four_bits"
            )
        for module in model.modules():
            if type(module).__name__ == EXPERTS:
                for projection in PROJECTIONS:
                    _pack(module, projection)
                vars(module)["_is_hf_initialized"] = True  # or transformers would fill what is no more

    def update_parallel_plan(self, model: torch.nn.Module, plan: dict[str, str]) -> None:
        """Spread blocks and scales as the weights would be."""
        super().update_parallel_plan(model, plan)
        for key in [key for key in plan if key.endswith(tuple(f".experts.{name}" for name in PROJECTIONS))]:
            del plan[key]

    def is_serializable(self) -> bool:
        """Whether the model can be saved. The checkpoint is there already."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained."""
        return False


def _pack(experts: torch.nn.Module, projection: str) -> None:
    """Put blocks [E, N, K / 32, 16] and scales [E, N, K / 32] in the place of a weight [E, K, N]."""
    wide = experts._parameters.pop(projection)
    assert wide is not None
    num_experts, depth, rows = wide.shape
    groups = (num_experts, rows, depth // MXFP4.group)
    for end, shape in (("blocks", (*groups, MXFP4.group // 2)), ("scales", groups)):
        stored = torch.empty(shape, dtype=torch.uint8, device=wide.device)
        experts.register_parameter(f"{projection}_{end}", torch.nn.Parameter(stored, requires_grad=False))
