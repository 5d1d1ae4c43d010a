"""Checkpoints with MXFP4 experts: as their models compute them from wide weights, and packed, for MegaMoE."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.conftest import HOPPER
from tests.integrations.transformers import models
from tests.integrations.transformers.test_experts import spread
from tests.integrations.transformers.test_models import batch_of, near
from tokenloom.runtime.processes import RankContext, RankPool

WIDTH = 128
TOLERANCE, TOLERANCE_WITH_BIASES = 0.05, 0.01
"""Of the norm of the outputs of experts whose weights are exact: x and activations are rounded. Measured, 0.042, and
0.0084 beside biases. There, weights that are rounded too make it 0.0119."""
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("GptOss", {"num_local_experts": models.EXPERTS, "head_dim": 16, "sliding_window": 4}),
    "deepseek_v4": (
        "DeepseekV4",
        {
            "n_routed_experts": models.EXPERTS,
            "moe_intermediate_size": WIDTH,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "q_lora_rank": 32,
            "o_groups": 2,
            "o_lora_rank": 16,
            "index_n_heads": 4,
            "index_head_dim": 16,
            "layer_types": ["heavily_compressed_attention"] * 2,
            "mlp_layer_types": ["moe"] * 2,
        },
    ),
}
STORED = {
    "gpt_oss": {"quant_method": "mxfp4"},
    "deepseek_v4": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
}
"""What checkpoints say of how their weights are stored."""


def random_blocks(generator: torch.Generator, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [..., K / 2] with all codes, and the bytes of E8M0 scales [..., K / 32] that span five octaves."""
    *rows, depth = shape
    packed = torch.randint(0, 256, (*rows, depth // 2), generator=generator, dtype=torch.uint8)
    return packed, torch.randint(117, 122, (*rows, depth // 32), generator=generator).to(torch.uint8)


def values_of(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Look up float32 [..., K]: the low half of a byte comes first, and its upper bit is the sign."""
    codes = torch.empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=torch.int64)
    codes[..., 0::2], codes[..., 1::2] = packed.long() % 16, packed.long() // 16
    return E2M1[codes % 8] * (1 - 2 * (codes // 8)) * (2.0 ** (scales.float() - 127)).repeat_interleave(32, -1)


def save(family: str, folder: Path, dtype: torch.dtype, num_layers: int) -> None:
    """Write a checkpoint as its family is published: wide weights, but for the experts."""
    files = import_module("safetensors.torch")
    stem, own = CONFIGS[family]
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": num_layers}
    layers = {name: value[:num_layers] for name, value in own.items() if name.endswith("layer_types")}
    config = getattr(import_module("transformers"), f"{stem}Config")(**models.COMMON | own | sizes | layers)
    torch.manual_seed(0)
    model = import_module("transformers").AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("bias", "router.weight", "gate.weight")):
                weight.normal_(0, 0.2)
    model.to(dtype).save_pretrained(folder)
    weights, generator = files.load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    for name in [each for each in weights if ".experts." in each and not each.endswith("_bias")]:
        wide = weights.pop(name)
        if family == "gpt_oss":
            num_experts, depth, rows = wide.shape
            packed, scales = random_blocks(generator, num_experts, rows, depth)
            weights[f"{name}_blocks"], weights[f"{name}_scales"] = packed.unflatten(-1, (-1, 16)), scales
        else:
            packed, scales = random_blocks(generator, *wide.shape)
            weights[name] = packed.view(torch.int8)
            weights[name.replace(".weight", ".scale")] = scales.view(torch.float8_e8m0fnu)
    files.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    said |= {"quantization_config": STORED[family]} | ({"expert_dtype": "fp4"} if family == "deepseek_v4" else {})
    (folder / "config.json").write_text(json.dumps(said))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, RankPool], Path]:
    """Gives a checkpoint. On GPUs it has one layer in bfloat16, as those of other tests."""
    folders = tmp_path_factory.mktemp("four_bits")

    def folder_of(family: str, pool: RankPool) -> Path:
        on_gpus = pool.device == "cuda"
        folder = folders / f"{family}-{pool.device}"
        if not folder.exists():
            save(family, folder, torch.bfloat16 if on_gpus else torch.float32, 1 if on_gpus else 2)
        return folder

    return folder_of


def load(context: RankContext, folder: Path, distributed: Any = None, config: Any = None) -> Any:
    """The model with wide experts, or by a configuration of its own."""
    transformers = models.prepare(context)
    options: dict[str, Any] = {"dtype": "auto", "distributed_config": distributed}
    if config is None:
        kind = "Mxfp4Config" if folder.name.startswith("gpt_oss") else "FineGrainedFP8Config"
        options["quantization_config"] = getattr(transformers, kind)(dequantize=True)
    else:
        options["config"] = config
    made = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    return made if distributed is not None else made.to(context.device)


def packed_config(context: RankContext, folder: Path) -> Any:
    transformers = models.prepare(context)
    keep_four_bits = import_module("tokenloom.integrations.transformers").keep_four_bits
    return keep_four_bits(transformers.AutoConfig.from_pretrained(folder))


# -- wide experts -----------------------------------------------------------------------------------------------


def logits(context: RankContext, family: str, folder: Path, how: str) -> None:
    """Those of the model's own experts, which hold what the checkpoint says."""
    plain = load(context, folder)
    model = load(context, folder, models.distributed(family, context.num_ranks, how))
    own = {"tp": 0}.get(how, context.rank)
    with torch.no_grad():
        for name in ("equal", "ragged"):
            tokens, _ = batch_of(name, own, context.device)
            want, got = (each(tokens, use_cache=False).logits for each in (plain, model))
            near(got.to(plain.dtype), want.to(plain.dtype), f"{name}: logits")
    stored = import_module("safetensors.torch").load_file(folder / "model.safetensors")
    w2 = next(iter(models.experts_of(plain).values())).down_proj[3].detach().cpu().float()
    if family == "gpt_oss":
        ends = [stored[f"model.layers.0.mlp.experts.down_proj_{end}"][3] for end in ("blocks", "scales")]
        assert torch.equal(w2.T, values_of(ends[0].flatten(-2), ends[1]))
    else:
        ends = [stored[f"model.layers.0.ffn.experts.3.w2.{end}"].view(torch.uint8) for end in ("weight", "scale")]
        assert torch.equal(w2, values_of(*ends))
    text = import_module("tokenloom.integrations.transformers").describe(model)
    assert "Experts, tokenloom's experts (gated silu, limit" in text


@pytest.mark.parametrize("how", ["fsdp", "tp"])
@pytest.mark.parametrize("family", CONFIGS)
def test_wide_experts(pool: RankPool, folder_of: Callable[[str, RankPool], Path], family: str, how: str) -> None:
    if pool.device == "cuda" and family == "deepseek_v4":
        pytest.skip("not tried on GPUs")
    pool.run(logits, family, folder_of(family, pool), how)


# -- packed experts ---------------------------------------------------------------------------------------------


def run_alone(
    context: RankContext, stored: dict[str, torch.Tensor], x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """MegaMoE with this rank's part of a checkpoint's first layer."""
    count = models.EXPERTS // context.num_ranks
    local = slice(context.rank * count, (context.rank + 1) * count)
    names = [f"{w}_{end}" for end in ("blocks", "scales") for w in ("gate_up_proj", "down_proj")]
    given = [stored[f"model.layers.0.mlp.experts.{name}"][local].to(context.device) for name in names]
    biases = {
        f"{w}_bias": stored[f"model.layers.0.mlp.experts.{name}_bias"][local].to(context.device)
        for w, name in (("w1", "gate_up_proj"), ("w2", "down_proj"))
    }
    with tl.MegaMoE(
        context.group,
        num_experts=models.EXPERTS,
        hidden=WIDTH,
        intermediate=WIDTH,
        top_k=models.TOP_K,
        max_tokens_per_rank=models.MOST_TOKENS,
        activation="swigluoai",
        backend="nvlink" if context.device.type == "cuda" else "composed",
        device=context.device,
    ) as mega:
        layout = tl.WeightLayout(interleaved=True)
        mega.load_weights(*given, **biases, weight_layout=layout, four_bits=tl.MXFP4)
        return mega(x, ids, weights).clone()


def compute(context: RankContext, folder: Path, how: str) -> None:
    """All logits, then a layer: by MegaMoE's bits, and nearer to the model's own experts than with rounded weights."""
    plain = load(context, folder)
    distributed = models.distributed("gpt_oss", context.num_ranks, how, models.FP8)
    rounded = load(context, folder, distributed)
    model = load(context, folder, copy.copy(distributed), packed_config(context, folder))
    first = next(iter(models.experts_of(model).values()))
    assert {name: each.dtype for name, each in first.named_parameters() if not name.endswith("_bias")} == {
        f"{name}_{end}": torch.uint8 for name in ("gate_up_proj", "down_proj") for end in ("blocks", "scales")
    }
    tokens, _ = batch_of("equal", 0 if how == "tp" else context.rank, context.device)
    with torch.no_grad():
        want, got = (each(tokens, use_cache=False).logits for each in (plain, model))
        near(got.bfloat16(), want.bfloat16(), "logits")
        hidden, ids, weights = models.rows_for_experts(context, 1, WIDTH)
        given = (hidden.bfloat16().to(plain.dtype), ids, weights)
        want, got, far = (next(iter(models.experts_of(each).values()))(*given) for each in (plain, model, rounded))
        error, error_of_rounded = ((each - want).float().norm() / want.float().norm() for each in (got, far))
        assert error < min(TOLERANCE_WITH_BIASES, error_of_rounded)
        if how == "tp":
            rows = -(-9 // context.num_ranks)
            share = slice(context.rank * rows, min(9, (context.rank + 1) * rows))
            stored = import_module("safetensors.torch").load_file(folder / "model.safetensors")
            alone = run_alone(context, stored, *(each[share] for each in given))
            assert torch.equal(alone.to(got.dtype), got[share])
    text = import_module("tokenloom.integrations.transformers").describe(model)
    assert "GptOssExperts, tokenloom's experts in FP8 (gated silu, limit 7, alpha 1.702, up + 1, biases, inter" in text
    assert ", from MXFP4): model.layers.0.mlp.experts" in text


@pytest.mark.parametrize("how", ["fsdp", "tp", "copies"])
def test_packed_experts(pool: RankPool, folder_of: Callable[[str, RankPool], Path], how: str) -> None:
    if pool.device == "cuda" and not HOPPER:
        pytest.skip("the kernels need Hopper GPUs")
    if how == "copies" and pool.num_ranks == 2:
        pytest.skip("two ranks have no such mesh")
    pool.run(compute, folder_of("gpt_oss", pool), how)


def refuse(context: RankContext, folder: Path) -> None:
    """Before weights are loaded, on all ranks."""
    config = packed_config(context, folder)
    for name in ("tokenloom", models.OWN_EXPERTS, "all_to_all"):
        with pytest.raises(tl.InvalidArgument, match=f"ep_implementation is '{name}', which cannot compute packed"):
            load(context, folder, models.distributed("gpt_oss", context.num_ranks, "fsdp", name), config)
    with pytest.raises(tl.InvalidArgument, match="ep_implementation is None"):
        load(context, folder, None, config)


def test_experts_that_need_wide_weights(pool: RankPool, folder_of: Callable[[str, RankPool], Path]) -> None:
    if pool.num_ranks > 2:
        pytest.skip("two ranks show it")
    pool.run(refuse, folder_of("gpt_oss", pool))


def test_other_checkpoints() -> None:
    transformers = import_module("transformers")
    keep_four_bits = import_module("tokenloom.integrations.transformers").keep_four_bits
    wide, other = transformers.GptOssConfig(), transformers.MixtralConfig()
    other.quantization_config = {"quant_method": "mxfp4"}
    for config, said in (
        (wide, "config is of gpt_oss with quant_method None, expected gpt_oss with 'mxfp4'"),
        (other, "config is of mixtral with quant_method 'mxfp4'"),
        ({}, "config is of a dict"),
    ):
        with pytest.raises(tl.InvalidArgument, match=said):
            keep_four_bits(config)
    wide.quantization_config = {"quant_method": "mxfp4"}
    assert keep_four_bits(wide).quantization_config != wide.quantization_config == {"quant_method": "mxfp4"}


# -- experts that transformers itself keeps in FP8 or FP4, on GPUs -------------------------------------------------


def stored_experts(expert_dtype: str, experts: slice) -> Any:
    """What transformers makes of the experts of such a checkpoint on a Hopper GPU."""
    integration = import_module("transformers.integrations.finegrained_fp8")
    given = import_module("transformers").DeepseekV4Config(
        hidden_size=WIDTH, moe_intermediate_size=WIDTH, n_routed_experts=models.EXPERTS, num_hidden_layers=1
    )
    given._experts_implementation = "grouped_mm"
    kind = import_module("transformers.integrations.moe").use_experts_implementation(
        experts_class=integration.FP8Experts, experts_interface=integration.ALL_FP8_EXPERTS_FUNCTIONS
    )
    made = kind(config=given, block_size=(128, 128), scale_fmt="ue8m0", expert_dtype=expert_dtype)
    generator = torch.Generator().manual_seed(2)
    for name, rows in (("gate_up_proj", 2 * WIDTH), ("down_proj", WIDTH)):
        packed, scales = random_blocks(generator, models.EXPERTS, rows, WIDTH)
        stored = packed.view(torch.int8), scales.view(torch.float8_e8m0fnu)
        if expert_dtype == "fp8":
            codes, of_codes, _ = tl.weights_for("block", *stored, four_bits=tl.MXFP4)
            stored = codes, of_codes.to(torch.float8_e8m0fnu)
        for end, tensor in zip(("", "_scale_inv"), stored, strict=True):
            assert getattr(made, name + end)[experts].shape == tensor[experts].shape
            setattr(made, name + end, torch.nn.Parameter(tensor[experts].clone(), requires_grad=False))
    made.num_experts = len(range(models.EXPERTS)[experts])
    return made


def run_stored(context: RankContext, expert_dtype: str, kept: str) -> torch.Tensor:
    count = models.EXPERTS // context.num_ranks
    local = slice(context.rank * count, (context.rank + 1) * count)
    options = {"experts": kept, "max_tokens_per_rank": 16}
    own = stored_experts(expert_dtype, local).to(context.device)
    implementation = spread(context, own, options)
    hidden, ids, weights = models.rows_for_experts(context, 1, WIDTH)
    with torch.no_grad():
        found = implementation(hidden.bfloat16(), ids, weights)
        wide = make_wide(stored_experts("fp4", slice(None))).to(context.device)
        want = wide(hidden.bfloat16(), ids, weights)
    assert 0 < (found - want).float().norm() < TOLERANCE * want.float().norm()
    of_form = {"fp4": "from MXFP4", "fp8": "from FP8"}[expert_dtype]
    of_kept = {"fp8": "FP8", "four_bits": "four bits"}[kept]
    assert implementation.runs == f"tokenloom's experts in {of_kept} (gated silu, limit 10, {of_form})"
    (layer,) = implementation.shared.fused.made.values()
    assert f"weights in {of_kept}: " in layer.describe()
    return found.cpu()


def make_wide(experts: torch.nn.Module) -> torch.nn.Module:
    """The same experts in bfloat16, of their model."""
    module = import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")
    made = module.DeepseekV4Experts(experts.config)
    for name in ("gate_up_proj", "down_proj"):
        packed, scales = (getattr(experts, name + end).view(torch.uint8) for end in ("", "_scale_inv"))
        setattr(made, name, torch.nn.Parameter(values_of(packed, scales).bfloat16()))
    return made  # type: ignore[no-any-return]


def test_stored_experts(pool: RankPool) -> None:
    """Four bits, and FP8 with the same values, give the same bits. So they do where they stay in four bits."""
    if pool.device == "cuda" and not HOPPER:
        pytest.skip("the kernels need Hopper GPUs")
    for kept in ("fp8", "four_bits"):
        of_four_bits, of_fp8 = (pool.run(run_stored, expert_dtype, kept) for expert_dtype in ("fp4", "fp8"))
        assert all(map(torch.equal, of_four_bits, of_fp8))


@pytest.mark.parametrize(
    ("attributes", "said"),
    [({}, "limit 10"), ({"swiglu_alpha": 1.7}, "limit 10, alpha 1.7, up + 1"), ({"limit": None}, "")],
)
def test_gates_of_stored_experts(attributes: dict[str, Any], said: str) -> None:
    """They are those of the model that transformers has replaced."""
    forms = import_module("tokenloom.integrations.transformers.forms")
    apply_activation = import_module("tokenloom.ops.activation").apply_activation
    experts = stored_experts("fp4", slice(None))
    for name, value in attributes.items():
        setattr(experts, name, value)
    form = forms.form_of(experts, "FP8Experts", with_scales=True)
    assert str(form) == ", ".join(filter(None, ["gated silu", said, "from MXFP4"]))
    hidden = 8 * torch.randn(64, 2 * WIDTH, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(apply_activation(hidden, form.activation), experts._apply_gate(hidden))
    with pytest.raises(forms.NotOurs, match=r"the parameters are down_proj, down_proj_scale_inv, gate"):
        forms.form_of(experts, "FP8Experts")
    experts.gate_softcap = 3.0
    with pytest.raises(forms.NotOurs, match="its gates have a softcap"):
        forms.form_of(experts, "FP8Experts", with_scales=True)
