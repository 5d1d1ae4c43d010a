"""Programs that were written for DeepGEMM's fused layer: the same names, tensors and layouts."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import Ranks
from tests.support.mega_cases import CASES, Layer, assert_near, expected, make_layer
from tokenloom.compat import deep_gemm
from tokenloom.errors import InvalidArgument, ShapeMismatch
from tokenloom.ops import quant
from tokenloom.runtime.processes import RankContext

FP8 = torch.float8_e4m3fn


def test_only_rows_of_w1_move() -> None:
    w1, w2 = torch.arange(32 * 4).view(1, 32, 4).to(torch.uint8).view(FP8), torch.zeros(1, 4, 16, dtype=FP8)
    s1, s2 = torch.rand(1, 1, 1), torch.rand(1, 1, 1)
    (moved, same_s1), (same_w2, same_s2) = deep_gemm.transform_weights_for_mega_moe_sm90((w1, s1), (w2, s2))
    assert moved.view(torch.uint8)[0, 8:16].equal(w1.view(torch.uint8)[0, 16:24])  # the first ups
    assert [id(same) for same in (same_s1, same_w2, same_s2)] == [id(given) for given in (s1, w2, s2)]


def test_options_that_there_are_not() -> None:
    with pytest.raises(InvalidArgument, match="activation is 'relu'"):
        deep_gemm.get_symm_buffer_for_mega_moe(None, 8, 16, 2, 128, 128, activation="relu")  # type: ignore[arg-type]


def check_program(context: RankContext) -> None:
    case = CASES["clamp"]
    layer: Layer = make_layer(case, context.num_ranks, context.device)
    most = max(len(x) for x in layer.xs) + 3
    sizes = (len(layer.w1), most, case.top_k, case.hidden, case.intermediate)
    buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(context.group, *sizes)
    mine = slice(context.rank * case.experts_per_rank, (context.rank + 1) * case.experts_per_rank)
    l1, l2 = deep_gemm.transform_weights_for_mega_moe_sm90(
        (layer.w1[mine], layer.w1_scales[mine]), (layer.w2[mine], layer.w2_scales[mine])
    )
    x = layer.xs[context.rank]
    rows = len(x)
    q, scales = quant.quantize_fp8(x)
    buffer.x[:rows].copy_(q)
    buffer.x_sf[:rows].copy_(scales)
    buffer.topk_idx[:rows].copy_(layer.ids[context.rank])
    buffer.topk_weights[:rows].copy_(layer.weights[context.rank])
    y = torch.full((rows, case.hidden), torch.nan, dtype=torch.bfloat16, device=context.device)
    stats = torch.zeros(case.experts_per_rank, dtype=torch.int32, device=context.device)
    for _ in range(2):
        deep_gemm.fp8_mega_moe(y, l1, l2, buffer, stats, activation_clamp=case.clamp)
    assert_near(y, expected(case, layer, context.rank))
    routes = torch.cat([ids.flatten() for ids in layer.ids])
    first = context.rank * case.experts_per_rank
    assert stats.tolist() == [2 * int((routes == first + e).sum()) for e in range(case.experts_per_rank)]
    with pytest.raises(ShapeMismatch, match=r"the buffer has room for \d+$"):
        deep_gemm.fp8_mega_moe(y.new_zeros(most + 1, case.hidden), l1, l2, buffer)
    with pytest.raises(InvalidArgument, match="recipe is"):
        deep_gemm.fp8_mega_moe(y, l1, l2, buffer, recipe=(1, 128, 128))
    buffer.destroy()


@pytest.mark.gpu
def test_a_program_for_deep_gemm(hoppers: Ranks) -> None:
    hoppers.run(check_program)
