"""DeepGEMM's names for its fused FP8 layer on SM90, served by ``tokenloom.MegaMoE``.

A program written for ``deep_gemm`` imports this module instead. Names, arguments, tensors and layouts are DeepGEMM's
(https://github.com/deepseek-ai/DeepGEMM) and those that SGLang's distribution of it adds. ``utils`` and ``testing``
have what the tests of that layer import.

The layer runs on Hopper GPUs of one host for NCCL groups, and slowly on CPUs for gloo groups. Activations are
quantised per 128 values before the second GEMM, not per 64, so results differ by rounding. Four-bit weights become FP8
when they are transformed. Other names of DeepGEMM raise ``MissingName``, an AttributeError, so ``hasattr`` is false.
"""

from typing import NoReturn

from tokenloom.compat.deep_gemm import testing, utils
from tokenloom.compat.deep_gemm.faults import MissingName
from tokenloom.compat.deep_gemm.mega import (
    SM90SymmBuffer,
    SymmBuffer,
    fp8_fp4_mega_moe,
    fp8_mega_moe,
    get_symm_buffer_for_mega_moe,
    get_symm_buffer_for_sm90_mega_moe,
    transform_sf_into_required_layout,
    transform_weights_for_mega_moe_sm90,
    transform_weights_for_mega_moe_sm90_fp4,
)
from tokenloom.compat.deep_gemm.pre_dispatch import mega_moe_pre_dispatch_sm90
from tokenloom.compat.deep_gemm.settings import get_num_sms, set_num_sms, set_pdl
from tokenloom.compat.deep_gemm.utils import per_block_cast_to_fp8, per_token_cast_to_fp8

__all__ = [
    "SM90SymmBuffer",
    "SymmBuffer",
    "fp8_fp4_mega_moe",
    "fp8_mega_moe",
    "get_num_sms",
    "get_symm_buffer_for_mega_moe",
    "get_symm_buffer_for_sm90_mega_moe",
    "mega_moe_pre_dispatch_sm90",
    "per_block_cast_to_fp8",
    "per_token_cast_to_fp8",
    "set_num_sms",
    "set_pdl",
    "testing",
    "transform_sf_into_required_layout",
    "transform_weights_for_mega_moe_sm90",
    "transform_weights_for_mega_moe_sm90_fp4",
    "utils",
]


def __getattr__(name: str) -> NoReturn:
    why = "it serves the FP8 layer for SM90 alone; import deep_gemm for the rest"
    if "fp4" in name and "mega" in name:
        why = "tokens are FP8 on Hopper, and four-bit weights are MXFP4; take fp8_fp4_mega_moe"
    elif name in ("mega_moe_pre_dispatch", "transform_weights_for_mega_moe", "bf16_mega_moe"):
        why = "that is for SM100; take fp8_mega_moe and the names that end in sm90"
    raise MissingName(f"tokenloom.compat.deep_gemm has no {name}: {why}")
