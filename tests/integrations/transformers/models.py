"""Tiny models of the families that are tested: random weights, made from configurations alone."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tokenloom.runtime.processes import RankContext

HIDDEN, WIDTH, EXPERTS, TOP_K, VOCABULARY = 32, 48, 8, 2, 99

OWN_EXPERTS = "tokenloom_moves_tokens"
"""Name of the implementation that runs the model's own experts."""
BOUNDED, MOST_TOKENS = "tokenloom_bounded", 32
"""Name of the implementation whose host waits for nothing, and the most tokens of a rank."""

FP8 = "tokenloom_fp8"
"""Name of the implementation that computes experts in FP8."""
NODES = "tokenloom_nodes"
"""Name of the implementation whose ranks are taken for nodes of two."""

COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": TOP_K,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,  # experts whose outputs count beside the residual
}
GROUPED = {"n_routed_experts": EXPERTS, "moe_intermediate_size": WIDTH, "first_k_dense_replace": 0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": EXPERTS}),
    "qwen2_moe": (
        "Qwen2Moe",
        {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": 24},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "norm_topk_prob": True, "head_dim": 8},
    ),
    "olmoe": ("Olmoe", {"num_experts": EXPERTS}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **GROUPED,
            "num_key_value_heads": 4,
            "n_group": 4,
            "topk_group": 2,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "glm4_moe": ("Glm4Moe", {**GROUPED, "head_dim": 8}),
    "gpt_oss": ("GptOss", {"num_local_experts": EXPERTS, "head_dim": 8, "sliding_window": 4}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": EXPERTS}),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": EXPERTS, "head_dim": 8}),
    "nemotron_h": (
        "NemotronH",
        {
            "n_routed_experts": EXPERTS,
            "moe_intermediate_size": WIDTH,
            "moe_shared_expert_intermediate_size": 24,
            "head_dim": 8,
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
}
"""Stem of the class's name, and what its configuration has beside COMMON."""


FORMS = {
    "gpt_oss": "gated silu, limit 7, alpha 1.702, up + 1, biases, transposed, interleaved",
    "nemotron_h": "relu2",
}
"""What the experts compute in tokenloom's terms, where that is not SwiGLU."""


def config_of(family: str, num_layers: int, **sizes: int) -> Any:
    """The configuration of a family, whose layers all have experts, but for those that must alternate."""
    stem, own = FAMILIES[family]
    layers: dict[str, Any] = {"num_hidden_layers": num_layers}
    if family == "nemotron_h":
        layers = {"layers_block_type": ["full_attention", "moe"] * num_layers}
    if family == "gpt_oss":
        layers["layer_types"] = ["sliding_attention", "full_attention"][:num_layers]
    return getattr(import_module("transformers"), f"{stem}Config")(**COMMON | own | layers | sizes)


def save(family: str, folder: Path, num_layers: int, dtype: torch.dtype, **sizes: int) -> None:
    """Write a model whose weights depend on nothing but the family."""
    torch.manual_seed(sum(map(ord, family)))
    model = import_module("transformers").AutoModelForCausalLM.from_config(config_of(family, num_layers, **sizes))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("bias", "router.weight")):  # some families begin with zeros, whose ties decide
                weight.normal_(0, 0.2)
    model.to(dtype).save_pretrained(folder)


def distributed(family: str, num_ranks: int, how: str, implementation: str = "tokenloom") -> Any:
    """How a model is spread over all ranks.

    Args:
        how: "fsdp": experts by expert, the rest by FSDP2. "copies": the same, but the experts over two ranks, so that
            several have the same ones. "tp": experts by expert, the rest by tensor parallelism.
            "both": the same, but every two ranks have a batch of their own.
    """
    config = import_module("transformers.distributed").DistributedConfig
    if how == "tp":
        return config(tp_size=num_ranks, tp_plan="auto", ep_size=num_ranks, ep_implementation=implementation)
    if how == "both":
        sizes = {"tp_size": 2, "fsdp_size": num_ranks // 2, "ep_size": num_ranks}
        return config(**sizes, tp_plan="auto", ep_implementation=implementation)
    plan = {"model.layers.*": "free_full_weight"} if family == "nemotron_h" else None  # it has none of its own
    ep_size = 2 if how == "copies" else num_ranks
    return config(fsdp_size=num_ranks, fsdp_plan=plan, ep_size=ep_size, ep_implementation=implementation)


shared_mesh = cache(dist.init_device_mesh)
"""Models share meshes: three threads wait for each group over gloo, and look a hundred times a second."""


def prepare(context: RankContext) -> Any:
    """The package transformers, once it knows of tokenloom and of this rank's GPU."""
    dist.init_device_mesh = shared_mesh
    os.environ["LOCAL_RANK"] = str(context.rank if context.device.type == "cuda" else 0)
    transformers = import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    ours = import_module("tokenloom.integrations.transformers")
    ours.register()
    ours.register(OWN_EXPERTS, experts="model")
    ours.register(BOUNDED, max_tokens_per_rank=MOST_TOKENS, pool_rows=context.num_ranks * MOST_TOKENS * TOP_K)
    ours.register(FP8, experts="fp8", max_tokens_per_rank=MOST_TOKENS)
    ours.register(NODES, ranks_per_node=2)
    return transformers


def load(context: RankContext, folder: Path, distributed: Any = None) -> Any:
    """The model of a folder on this rank's device: unmodified, or spread over all ranks."""
    kind = prepare(context).AutoModelForCausalLM
    made = kind.from_pretrained(folder, dtype="auto", distributed_config=distributed)
    return made if distributed is not None else made.to(context.device)


def experts_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Modules of experts by name."""
    return {name: module for name, module in model.named_modules() if name.endswith(".experts")}


def rows_for_experts(
    context: RankContext, seed: int, hidden: int = HIDDEN
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make what a module of experts is called with: tokens [9, hidden] in float32, their experts, and weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(9, hidden, generator=generator).to(context.device)
    weights, ids = torch.rand(9, EXPERTS, generator=generator).to(context.device).topk(TOP_K)
    return x, ids, weights


def check_use(context: RankContext, model: torch.nn.Module) -> None:
    """All experts run on one communicator of tokenloom, with the best backend that there is."""
    text = import_module("tokenloom.integrations.transformers").describe(model)
    config = model.config.distributed_config
    assert text.startswith(f"{len(experts_of(model))} modules of experts run on tokenloom\n")
    assert text.count("tokenloom Communicator") == 1
    hopper = context.device.type == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    if config.ep_implementation != OWN_EXPERTS:
        assert f"Experts, tokenloom's experts ({FORMS.get(model.config.model_type, 'gated silu')}): model." in text
    else:
        assert "Experts, the model's own experts (as registered): model." in text
    flat = "network" if config.ep_implementation == NODES else "collective"
    assert f"backend {'nvlink' if hopper else flat}" in text
