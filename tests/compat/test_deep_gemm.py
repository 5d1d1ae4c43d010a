"""Programs that were written for DeepGEMM's fused layer: the same names, tensors and layouts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.conftest import HOPPER, Ranks
from tests.support.mega_cases import CASES, Case, Layer, assert_near, expected, make_layer
from tests.support.mega_cases import make_mega as make_ours
from tests.support.on_ranks import on_ranks
from tokenloom.compat import deep_gemm
from tokenloom.compat.deep_gemm import testing
from tokenloom.compat.deep_gemm.utils import dist as deep_gemm_dist
from tokenloom.errors import DeviceMismatch, DtypeMismatch, InvalidArgument, ShapeMismatch
from tokenloom.ops import quant
from tokenloom.runtime.processes import RankContext

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
# -- before the call --------------------------------------------------------------------------------------------


def weights_for(hidden: int = 128, width: int = 128) -> tuple[deep_gemm.mega.Weights, deep_gemm.mega.Weights]:
    w1 = torch.arange(2 * width * hidden).remainder(120).view(1, 2 * width, hidden).to(torch.uint8).view(FP8)
    l1 = w1, torch.rand(1, 2 * width // 128, hidden // 128)
    return l1, (torch.zeros(1, hidden, width, dtype=FP8), torch.rand(1, hidden // 128, width // 128))


def test_only_rows_of_w1_move() -> None:
    (w1, s1), (w2, s2) = weights_for()
    (moved, same_s1), (same_w2, same_s2) = deep_gemm.transform_weights_for_mega_moe_sm90((w1, s1), (w2, s2))
    assert moved.view(torch.uint8)[0, 8:16].equal(w1.view(torch.uint8)[0, 128:136])  # the first ups
    assert [id(same) for same in (same_s1, same_w2, same_s2)] == [id(given) for given in (s1, w2, s2)]


def test_weights_of_other_shapes() -> None:
    l1, l2 = weights_for()
    with pytest.raises(DtypeMismatch, match=r"w1 is torch.bfloat16, expected torch.float8_e4m3fn"):
        deep_gemm.transform_weights_for_mega_moe_sm90((l1[0].to(BF16), l1[1]), l2)
    with pytest.raises(ShapeMismatch, match=r"w1_scales is \[1, 1, 1\], expected \[1, 2, 1\]"):
        deep_gemm.transform_weights_for_mega_moe_sm90((l1[0], l2[1]), l2)
    with pytest.raises(ShapeMismatch, match=r"w2 is \[128, 128\]"):
        deep_gemm.transform_weights_for_mega_moe_sm90(l1, (l2[0][0], l2[1]))


def four_bit_weights(local: int, hidden: int, width: int, seed: int = 0) -> list[deep_gemm.mega.Weights]:
    """w1 and w2 with all codes of E2M1, packed, and float32 scales of 32 values, as SGLang passes them."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for rows, depth in ((2 * width, hidden), (hidden, width)):
        packed = torch.randint(0, 256, (local, rows, depth // 2), generator=generator, dtype=torch.uint8)
        octaves = torch.randint(0, 3, (local, rows, depth // 32), generator=generator)
        pairs.append((packed, 2.0 ** (octaves - 8)))
    return pairs


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def values_of(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Look up [E, N, K]: a byte's low half comes first, and its upper bit is the sign."""
    codes = torch.empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=torch.int64)
    codes[..., 0::2], codes[..., 1::2] = packed.long() % 16, packed.long() // 16
    return E2M1[codes % 8] * (1 - 2 * (codes // 8)) * scales.float().repeat_interleave(32, -1)


@pytest.mark.parametrize("packed_dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu, torch.uint8])
def test_four_bit_weights_become_fp8(packed_dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    """Exactly, and with gates and ups of w1 in turn, as those that came as FP8."""
    given = four_bit_weights(2, 256, 128)
    as_asked = {
        torch.float32: lambda scales: scales,
        torch.float8_e8m0fnu: lambda scales: scales.to(torch.float8_e8m0fnu),
        torch.uint8: lambda scales: scales.to(torch.float8_e8m0fnu).view(torch.uint8),
    }[scale_dtype]
    l1, l2 = ((packed.view(packed_dtype), as_asked(scales)) for packed, scales in given)
    found = deep_gemm.transform_weights_for_mega_moe_sm90_fp4(l1, l2)
    for name, (w, scales), (packed, of_groups) in zip(("w1", "w2"), found, given, strict=True):
        assert (w.dtype, scales.dtype) == (FP8, torch.float32)
        values = values_of(packed, of_groups)
        spread = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
        if name == "w1":
            values, spread = tl.interleave_gate_and_up(values), tl.interleave_gate_and_up(spread)
        assert torch.equal(w.float() * spread, values)


def test_four_bit_weights_out_of_reach() -> None:
    l1, l2 = four_bit_weights(1, 128, 128)
    far = l1[1].clone()
    far[0, 5, 1] *= 2.0**-20
    with pytest.raises(InvalidArgument, match=r"w1 has values of four bits.*1 of 256 channels.*pass round_again=True"):
        deep_gemm.transform_weights_for_mega_moe_sm90_fp4((l1[0], far), l2)
    (w1, _), _ = deep_gemm.transform_weights_for_mega_moe_sm90_fp4((l1[0], far), l2, round_again=True)
    assert w1.dtype == FP8
    bad: list[tuple[type[Exception], str, Any, Any]] = [
        (DtypeMismatch, "w2 is torch.float32, expected uint8", l1, (l2[1], l2[1])),
        (ShapeMismatch, r"w1_scales is \[1, 256, 2\], expected \[1, 256, 4\]", (l1[0], l1[1][..., :2]), l2),
        (ShapeMismatch, r"w1 is \[1, 128, 128\], expected \[1, 256, 128\]", (l1[0][:, :128], l1[1][:, :128]), l2),
    ]
    for kind, text, first, second in bad:
        with pytest.raises(kind, match=text):
            deep_gemm.transform_weights_for_mega_moe_sm90_fp4(first, second)


def test_scales_of_weights_stay() -> None:
    scales = torch.rand(3, 2, 4)
    same = deep_gemm.transform_sf_into_required_layout(scales, 256, 512, (128, 128), 3, disable_ue8m0_cast=True)
    assert same is scales
    assert deep_gemm.transform_sf_into_required_layout(scales[0], mn=256, k=512, recipe=(128, 128)).equal(scales[0])
    with pytest.raises(InvalidArgument, match=r"recipe is \(1, 32\)"):
        deep_gemm.transform_sf_into_required_layout(scales, 256, 512, (1, 32), 3)
    with pytest.raises(ShapeMismatch, match=r"sf is \[3, 2, 4\], expected \[3, 2, 2\]"):
        deep_gemm.transform_sf_into_required_layout(scales, 256, 256, (128, 128), 3)


# -- tokens -----------------------------------------------------------------------------------------------------


def pre_dispatch(num_tokens: int, ids_dtype: torch.dtype, **options: Any) -> tuple[list[torch.Tensor], Any]:
    """Five rows of 256 values into eight places, and what they are."""
    x, ids = torch.randn(5, 256).to(BF16), torch.randint(-1, 9, (5, 3), dtype=ids_dtype)
    weights = torch.rand(5, 3)
    buffer = [
        torch.full((8, 256), 3, dtype=FP8),
        torch.full((8, 2), 7.0),
        torch.full((8, 3), 17),
        torch.full((8, 3), torch.nan),
    ]
    deep_gemm.mega_moe_pre_dispatch_sm90(x, ids, weights, *buffer, num_tokens=num_tokens, **options)
    return buffer, (x, ids, weights)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_tokens", [0, 3, 5])
def test_pre_dispatch(num_tokens: int, ids_dtype: torch.dtype) -> None:
    (x, x_sf, ids, weights), given = pre_dispatch(num_tokens, ids_dtype, routed_scaling_factor=2.5)
    values, scales = quant.quantize_fp8(given[0][:num_tokens])
    assert x[:num_tokens].view(torch.uint8).equal(values.view(torch.uint8))
    assert x_sf[:num_tokens].equal(scales)
    assert ids[:num_tokens].equal(given[1][:num_tokens].long())
    assert weights[:num_tokens].equal(given[2][:num_tokens] * 2.5)
    assert (ids[num_tokens:] == -1).all()
    assert (weights[num_tokens:] == 0).all()


def test_pre_dispatch_of_what_does_not_fit() -> None:
    x, ids, weights = torch.zeros(5, 256, dtype=BF16), torch.zeros(5, 3, dtype=torch.int32), torch.zeros(5, 3)
    good = {
        "x": x,
        "topk_idx": ids,
        "topk_weights": weights,
        "buf_x": torch.zeros(4, 256, dtype=FP8),
        "buf_x_sf": torch.zeros(4, 2),
        "buf_topk_idx": torch.zeros(4, 3, dtype=torch.int64),
        "buf_topk_weights": torch.zeros(4, 3),
        "num_tokens": 4,
    }
    bad: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (InvalidArgument, "num_tokens is 5, expected 0 to 5 rows of x and 4", {"num_tokens": 5}),
        (InvalidArgument, "num_tokens is -1", {"num_tokens": -1}),
        (InvalidArgument, "group_size is 32", {"group_size": 32}),
        (ShapeMismatch, r"x is \[256\]", {"x": x[0]}),
        (ShapeMismatch, r"topk_weights is \[5, 2\], expected \[5, 3\]", {"topk_weights": torch.zeros(5, 2)}),
        (ShapeMismatch, r"buf_x is \[4, 128\], expected \[4, 256\]", {"buf_x": torch.zeros(4, 128, dtype=FP8)}),
        (ShapeMismatch, r"buf_x_sf is \[4, 8\], expected \[4, 2\]", {"buf_x_sf": torch.zeros(4, 8)}),
        (DtypeMismatch, "topk_idx is torch.float32", {"topk_idx": weights}),
        (DtypeMismatch, "buf_x is torch.int8", {"buf_x": torch.zeros(4, 256, dtype=torch.int8)}),
        (DtypeMismatch, "buf_topk_idx is torch.int32", {"buf_topk_idx": torch.zeros(4, 3, dtype=torch.int32)}),
        (DeviceMismatch, "buf_x is on meta", {"buf_x": torch.zeros(4, 256, dtype=FP8, device="meta")}),
    ]
    deep_gemm.mega_moe_pre_dispatch_sm90(**good)
    for kind, text, change in bad:
        with pytest.raises(kind, match=text):
            deep_gemm.mega_moe_pre_dispatch_sm90(**(good | change))


def test_casts() -> None:
    x = torch.randn(128, 256)
    for powers in (False, True):
        got = deep_gemm.per_token_cast_to_fp8(x, use_ue8m0=powers, gran_k=128, use_packed_ue8m0=False)
        for each, want in zip(got, quant.quantize_fp8(x, power_of_two_scales=powers), strict=True):
            assert each.view(torch.uint8).equal(want.view(torch.uint8))
    values, scales = deep_gemm.per_block_cast_to_fp8(x, use_ue8m0=False)
    assert (values.dtype, scales.shape) == (FP8, (1, 2))
    for cast, options in (
        (deep_gemm.per_token_cast_to_fp8, {"use_ue8m0": False, "gran_k": 32}),
        (deep_gemm.per_token_cast_to_fp8, {"use_ue8m0": True, "use_packed_ue8m0": True}),
        (deep_gemm.per_block_cast_to_fp8, {"use_ue8m0": True}),
    ):
        with pytest.raises(InvalidArgument, match="gran_k is"):
            cast(x, **options)


def test_difference_by_hand() -> None:
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0])
    assert testing.calc_diff(x, y) == pytest.approx(1 - 2 * 3 / 7)
    assert testing.calc_diff(x, x) == testing.calc_diff(0 * x, 0 * x) == 0.0
    assert testing.calc_diff(x, y * torch.nan) != 0.0


@on_ranks
def test_uneven_all_gather(context: RankContext) -> None:
    """Ranks have 0, 1, 2 .. rows, so one of them has nothing."""
    whole = (torch.arange(6 * 4, device=context.device) % 16).view(6, 4).float()
    first = sum(range(context.rank))
    mine = whole[first : first + context.rank]
    num_rows = sum(range(context.num_ranks))
    for tensor, dim in ((mine, 0), (mine.to(FP8), 0), (mine.T, 1), (mine.T, -1)):
        got = deep_gemm_dist.uneven_all_gather(tensor, dim, context.group)
        assert (got.dtype, got.shape[dim]) == (tensor.dtype, num_rows)
        assert (got if dim == 0 else got.T).float().equal(whole[:num_rows])


# -- the call ---------------------------------------------------------------------------------------------------


def of_rank(layer: Layer, case: Case, rank: int) -> tuple[deep_gemm.mega.Weights, deep_gemm.mega.Weights]:
    mine = slice(rank * case.experts_per_rank, (rank + 1) * case.experts_per_rank)
    return deep_gemm.transform_weights_for_mega_moe_sm90(
        (layer.w1[mine], layer.w1_scales[mine]), (layer.w2[mine], layer.w2_scales[mine])
    )


def check_program(context: RankContext) -> None:
    """As DeepGEMM's own tests call it."""
    case = CASES["clamp"]
    layer = make_layer(case, context.num_ranks, context.device)
    most = max(len(x) for x in layer.xs) + 3
    sizes = (len(layer.w1), most, case.top_k, case.hidden, case.intermediate)
    buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(context.group, *sizes)
    assert isinstance(buffer, deep_gemm.SymmBuffer)
    assert (buffer.group, buffer.num_experts, buffer.num_max_tokens_per_rank) == (context.group, len(layer.w1), 128)
    assert (buffer.num_topk, buffer.hidden, buffer.intermediate_hidden) == sizes[2:]
    inputs = (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
    assert (buffer.topk_idx == -1).all(), "rows that nobody filled go nowhere"
    assert buffer.buffer.nbytes == sum(each.nbytes for each in inputs)
    l1, l2 = of_rank(layer, case, context.rank)
    x = layer.xs[context.rank]
    rows = len(x)
    q, scales = deep_gemm.per_token_cast_to_fp8(x, use_ue8m0=False, gran_k=128)
    for place, given in zip(inputs, (q, scales, layer.ids[context.rank], layer.weights[context.rank]), strict=True):
        place[:rows].copy_(given)
    y = torch.full((rows, case.hidden), torch.nan, dtype=BF16, device=context.device)
    stats = torch.zeros(case.experts_per_rank, dtype=torch.int32, device=context.device)
    for bound in (None, 128):
        deep_gemm.fp8_mega_moe(
            y, l1, l2, buffer, stats, activation_clamp=case.clamp, num_tokens_bound=bound, recipe=(128, 128, 128)
        )
    want = expected(case, layer, context.rank)
    assert_near(y, want)
    assert testing.calc_diff(y, want) < 1e-3
    routes = torch.cat([ids.flatten() for ids in layer.ids])
    first = context.rank * case.experts_per_rank
    assert stats.tolist() == [2 * int((routes == first + e).sum()) for e in range(case.experts_per_rank)]
    with pytest.raises(ShapeMismatch, match=r"y has 129 rows, the buffer has room for 128$"):
        deep_gemm.fp8_mega_moe(y.new_zeros(129, case.hidden), l1, l2, buffer)
    bounds = [{"num_tokens_bound": rows - 1}, {"num_tokens_bound": 256}]
    for bad in ({"recipe": (1, 128, 128)}, {"activation": "situ"}, *bounds):
        with pytest.raises(InvalidArgument, match=f"{next(iter(bad))} is"):
            deep_gemm.fp8_mega_moe(y, l1, l2, buffer, **bad)  # type: ignore[arg-type]
    buffer.destroy()
    buffer.destroy()


def check_server(context: RankContext) -> None:
    """As SGLang calls it: all layers share a buffer, ids are int32, and a rank without tokens asks for one row."""
    case, factor = CASES["plain"], 2.5
    layers = [make_layer(case, context.num_ranks, context.device, seed) for seed in (0, 1)]
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(
        context.group,
        len(layers[0].w1),
        200,
        case.top_k,
        case.hidden,
        case.intermediate,
        num_shared_experts=0,
        mma_type="fp8xfp4",
        activation="swiglu",
    )
    assert buffer.x.shape == (256, case.hidden)
    backend = "nvlink" if context.device.type == "cuda" else "composed"
    for layer in (*layers, layers[0]):
        rows = 0 if context.rank == 0 and layer is layers[1] else len(layer.xs[context.rank])
        x, ids, weights = (given[context.rank][:rows] for given in (layer.xs, layer.ids, layer.weights))
        deep_gemm.mega_moe_pre_dispatch_sm90(
            x,
            ids.int(),
            weights,
            *(buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights),
            num_tokens=rows,
            group_size=128,
            routed_scaling_factor=factor,
        )
        y = torch.full((max(rows, 1), case.hidden), torch.nan, dtype=BF16, device=context.device)
        l1, l2 = of_rank(layer, case, context.rank)
        deep_gemm.fp8_mega_moe(
            y, l1, l2, buffer, recipe=(128, 128, 128), activation="swiglu", activation_clamp=None, fast_math=True
        )
        with make_ours(context, case, layer, backend) as ours:
            assert y[:rows].equal(ours(x, ids, weights * factor))
        assert not y[rows:].any()
    buffer.destroy()


def check_four_bits(context: RankContext) -> None:
    """As SGLang calls it with MXFP4 experts: the bits of a MegaMoE that took the packed weights itself."""
    hidden, width, local, rows, clamp = 256, 128, 2, 6, 10.0
    sizes = (context.num_ranks * local, 16, 2, hidden, width)
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(context.group, *sizes)
    generator = torch.Generator().manual_seed(context.rank)
    x = torch.randn(rows, hidden, generator=generator).to(context.device, BF16)
    weights, ids = torch.rand(rows, sizes[0], generator=generator).to(context.device).topk(2)
    places = (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
    deep_gemm.mega_moe_pre_dispatch_sm90(x, ids.int(), weights, *places, num_tokens=rows)
    l1, l2 = (
        (packed.to(context.device), scales.to(context.device))
        for packed, scales in four_bit_weights(local, hidden, width, context.rank)
    )
    encoded = deep_gemm.transform_weights_for_mega_moe_sm90_fp4(l1, l2)
    options: dict[str, Any] = {"recipe": (1, 1, 32), "activation": "swiglu", "activation_clamp": clamp}
    y = torch.full((rows, hidden), torch.nan, dtype=BF16, device=context.device)
    stats = torch.zeros(local, dtype=torch.int32, device=context.device)
    deep_gemm.fp8_fp4_mega_moe(y, *encoded, buffer, stats, **options, fast_math=True)
    names = ("num_experts", "max_tokens_per_rank", "top_k", "hidden", "intermediate")
    with tl.MegaMoE(
        context.group,
        **dict(zip(names, sizes, strict=True)),  # type: ignore[arg-type]
        activation_clamp=clamp,
        backend="nvlink" if context.device.type == "cuda" else "composed",
        device=context.device,
    ) as ours:
        ours.load_weights(l1[0], l2[0], l1[1], l2[1], four_bits=tl.MXFP4)
        assert y.equal(ours(x, ids, weights))
        assert "scales of w1 encoded exactly" in ours.describe()
    assert y.any()
    assert stats.sum() > 0 or context.num_ranks > 2
    buffer.destroy()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("check", [check_program, check_server, check_four_bits])
def test_a_program_for_deep_gemm(ranks: Ranks, check: Any) -> None:
    if ranks.device == "cuda" and not HOPPER:
        pytest.skip("its kernels need Hopper GPUs")
    ranks.run(check)


PROGRAM = """
import torch

import deep_gemm
from deep_gemm.testing import bench_kineto, calc_diff, get_arch_major
from deep_gemm.utils import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.utils.dist import dist_print, init_dist, uneven_all_gather


def work(local_rank, num_local_ranks):
    rank, num_ranks, group = init_dist(local_rank, num_local_ranks)
    assert (rank, num_ranks, torch.get_default_dtype()) == (local_rank, 2, torch.float32)
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(group, 2, 4, 1, 128, 128)
    w1, w2 = (per_block_cast_to_fp8(torch.randn(n, 128) / 8, use_ue8m0=False) for n in (256, 128))
    l1, l2 = deep_gemm.transform_weights_for_mega_moe_sm90(*([each[None] for each in pair] for pair in (w1, w2)))
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    for place, given in zip((buffer.x, buffer.x_sf), per_token_cast_to_fp8(x, use_ue8m0=False)):
        place[:3] = given
    buffer.topk_idx[:3, 0] = torch.tensor([rank, 1 - rank, -1])
    buffer.topk_weights[:3] = 1
    y = torch.full((3, 128), torch.nan, dtype=torch.bfloat16)
    deep_gemm.fp8_mega_moe(y, l1, l2, buffer)
    assert calc_diff(y, y) == 0 and y[0].any() and not y[2].any()
    assert uneven_all_gather(y, group=group).shape == (6, 128)
    dist_print(f"arch {get_arch_major()}, SMs {deep_gemm.get_num_sms()}", once_in_node=True)
    buffer.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, args=(2,), nprocs=2)
"""


@pytest.mark.slow
def test_a_program_that_imports_deep_gemm(tmp_path: Path) -> None:
    """The module of the documentation, in processes that the program starts."""
    page = (Path(__file__).parents[2] / "docs/how-to/serve.md").read_text()
    module = page.split("deep_gemm.py\n", 1)[1].split("```", 1)[0]
    (tmp_path / "deep_gemm.py").write_text(module)
    (tmp_path / "program.py").write_text(PROGRAM)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    path = os.pathsep.join([str(tmp_path), str(Path(tl.__file__).parents[1])])
    variables = {**os.environ, "MASTER_PORT": str(port), "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", tmp_path / "program.py"],
        env=variables,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "arch 0, SMs 0\n"), done.stderr
