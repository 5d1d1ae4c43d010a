"""The surface of deep_gemm, name by name, and what is refused."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.conftest import HOPPER
from tokenloom.compat import deep_gemm
from tokenloom.compat.deep_gemm.faults import MissingName
from tokenloom.errors import InvalidArgument

REQUIRED = inspect.Parameter.empty
SIZES = ("group", "num_experts", "num_max_tokens_per_rank", "num_topk", "hidden", "intermediate_hidden")
SIGNATURES: dict[str, dict[str, Any]] = {
    "SM90SymmBuffer": dict.fromkeys(SIZES, REQUIRED) | {"use_fp8_dispatch": True, "activation": "swiglu"},
    "get_symm_buffer_for_sm90_mega_moe": dict.fromkeys(SIZES, REQUIRED)
    | {
        "use_fp8_dispatch": True,
        "activation": "swiglu",
        "fused": False,
        "num_experts_per_wave": None,
        "l2_act_sf_gran_k": None,
    },
    "get_symm_buffer_for_mega_moe": dict.fromkeys(SIZES, REQUIRED)
    | {"num_shared_experts": 0, "use_fp8_dispatch": None, "mma_type": "fp8xfp4", "activation": "swiglu"},
    "transform_weights_for_mega_moe_sm90": {"l1_weights": REQUIRED, "l2_weights": REQUIRED},
    "fp8_mega_moe": {
        "y": REQUIRED,
        "l1_weights": REQUIRED,
        "l2_weights": REQUIRED,
        "sym_buffer": REQUIRED,
        "cumulative_local_expert_recv_stats": None,
        "recipe": (128, 128, 128),
        "activation": "swiglu",
        "activation_clamp": None,
        "fast_math": True,
        "num_tokens_bound": None,
    },
    "transform_weights_for_mega_moe_sm90_fp4": {
        "l1_weights": REQUIRED,
        "l2_weights": REQUIRED,
        "round_again": False,  # ours alone, by keyword
    },
    "fp8_fp4_mega_moe": {
        "y": REQUIRED,
        "l1_weights": REQUIRED,
        "l2_weights": REQUIRED,
        "sym_buffer": REQUIRED,
        "cumulative_local_expert_recv_stats": None,
        "recipe": (1, 1, 32),
        "activation": "swiglu",
        "activation_clamp": None,
        "fast_math": True,
    },
    "mega_moe_pre_dispatch_sm90": {
        "x": REQUIRED,
        "topk_idx": REQUIRED,
        "topk_weights": REQUIRED,
        "buf_x": REQUIRED,
        "buf_x_sf": REQUIRED,
        "buf_topk_idx": REQUIRED,
        "buf_topk_weights": REQUIRED,
        "num_tokens": REQUIRED,
        "group_size": 128,
        "routed_scaling_factor": 1.0,
    },
    "utils.per_token_cast_to_fp8": {"x": REQUIRED, "use_ue8m0": REQUIRED, "gran_k": 128, "use_packed_ue8m0": False},
    "utils.dist.init_dist": {"local_rank": REQUIRED, "num_local_ranks": REQUIRED},
    "utils.dist.uneven_all_gather": {"tensor": REQUIRED, "dim": 0, "group": None},
    "testing.calc_diff": {"x": REQUIRED, "y": REQUIRED},
}
"""Parameters in order, with their defaults, as DeepGEMM's tests and SGLang pass them."""
SUBMODULES = {
    "utils": ["dist", "init_dist", "math", "per_block_cast_to_fp8", "per_token_cast_to_fp8", "uneven_all_gather"],
    "utils.math": ["per_block_cast_to_fp8", "per_token_cast_to_fp8"],
    "utils.dist": ["dist_print", "init_dist", "uneven_all_gather"],
    "testing": ["bench_kineto", "calc_diff", "get_arch_major"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    module, _, last = name.rpartition(".")
    found = getattr(import_module(".".join(filter(None, [deep_gemm.__name__, module]))), last)
    parameters = inspect.signature(found).parameters
    assert list(parameters.items()) == [
        (each, parameters[each].replace(default=default)) for each, default in SIGNATURES[name].items()
    ]


@pytest.mark.parametrize("name", SUBMODULES)
def test_what_tests_import(name: str) -> None:
    module = import_module(f"{deep_gemm.__name__}.{name}")
    assert sorted(module.__all__) == SUBMODULES[name]
    assert all(hasattr(module, each) for each in SUBMODULES[name])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fp4_fp4_mega_moe", "tokens are FP8 on Hopper, and four-bit weights are MXFP4; take fp8_fp4_mega_moe"),
        ("nvfp4_mega_moe", "four-bit weights are MXFP4"),
        ("fp8_fp4_gemm_nt", "import deep_gemm for the rest"),
        ("mega_moe_pre_dispatch", "for SM100"),
        ("fp8_gemm_nt", "import deep_gemm for the rest"),
    ],
)
def test_names_that_there_are_not(name: str, why: str) -> None:
    """SGLang asks with hasattr what it may call."""
    assert not hasattr(deep_gemm, name)
    with pytest.raises(MissingName, match=f"has no {name}: .*{why}"):
        getattr(deep_gemm, name)


@pytest.mark.parametrize(
    ("maker", "option"),
    [
        ("get_symm_buffer_for_mega_moe", {"activation": "relu"}),
        ("get_symm_buffer_for_mega_moe", {"num_shared_experts": 1}),
        ("get_symm_buffer_for_mega_moe", {"use_fp8_dispatch": False}),
        ("get_symm_buffer_for_mega_moe", {"mma_type": "nvfp4xnvfp4"}),
        ("get_symm_buffer_for_sm90_mega_moe", {"num_experts_per_wave": -1}),
        ("get_symm_buffer_for_sm90_mega_moe", {"l2_act_sf_gran_k": 64}),
        ("SymmBuffer", {"activation": "situ"}),
    ],
)
def test_options_that_there_are_not(maker: str, option: dict[str, Any]) -> None:
    ((name, value),) = option.items()
    with pytest.raises(InvalidArgument, match=f"{name} is {value!r}; tokenloom's layer has"):
        getattr(deep_gemm, maker)(None, 8, 16, 2, 128, 128, **option)


@pytest.mark.parametrize(("hidden", "width"), [(144, 128), (128, 144)])
def test_widths_that_deep_gemm_has_not(hidden: int, width: int) -> None:
    """MegaMoE pads them; scales of these names have no room for a shorter last block."""
    name = "hidden" if hidden % 128 else "intermediate_hidden"
    with pytest.raises(InvalidArgument, match=f"{name} is 144, expected a multiple of 128"):
        deep_gemm.SymmBuffer(None, 8, 16, 2, hidden, width)


def test_sms() -> None:
    """Programs put back what they found, and key caches by it."""
    found = deep_gemm.get_num_sms()
    assert found == (torch.cuda.get_device_properties(0).multi_processor_count // 2 * 2 if HOPPER else 0)
    deep_gemm.set_num_sms(found)
    with pytest.raises(InvalidArgument, match=f"num_sms is {found + 2}; kernels of this layer take all {found} SMs"):
        deep_gemm.set_num_sms(found + 2)
    deep_gemm.set_pdl(False)
