"""Forms of the kernels that compute: the grouped GEMM, SwiGLU, and what MegaMoE runs around its GEMMs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import torch

from tokenloom.kernels.activation.launch import ActivationVariant
from tokenloom.kernels.bias.launch import BiasVariant
from tokenloom.kernels.common import Variant, short_name
from tokenloom.kernels.gemm.launch import (
    Bf16Epilogue,
    GroupedGemmVariant,
    QuantizeRowsVariant,
    SwigluFp8Epilogue,
    tile_heights,
)
from tokenloom.kernels.moe.launch import Packing, PackTokensVariant, SendRoutesVariant, SumRoutesVariant
from tokenloom.plan import FUNCTIONS, Plan

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8 = torch.float8_e4m3fn
FAST, CLAMPED = SwigluFp8Epilogue(), SwigluFp8Epilogue(clamped=True)
ROW_SCALED = SwigluFp8Epilogue(power_of_two_scales=True)
EXACT = SwigluFp8Epilogue(clamped=True, power_of_two_scales=True, fast_math=False)
GPT_OSS = SwigluFp8Epilogue(clamped=True, adjusted=True, biased=True)
ROW_GPT_OSS = replace(GPT_OSS, power_of_two_scales=True)
FOUR_BITS: dict[str, Any] = {"recipe": "row", "four_bits": True, "claims": True}
OTHER_FORMS = [
    GPT_OSS,
    SwigluFp8Epilogue(clamped=True, power_of_two_scales=True, fast_math=False, adjusted=True, biased=True),
    *(SwigluFp8Epilogue(function=function, biased=True) for function in FUNCTIONS[1:]),
    *(SwigluFp8Epilogue(function=function, fast_math=False, clamped=True) for function in FUNCTIONS[1:]),
]
REAL_PLAN = Plan(8, 256, 7168, 8, 8192)


def around_gemms(what: str, plan: Plan, shared: int = 0) -> list[tuple[str, Variant]]:
    """What sends rows before the GEMMs of a layer, and adds them behind."""
    sends = SendRoutesVariant(plan, num_shared_experts=shared)
    sums = SumRoutesVariant(plan, num_shared_experts=shared)
    return [(f"send_routes, {what}", sends), (f"sum_routes, {what}", sums)]


_VARIANTS: list[tuple[str, Variant]] = [
    # GEMMs of a large layer have the longest main loops and use the most registers; MegaMoE awaits and scatters.
    ("gemm, large", GroupedGemmVariant(32, 4096, 7168)),
    ("gemm, large, K 2048", GroupedGemmVariant(32, 7168, 2048)),
    ("gemm, large, scatters", GroupedGemmVariant(32, 7168, 2048, scatters=8)),
    ("gemm, large, swiglu", GroupedGemmVariant(32, 4096, 7168, epilogue=FAST)),
    ("gemm, large, swiglu exact", GroupedGemmVariant(32, 4096, 7168, epilogue=EXACT)),
    *(
        (f"gemm, large, {epilogue}, awaits", GroupedGemmVariant(32, 4096, 7168, epilogue=epilogue, awaits=8))
        for epilogue in (FAST, CLAMPED, EXACT)
    ),
    # Other activations and biases hold more registers; a bias of GEMM2 is times the row's weight.
    *(
        (f"gemm, large, {epilogue}, awaits", GroupedGemmVariant(32, 4096, 7168, epilogue=epilogue, awaits=8))
        for epilogue in OTHER_FORMS
    ),
    ("gemm, gpt_oss, awaits", GroupedGemmVariant(32, 5888, 2944, epilogue=GPT_OSS, awaits=8)),
    ("gemm, gpt_oss, slots", GroupedGemmVariant(32, 5888, 2944, epilogue=GPT_OSS, slots=True)),
    ("gemm, gpt_oss, traced", GroupedGemmVariant(32, 5888, 2944, epilogue=GPT_OSS, awaits=8, traced=True)),
    ("gemm, biased", GroupedGemmVariant(32, 4096, 7168, epilogue=Bf16Epilogue(biased=True))),
    ("gemm, biased, scatters", GroupedGemmVariant(32, 7168, 2048, epilogue=Bf16Epilogue(biased=True), scatters=8)),
    ("gemm, biased, odd strips", GroupedGemmVariant(3, 384, 256, epilogue=Bf16Epilogue(biased=True), slots=True)),
    # Slots find a tile's rows in another way, in every role; the second loading warp is a role of its own.
    ("gemm, large, slots", GroupedGemmVariant(32, 4096, 7168, slots=True)),
    ("gemm, large, K 2048, slots", GroupedGemmVariant(32, 7168, 2048, slots=True)),
    *(
        (f"gemm, large, {epilogue}, slots", GroupedGemmVariant(32, 4096, 7168, epilogue=epilogue, slots=True))
        for epilogue in (FAST, CLAMPED, EXACT)
    ),
    ("gemm, smallest, slots", GroupedGemmVariant(1, 128, 128, slots=True)),
    ("gemm, K 384, swiglu, slots", GroupedGemmVariant(7, 512, 384, epilogue=FAST, slots=True)),
    ("gemm, many experts, slots", GroupedGemmVariant(300, 384, 256, slots=True)),
    # Roles that write when they work hold more registers.
    ("gemm, traced, awaits", GroupedGemmVariant(32, 4096, 7168, epilogue=EXACT, awaits=8, traced=True)),
    ("gemm, traced, scatters", GroupedGemmVariant(32, 7168, 2048, scatters=8, traced=True)),
    # Row scales: a product of 256 columns in one set of registers.
    ("gemm, large, row scales", GroupedGemmVariant(32, 4096, 7168, recipe="row")),
    ("gemm, large, K 2048, row scales", GroupedGemmVariant(32, 7168, 2048, recipe="row")),
    *(
        (f"gemm, large, {each}, row scales", GroupedGemmVariant(32, 4096, 7168, epilogue=each, recipe="row"))
        for each in (ROW_SCALED, EXACT)
    ),
    ("gemm, biased, row scales", GroupedGemmVariant(32, 4096, 7168, epilogue=Bf16Epilogue(biased=True), recipe="row")),
    (
        "gemm, gpt_oss, row scales",
        GroupedGemmVariant(32, 5888, 2944, epilogue=replace(GPT_OSS, power_of_two_scales=True), recipe="row"),
    ),
    ("gemm, smallest, row scales", GroupedGemmVariant(1, 128, 128, recipe="row")),
    (
        "gemm, row scales, awaits",
        GroupedGemmVariant(32, 4096, 7168, epilogue=ROW_SCALED, awaits=8, claims=True, recipe="row"),
    ),
    ("gemm, row scales, scatters", GroupedGemmVariant(32, 7168, 2048, scatters=8, claims=True, recipe="row")),
    ("gemm, row scales, scatters, narrow", GroupedGemmVariant(16, 2048, 768, scatters=8, claims=True, recipe="row")),
    ("gemm, row scales, scatters, wide", GroupedGemmVariant(2, 7168, 18432, scatters=8, claims=True, recipe="row")),
    ("gemm, row scales, smallest swiglu", GroupedGemmVariant(1, 256, 128, epilogue=ROW_SCALED, recipe="row")),
    ("gemm, row scales, slots", GroupedGemmVariant(7, 512, 384, slots=True, recipe="row")),
    # Weights that are decoded in registers take some beside the sums.
    *(
        (f"gemm, four bits, {kind}, {rows} rows", replace(variant, tile_rows=rows, **FOUR_BITS))
        for rows, (kind, variant) in product(
            tile_heights("row", four_bits=True),
            {
                "awaits": GroupedGemmVariant(32, 4096, 7168, epilogue=ROW_SCALED, awaits=8),
                "awaits, gpt_oss": GroupedGemmVariant(32, 5888, 2944, epilogue=ROW_GPT_OSS, awaits=8),
                "scatters": GroupedGemmVariant(32, 7168, 2048, scatters=8),
                "biased, scatters": GroupedGemmVariant(32, 7168, 2048, epilogue=Bf16Epilogue(biased=True), scatters=8),
                "slots": GroupedGemmVariant(7, 512, 384, slots=True),
                "smallest": GroupedGemmVariant(1, 128, 128),
            }.items(),
        )
    ),
    # Lower tiles leave more stages, and registers.
    *(
        (
            f"gemm, row scales, {kind}, tiles of {rows} rows",
            replace(variant, tile_rows=rows, recipe="row", claims=True),
        )
        for rows, (kind, variant) in product(
            (64, 128, 160),  # the lowest where the other product has weights of four bits
            {
                "awaits": GroupedGemmVariant(32, 4096, 7168, epilogue=ROW_SCALED, awaits=8),
                "awaits, exact": GroupedGemmVariant(32, 4096, 7168, epilogue=EXACT, awaits=8),
                "scatters": GroupedGemmVariant(32, 7168, 2048, scatters=8),
                "biased, scatters": GroupedGemmVariant(32, 7168, 2048, epilogue=Bf16Epilogue(biased=True), scatters=8),
                "slots": GroupedGemmVariant(7, 512, 384, slots=True),
            }.items(),
        )
    ),
    *((str(each), each) for each in (QuantizeRowsVariant(2048), QuantizeRowsVariant(18432, slots=True))),
    # One block of K: a loop that is optimised away leaves wgmma unordered. Scales of such a K are copied by threads.
    ("gemm, smallest", GroupedGemmVariant(1, 128, 128)),
    ("gemm, smallest, swiglu", GroupedGemmVariant(1, 256, 128, epilogue=CLAMPED)),
    ("gemm, smallest, swiglu, awaits", GroupedGemmVariant(1, 256, 128, epilogue=CLAMPED, awaits=8)),
    ("gemm, small, scatters", GroupedGemmVariant(16, 2048, 768, scatters=8)),
    # The last scales of a row are 4 blocks instead of 8.
    ("gemm, K 512", GroupedGemmVariant(3, 2048, 512)),
    ("gemm, many experts", GroupedGemmVariant(300, 384, 256)),
    # Every dtype is read and written in its own way. Rows shorter than a warp's loads, of tails, of one tile and many.
    *(
        (f"activate_{direction}, {short_name(dtype)}, {width}", ActivationVariant(direction, dtype, width))
        for direction, dtype, width in product(
            ("forward", "backward"), (BF16, FP16, FP32), (8, 24, 96, 264, 1536, 2048, 14336)
        )
    ),
    # Each function, with what makes it most: two parts in turns, bias, limits.
    *(
        (str(variant), variant)
        for direction, (dtype, width), function, (gated, interleaved, biased), adjusted in product(
            ("forward", "backward"),
            ((BF16, 2048), (FP32, 264)),
            FUNCTIONS,
            ((True, False, True), (True, True, True), (False, False, True)),
            (False, True),
        )
        if gated or not adjusted or function == "silu"
        for variant in [ActivationVariant(direction, dtype, width, function, gated, interleaved, adjusted, biased)]
    ),
    # Rows shorter than a warp's loads, of tails, of one tile and many.
    *(
        (str(variant), variant)
        for name, dtype, width in product(("add_bias", "dot_bias"), (BF16, FP16, FP32), (8, 264, 2880, 7168))
        for variant in [BiasVariant(name, dtype, width)]
    ),
    # One flag for each rank: of one, and of as many as a warp has lanes.
    ("gemm, one rank", GroupedGemmVariant(3, 256, 128, epilogue=FAST, awaits=1)),
    ("gemm, 32 ranks", GroupedGemmVariant(32, 4096, 7168, epilogue=EXACT, awaits=32)),
    # What the layer is measured with; the fewest of everything; as many ranks and routes as a warp has lanes.
    *around_gemms("large", REAL_PLAN),
    *around_gemms("one expert", Plan(1, 3, 128, 1, 1)),
    *around_gemms("32 ranks", Plan(32, 64, 384, 32, 9)),
    # 30 routes and 2 shared experts fill a warp; rows of 96 KB leave room for two of one warp.
    *around_gemms("large, shared", REAL_PLAN, 1),
    *around_gemms("two shared", Plan(2, 8, 384, 30, 9), 2),
    *around_gemms("wide rows", Plan(2, 8, 98304, 2, 9)),
    # Blocks that pack and keep their tokens, of each kind, whose rows are one part or several.
    *(
        (f"send_routes, {what}, {packing}", SendRoutesVariant(plan, num_shared_experts=shared, packing=packing))
        for what, plan, shared, packing in (
            *(("large", REAL_PLAN, 0, Packing(dtype)) for dtype in (BF16, FP16, FP32, FP8)),
            ("large, shared", REAL_PLAN, 1, Packing(BF16, power_of_two_scales=True)),
            ("one expert", Plan(1, 3, 128, 1, 1), 0, Packing(FP32)),
            ("two shared", Plan(2, 8, 384, 30, 9), 2, Packing(FP8)),
            ("wide rows", Plan(2, 8, 98304, 2, 9), 0, Packing(BF16)),
        )
    ),
    # Tokens of each kind are read in a way of their own, in one tile of a row or many.
    *(
        (str(variant), variant)
        for dtype, hidden, powers in product((BF16, FP16, FP32, FP8), (128, 7168), (False, True))
        if dtype != FP8 or not powers
        for variant in [PackTokensVariant(hidden, Packing(dtype, powers))]
    ),
    *(
        (str(variant), variant)
        for dtype, hidden in product((BF16, FP32, FP8), (128, 7168))
        for variant in [PackTokensVariant(hidden, Packing(dtype), "row")]
    ),
    *(
        (str(variant), variant)
        for packing in (None, Packing(BF16), Packing(FP32, True), Packing(FP8))
        for variant in [SendRoutesVariant(REAL_PLAN, packing=packing, recipe="row")]
    ),
]
# In calls of many tokens MegaMoE claims tiles.
_CLAIMING: list[tuple[str, Variant]] = [
    (f"{name}, claims", replace(variant, claims=True))
    for name, variant in _VARIANTS
    if isinstance(variant, GroupedGemmVariant) and (variant.awaits or variant.scatters)
]
COMPUTE_VARIANTS = _VARIANTS + _CLAIMING
"""Name and form of each."""
