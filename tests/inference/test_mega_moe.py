"""MegaMoE against the reference: its kernels on GPUs, and backend "composed" on CPUs too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.conftest import HOPPER, Ranks
from tests.support.mega_cases import (
    CASES,
    PADDED_CASES,
    ROW_CASES,
    Case,
    Layer,
    assert_near,
    expected,
    inputs,
    make_layer,
    make_mega,
)
from tests.support.on_ranks import on_ranks
from tokenloom import reference
from tokenloom.backends.peers.buffers import control_layout, fused_layout
from tokenloom.errors import BackendUnavailable
from tokenloom.inference.expert_memory import ExpertMemory
from tokenloom.inference.schedules import SCHEDULES as MEASURED
from tokenloom.inference.schedules import MegaSchedule
from tokenloom.plan import RECIPES, Plan
from tokenloom.runtime.processes import RankContext

pytestmark = pytest.mark.slow_on(4)

SCHEDULES = (*(schedule for *_, schedule in MEASURED), MegaSchedule(send_sms=2, gemm2_sms=64))
"""Those that calls take, and one that users may ask for."""


def check_case(
    context: RankContext, name: str, backend: str = "nvlink", tokens: tuple[int, ...] | None = None
) -> None:
    case = CASES[name] if tokens is None else replace(CASES[name], tokens=tokens)
    layer = make_layer(case, context.num_ranks, context.device)
    with make_mega(context, case, layer, backend) as mega:
        given = inputs(case, layer, context.rank)
        stats = torch.ones(case.experts_per_rank, dtype=torch.int32, device=context.device)
        out = mega(*given, expert_stats=stats)
        mega.check()
        assert_near(out, expected(case, layer, context.rank))
        routes = torch.cat([ids.flatten() for ids in layer.ids])
        first = context.rank * case.experts_per_rank
        counts = [int((routes == first + e).sum()) + 1 for e in range(case.experts_per_rank)]
        assert stats.tolist() == counts
        x, ids, weights = given
        for schedule in (SCHEDULES[context.rank % len(SCHEDULES)], *SCHEDULES[1:]):  # first, ranks differ
            mega.schedule = SCHEDULES[0]
            mega(x, ids, -weights)  # what it leaves behind is not what comes next
            mega.schedule = schedule
            for _ in range(2):
                assert torch.equal(mega(*given), out)
        if backend == "nvlink":
            assert len(mega.comm.engine._backend._buffers._buffers) == 1  # type: ignore[attr-defined]  # nothing is there twice
        mega.check()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_mega(hoppers: Ranks, name: str) -> None:
    hoppers.run(check_case, name)


COMPOSED = (
    "plain",
    "fp8",
    "no wide scales",
    "top32",
    "repeats",
    "masked",
    "all masked",
    "no tokens",
    "clamp",
    "powers of two",
    "shared expert",
    "two shared experts",
    "gpt_oss",
    "biases",
    "geglu",
    "clamped geglu_tanh",
    "gated relu2",
    *(name for name in ROW_CASES if name not in ("by row, many tokens", "by row, as real models")),
    *PADDED_CASES,
)


@pytest.mark.sampled(8)
@pytest.mark.slow_on(1, 4)
@pytest.mark.parametrize("name", COMPOSED)
def test_composed(ranks: Ranks, name: str) -> None:
    if ranks.device == "cuda" and not HOPPER:
        pytest.skip("its GEMMs need Hopper GPUs")
    ranks.run(check_case, name, "composed")


@on_ranks("four")
def test_nodes_change_nothing(context: RankContext) -> None:
    """Four ranks as two nodes of two: rows of GEMM2 come home one by one, so all bits are those of one node."""
    case = CASES["two shared experts"]
    layer = make_layer(case, context.num_ranks, context.device)
    given, outs = inputs(case, layer, context.rank), []
    for ranks_per_node in (None, 2):
        with make_mega(context, case, layer, "composed", ranks_per_node=ranks_per_node) as mega:
            assert ("backend network" in mega.describe()) == (ranks_per_node == 2)
            outs.append(mega(*given))
            mega.check()
    assert torch.equal(*outs)
    assert outs[0].any() == (len(given[1]) > 0)


def call_to_its_end(mega: tl.MegaMoE, given: Any) -> None:
    """On GPUs what becomes of a call is known once its kernels have run."""
    mega(*given)
    mega.check()


@on_ranks
def test_a_gemm_that_fails(context: RankContext) -> None:
    """Between dispatch and combine: the others hear of it at once, and the layer works on."""
    case = CASES["plain"]
    layer = make_layer(case, context.num_ranks, context.device)
    with make_mega(context, case, layer, "composed") as mega:
        given = inputs(case, layer, context.rank)
        want = mega(*given)
        if context.rank == 0:
            weights, experts = mega.weights, mega._experts
            experts.use_weights((weights[0][:, :128], *weights[1:]), mega.biases)
            with pytest.raises(tl.ShapeMismatch, match="w1"):
                mega(*given)
            experts.use_weights(weights, mega.biases)
        else:
            with pytest.raises(tl.PeerError, match="rank 0"):
                call_to_its_end(mega, given)
        assert torch.equal(mega(*given), want)


def check_many_calls(context: RankContext, calls: int = 1000) -> None:
    case = Case("", tokens=(64, 40, 0, 64), experts_per_rank=8, top_k=4, shared=1)
    layer = make_layer(case, context.num_ranks, context.device)
    generator = torch.Generator(context.device).manual_seed(context.rank)
    sizes = torch.randint(0, 65, (calls,), generator=torch.Generator().manual_seed(context.rank)).tolist()
    with make_mega(context, case, layer) as mega:
        given = inputs(case, layer, context.rank)
        want = mega(*given)
        for i, tokens in enumerate(sizes):
            mega.schedule = SCHEDULES[i // 3 % len(SCHEDULES)]
            x = torch.randn(tokens, case.hidden, generator=generator, device=context.device).to(torch.bfloat16)
            ids = torch.randint(-1, 8 * context.num_ranks, (tokens, 4), generator=generator, device=context.device)
            mega(x, ids, torch.rand(tokens, 4, generator=generator, device=context.device))
            if i % 20 == 19:
                assert torch.equal(mega(*given), want)
        mega.check()


@pytest.mark.gpu
@pytest.mark.alone  # contexts that share a GPU take turns: every wait for a peer is a turn of all others
def test_a_thousand_calls_on_one_buffer(hoppers: Ranks) -> None:
    """Tokens, routing and schedule change from call to call; the same input has the same bits all along."""
    hoppers.run(check_many_calls)


def check_kept(context: RankContext, backend: str) -> None:
    case = replace(CASES["by row, four bits"], tokens=(150, 40))
    layer = make_layer(case, context.num_ranks, context.device)
    outs = {}
    for keep in ("fp8", "four_bits", "both"):
        with make_mega(context, replace(case, keep=keep), layer, backend) as mega:
            outs[keep] = mega(*inputs(case, layer, context.rank))
            mega.check()
    assert torch.equal(outs["fp8"], outs["four_bits"])
    assert torch.equal(outs["fp8"], outs["both"])


def test_four_bits_have_the_bits_of_fp8(ranks: Ranks) -> None:
    if ranks.device == "cuda" and not HOPPER:
        pytest.skip("its GEMMs need Hopper GPUs")
    ranks.run(check_kept, "composed")


@pytest.mark.gpu
def test_four_bits_in_kernels_of_the_layer(hoppers: Ranks) -> None:
    hoppers.run(check_kept, "nvlink")


def check_fewer_tokens(context: RankContext, case: Case, fewer: tuple[int, ...]) -> None:
    layer = make_layer(case, context.num_ranks, context.device)
    with make_mega(context, case, layer) as mega:
        given = inputs(case, layer, context.rank)
        out = mega(*given)
        for number in fewer:
            assert torch.equal(mega(*(each[:number] for each in given)), out[:number]), number
        mega.check()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", "by row, many tokens"])
def test_the_same_bits_among_fewer_tokens(hoppers: Ranks, name: str) -> None:
    """What becomes of a token does not depend on those beside it. Recipe "row" has other tiles for each number."""
    hoppers.run(check_fewer_tokens, replace(CASES[name], tokens=(700,)), (1, 40, 150, 250))


@on_ranks("hoppers")
@pytest.mark.gpu
def test_replays_with_changing_routing(context: RankContext) -> None:
    """Counts, lists and places are made anew in each replay."""
    case = Case("", tokens=(50, 20), top_k=3)
    layers = [make_layer(case, context.num_ranks, context.device, seed) for seed in range(6)]
    with make_mega(context, case, layers[0]) as mega:
        given = inputs(case, layers[0], context.rank)
        mega(*given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = mega(*given)
        for seed, layer in enumerate(layers):
            routed = Layer(*(getattr(layers[0], w) for w in ("w1", "w1_scales", "w2", "w2_scales")),
                           layer.xs, layer.ids, layer.weights)  # fmt: skip
            for tensor, value in zip(given, inputs(case, routed, context.rank), strict=True):
                tensor.copy_(value)
            if seed % 3 == 2:
                mega(*given)  # an eager call between replays
            graph.replay()
            assert_near(out, expected(case, routed, context.rank))
        mega.check()


FAULTS = {
    "stats": "expert_stats is",
    "x": "x is",
    "weights": "topk_weights is None",
    "first call": "expert_stats is",
}


def check_faults(context: RankContext, fault: str) -> None:
    case = Case("", tokens=(30, 20))
    layer = make_layer(case, context.num_ranks, context.device)
    x, ids, weights = inputs(case, layer, context.rank)
    want = expected(case, layer, context.rank)
    with make_mega(context, case, layer) as mega:
        if fault != "first call":
            assert_near(mega(x, ids, weights), want)
            mega.check()
        if context.rank == 0:
            expert_stats = torch.zeros(1, device=context.device) if fault in ("stats", "first call") else None
            with pytest.raises(tl.TokenloomError, match=FAULTS[fault]):
                mega(x[:, :256] if fault == "x" else x, ids, None if fault == "weights" else weights, expert_stats)
        elif fault == "first call":  # buffers are made together
            with pytest.raises(tl.PeerError, match="rank 0"):
                mega(x, ids, weights)
        else:
            out = mega(x, ids, weights)
            with pytest.raises(tl.PeerError, match="rank 0"):
                mega.check()
            assert out.isnan().all()
        mega.check()  # raised once
        assert_near(mega(x, ids, weights), want)
        mega.check()


@pytest.mark.gpu
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_one_rank(hoppers: Ranks, fault: str) -> None:
    """An error there, a PeerError elsewhere, NaN until then; the next call is all ranks' again, though a call of the
    layer is two of the communicator."""
    hoppers.run(check_faults, fault)


@on_ranks("hoppers")
@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(512, 256), (144, 80)], ids=["whole", "padded"])
def test_a_graph_uses_weights_that_are_loaded_later(context: RankContext, widths: tuple[int, int]) -> None:
    case = Case("", tokens=(30, 20), hidden=widths[0], intermediate=widths[1])
    first, second = (make_layer(case, context.num_ranks, context.device, seed) for seed in (0, 1))
    given = inputs(case, first, context.rank)
    with make_mega(context, case, first) as mega:
        mega(*given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = mega(*given)
        mine = slice(context.rank * case.experts_per_rank, (context.rank + 1) * case.experts_per_rank)
        good = (second.w1[mine], second.w2[mine], second.w1_scales[mine], second.w2_scales[mine])
        with pytest.raises(tl.DtypeMismatch, match=r"^w2 is torch\.bfloat16"):
            mega.load_weights(good[0], good[1].to(torch.bfloat16), *good[2:])  # a copy would convert it
        with pytest.raises(tl.DtypeMismatch, match=r"^w1 is torch\.int32"):
            mega.load_weights(good[0].to(torch.int32), good[1].to(torch.int32))
        mega.load_weights(*good)
        graph.replay()
        weights = {name: getattr(second, name) for name in ("w1", "w1_scales", "w2", "w2_scales")}
        assert_near(out, expected(case, replace(first, **weights), context.rank))
        mega.check()


def test_buffers_of_the_reference_layer() -> None:
    """Sized for any routing of 8192 tokens on 8 ranks: a row for each route, where it is multiplied."""
    plan = Plan(8, 256, 7168, 8, 8192)
    routes = plan.worst_case_rows("expert")
    memory = ExpertMemory(plan, 2048, num_shared_experts=0, recipe="block")
    assert (
        memory.num_bytes
        + fused_layout(plan, 1, routes, num_shared_experts=0, recipe="block").total_bytes
        + control_layout(plan).total_bytes
        < 6.1e9
    )
    assert memory.num_places == routes == 8 * 8192 * 8
    assert memory.sizes["activations"][0] == (routes, 2048)


# -- forms of experts ---------------------------------------------------------------------------------------------


def small_mega(**options: Any) -> tl.MegaMoE:
    sizes = {"num_experts": 2, "hidden": 256, "intermediate": 128, "top_k": 1, "max_tokens_per_rank": 4}
    return tl.MegaMoE(None, backend="composed", **sizes, **options)


def small_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"w1": (2, 256, 256), "w2": (2, 256, 128), "w1_bias": (2, 256), "w2_bias": (2, 256)}
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}


def outputs(mega: tl.MegaMoE) -> torch.Tensor:
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    return mega(x, torch.tensor([[0], [1], [0], [-1]]), torch.full((4, 1), 0.5))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_layouts_of_weights(transposed: bool, interleaved: bool) -> None:
    given = small_weights()
    with small_mega(activation="swigluoai") as mega:
        mega.load_weights(**given)
        wanted = outputs(mega)
        assert wanted[3].abs().max() == 0
        if interleaved:
            for name in ("w1", "w1_bias"):
                given[name] = given[name].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        if transposed:
            given = {
                name: each.transpose(1, 2).contiguous() if each.dim() == 3 else each for name, each in given.items()
            }
        mega.load_weights(**given, weight_layout=tl.WeightLayout(transposed, interleaved))
        assert torch.equal(outputs(mega), wanted)


def test_transposed_fp8() -> None:
    """Scales are transposed with the blocks that they are of."""
    given = small_weights()
    w1, w1_scales = tl.quantize_fp8_blocks(given["w1"])
    w2, w2_scales = tl.quantize_fp8_blocks(given["w2"])
    turned = [
        tensor.view(torch.uint8).transpose(1, 2).contiguous().view(tensor.dtype)
        if tensor.itemsize == 1
        else tensor.transpose(1, 2).contiguous()
        for tensor in (w1, w2, w1_scales, w2_scales)
    ]
    with small_mega() as mega:
        mega.load_weights(w1, w2, w1_scales, w2_scales)
        wanted = outputs(mega)
        mega.load_weights(*turned, weight_layout=tl.WeightLayout(transposed=True))
        assert torch.equal(outputs(mega), wanted)
        with pytest.raises(tl.InvalidArgument, match="w1 is FP8 and interleaved: its scales are of gates and ups"):
            mega.load_weights(w1, w2, w1_scales, w2_scales, weight_layout=tl.WeightLayout(interleaved=True))


def of_checkpoint(kind: str) -> dict[str, torch.Tensor]:
    """FP8 weights and scales, as checkpoints of some kind have them."""
    found: dict[str, torch.Tensor] = {}
    for name, w in list(small_weights().items())[:2]:
        if kind == "channels":
            found[name], scales = tl.quantize_fp8(w, recipe="row")
        elif kind == "experts":
            scales = w.float().abs().amax((1, 2)) / 448
            found[name] = (w / scales[:, None, None]).to(torch.float8_e4m3fn)
        else:
            found[name], scales = tl.quantize_fp8_blocks(w)
            if kind == "E8M0":
                scales = torch.full_like(scales, 2.0**-7)
        found[f"{name}_scales"] = scales.to(torch.float8_e8m0fnu) if kind == "E8M0" else scales
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("blocks", {"block": "as they were", "row": "rounded again: 512 of 512 channels"}),
        ("channels", {"block": "rounded again: 512 of 512 channels", "row": "as they were"}),
        ("experts", {"block": "repeated", "row": "repeated"}),
        ("E8M0", {"block": "as they were", "row": "rebased exactly"}),
        ("bfloat16", {"block": "quantised", "row": "quantised"}),
    ],
)
def test_weights_of_checkpoints(kind: str, recipe: str, said: dict[str, str]) -> None:
    """The layer says how the scales came about, and computes with them. Nothing is rounded again unasked."""
    given = small_weights() if kind == "bfloat16" else of_checkpoint(kind)
    given = {name: tensor for name, tensor in given.items() if "bias" not in name}
    with small_mega(recipe=recipe) as mega:
        if "again" in said[recipe]:
            with pytest.raises(
                tl.InvalidArgument, match=r"^w1 has scales of recipe=.*pass round_again=True to allow it"
            ):
                mega.load_weights(**given)
            assert not mega.weights
        mega.load_weights(**given, round_again="again" in said[recipe])
        assert f"scales of w1 {said[recipe]}" in mega.describe()
        assert f"recipe {recipe}:" in mega.describe()
        plain = [
            tl.weights_for(recipe, given[name], given.get(f"{name}_scales"), round_again=True) for name in ("w1", "w2")
        ]
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        (w1, w1_scales, _), (w2, w2_scales, _) = plain
        routes = (torch.tensor([[0], [1], [0], [-1]]), torch.full((4, 1), 0.5))
        assert_near(outputs(mega), reference.fused_layer(x, *routes, w1, w1_scales, w2, w2_scales, recipe=recipe))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_four_bits(interleaved: bool, recipe: str) -> None:
    """As gpt-oss has them: gates and ups in turns, groups apart. The layer computes with exactly these values."""
    generator = torch.Generator().manual_seed(0)
    plain: dict[str, torch.Tensor] = {}
    for name, (rows, depth) in {"w1": (256, 256), "w2": (256, 128)}.items():
        plain[name] = torch.randint(0, 256, (2, rows, depth // 32, 16), generator=generator).to(torch.uint8)
        plain[f"{name}_scales"] = torch.randint(117, 120, (2, rows, depth // 32), generator=generator).to(torch.uint8)
    given = dict(plain)
    if interleaved:
        for name in ("w1", "w1_scales"):
            given[name] = plain[name].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    with small_mega(recipe=recipe) as mega:
        mega.load_weights(**given, four_bits=tl.MXFP4, weight_layout=tl.WeightLayout(interleaved=interleaved))
        assert "scales of w1 encoded exactly; of w2 encoded exactly" in mega.describe()
        found = outputs(mega)
        (w1, w1_scales, _), (w2, w2_scales, _) = (
            tl.weights_for(recipe, plain[name], plain[f"{name}_scales"], four_bits=tl.MXFP4) for name in ("w1", "w2")
        )
        mega.load_weights(w1, w2, w1_scales, w2_scales)
        assert torch.equal(found, outputs(mega))
        assert found.abs().max() > 0
        with pytest.raises(tl.InvalidArgument, match="weights of four bits cannot be transposed"):
            mega.load_weights(**given, four_bits=tl.MXFP4, weight_layout=tl.WeightLayout(transposed=True))
        with pytest.raises(tl.ShapeMismatch, match=r"^w2 is \[2, 256, 256\].*, expected \[2, 256, 128\]"):
            mega.load_weights(**{**plain, "w2": plain["w1"], "w2_scales": plain["w1_scales"]}, four_bits=tl.MXFP4)


def four_bit_checkpoint(seed: int = 0) -> dict[str, torch.Tensor]:
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, (rows, depth) in {"w1": (256, 256), "w2": (256, 128)}.items():
        found[name] = torch.randint(0, 256, (2, rows, depth // 2), generator=generator).to(torch.uint8)
        found[f"{name}_scales"] = torch.randint(112, 120, (2, rows, depth // 32), generator=generator).to(torch.uint8)
    return found


def test_kept_weights() -> None:
    """One result, other memory. What is loaded later lies in the same memory, kept as before."""
    wanted = {}
    for keep, said in {
        "fp8": "weights in FP8: 0.000197 GB, 1 bytes a value",
        "four_bits": "weights in four bits: 0.000104 GB, 0.531 bytes a value",
        "both": "weights in FP8: 0.000197 GB, 1 bytes a value",  # nothing of this backend reads both
    }.items():
        with small_mega(recipe="row") as mega:
            for seed in (0, 1):
                mega.load_weights(**four_bit_checkpoint(seed), four_bits=tl.MXFP4, keep=keep)  # type: ignore[arg-type]
                kept = [each.data_ptr() for each in (*mega.weights, *mega._packed)]
                assert torch.equal(outputs(mega), wanted.setdefault(seed, outputs(mega))), keep
            assert said in mega.describe()
            assert [each.data_ptr() for each in (*mega.weights, *mega._packed)] == kept
            for other in ("fp8", "four_bits", "both"):
                if {keep, other} not in ({keep}, {"fp8", "both"}):
                    with pytest.raises(tl.InvalidArgument, match=f"were not kept as keep='{other}' says"):
                        mega.load_weights(**four_bit_checkpoint(), four_bits=tl.MXFP4, keep=other)  # type: ignore[arg-type]
            assert torch.equal(outputs(mega), wanted[1])
    assert not torch.equal(wanted[0], wanted[1])


def test_packed_weights_in_use() -> None:
    """Of one product or both."""
    with small_mega(recipe="row") as mega:
        mega.load_weights(**four_bit_checkpoint(), four_bits=tl.MXFP4)
        wanted, (w1, w1_scales, w2, w2_scales) = outputs(mega), mega.weights
        for first, second in ((tl.pack_weights(w1), w2), (w1, tl.pack_weights(w2)), map(tl.pack_weights, (w1, w2))):
            mega.use_weights(first, w1_scales, second, w2_scales)
            assert torch.equal(outputs(mega), wanted)
        mega.use_weights(w1, w1_scales, second, w2_scales)
        assert "weights in FP8 (w1) and four bits (w2): 0.000166 GB, 0.844 bytes a value" in mega.describe()
        with pytest.raises(tl.ShapeMismatch, match=r"w2 is \[2, 2, 2, 8704\], expected \[2, 2, 1, 8704\]"):
            mega.use_weights(w1, w1_scales, tl.pack_weights(w1), w2_scales)


def test_weights_that_cannot_be_kept() -> None:
    given = four_bit_checkpoint()
    packed = tl.pack_weights(torch.zeros(2, 256, 256).to(torch.float8_e4m3fn))
    with small_mega() as mega:
        with pytest.raises(tl.InvalidArgument, match="w1 is packed in four bits, which recipe='row' takes"):
            mega.use_weights(packed, torch.ones(2, 2, 2), packed[:, :, :1], torch.ones(2, 2, 1))
        with pytest.raises(tl.InvalidArgument, match="keep is 'int4', expected one of fp8, four_bits, both"):
            mega.load_weights(**given, four_bits=tl.MXFP4, keep="int4")  # type: ignore[arg-type]
        for keep in ("both", "four_bits"):
            with pytest.raises(tl.InvalidArgument, match=f"keep='{keep}' needs recipe='row', this layer has 'block'"):
                mega.load_weights(**given, four_bits=tl.MXFP4, keep=keep)  # type: ignore[arg-type]
    with small_mega(recipe="row") as mega:
        given["w2_scales"][0, 3] = torch.tensor([100, 112, 100, 100], dtype=torch.uint8)  # 12 octaves
        for keep in ("both", "four_bits"):
            with pytest.raises(tl.InvalidArgument, match=r"^3 of 2048 groups of 32 values of w2 are not E2M1.*='fp8'"):
                mega.load_weights(**given, four_bits=tl.MXFP4, keep=keep)  # type: ignore[arg-type]
        with pytest.raises(tl.InvalidArgument, match="keep='both' keeps E2M1 with a scale for 32 values"):
            mega.load_weights(**given, four_bits=tl.FourBits("int4"), keep="both")
        assert not mega.weights
        mega.load_weights(**given, four_bits=tl.MXFP4)


def test_scales_of_channels_are_not_transposed() -> None:
    """[L, 2I, 1] belongs to rows of weights in either layout; errors say which shapes they mean."""
    given = of_checkpoint("channels")
    with small_mega(recipe="row") as mega:
        mega.load_weights(**given)
        wanted, turned = outputs(mega), weights_transposed(given)
        turned["w1_scales"] = given["w1_scales"][..., None]
        mega.load_weights(**turned, weight_layout=tl.WeightLayout(transposed=True))
        assert torch.equal(outputs(mega), wanted)
        with pytest.raises(tl.ShapeMismatch, match="both once they are transposed, as weight_layout says"):
            mega.load_weights(**given, weight_layout=tl.WeightLayout(transposed=True))
        with pytest.raises(
            tl.ShapeMismatch, match=r"w1_scales is \[2, 2, 2\], a scale for each 128 x 128 values; recipe="
        ):
            mega.use_weights(*mega.weights[:1], torch.ones(2, 2, 2), *mega.weights[2:])


def weights_transposed(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    turned = {
        name: w.view(torch.uint8).transpose(1, 2).contiguous().view(w.dtype)
        for name, w in given.items()
        if len(name) == 2
    }
    return given | turned


def test_interleaved_fp8_with_scales_of_channels() -> None:
    given = of_checkpoint("channels")
    with small_mega(recipe="row") as mega:
        mega.load_weights(**given)
        wanted = outputs(mega)
        for name in ("w1", "w1_scales"):
            values = given[name].view(torch.uint8) if given[name].itemsize == 1 else given[name]
            turned = values.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).contiguous()
            given[name] = turned.view(given[name].dtype)
        mega.load_weights(**given, weight_layout=tl.WeightLayout(interleaved=True))
        assert torch.equal(outputs(mega), wanted)


def test_where_kernels_do_not_run() -> None:
    """One error with one cure, that of a MegaMoE. (No group means tensors on the CPU.)"""
    with pytest.raises(BackendUnavailable, match=r"needs a GPU.*; use backend='composed'$") as raised:
        tl.MegaMoE(None, num_experts=4, hidden=256, intermediate=128, top_k=2, max_tokens_per_rank=8)
    assert raised.value.__suppress_context__, "the communicator's own error has another cure"


def test_activations_that_are_refused() -> None:
    with pytest.raises(tl.InvalidArgument, match="activation is 'relu2', which has no gates"):
        small_mega(activation="relu2")
    with pytest.raises(tl.InvalidArgument, match=r"activation_clamp is 3.0, but the activation has limit=7.0 already"):
        small_mega(activation="swigluoai", activation_clamp=3.0)
    with (
        small_mega() as mega,
        pytest.raises(tl.InvalidArgument, match="activation is 'swish', expected an Activation"),
    ):
        mega.set_activation(activation="swish")


def test_biases_that_are_refused() -> None:
    given = small_weights()
    with small_mega() as mega:
        with pytest.raises(tl.ShapeMismatch, match=r"^w1_bias is \[2, 128\], expected \[2, 256\]"):
            mega.load_weights(**{**given, "w1_bias": given["w1_bias"][:, :128]})
        with pytest.raises(tl.DtypeMismatch, match=r"^w2_bias is torch.float64, expected float32"):
            mega.load_weights(**{**given, "w2_bias": given["w2_bias"].double()})
        mega.load_weights(given["w1"], given["w2"])
        with pytest.raises(tl.InvalidArgument, match="the weights loaded before had other biases"):
            mega.load_weights(**given)


MADE_WRONGLY: dict[str, tuple[dict[str, Any], type[tl.TokenloomError], str]] = {
    "backend": ({"backend": "fast"}, tl.PeerError, "backend is .fast., expected one of nvlink"),
    "intermediate": ({"intermediate": 100}, tl.PeerError, "intermediate is 100, expected a multiple of 16"),
    "another intermediate": ({"intermediate": 256}, tl.PlanMismatch, "intermediate"),
    "another hidden, padded alike": ({"hidden": 240}, tl.PlanMismatch, "hidden"),
    "another intermediate, padded alike": ({"intermediate": 112}, tl.PlanMismatch, "intermediate"),
    "shared experts": ({"num_shared_experts": 32}, tl.PeerError, "num_shared_experts is 32, expected 0 to 32 - top_k"),
    "activation": ({"activation": "relu2"}, tl.PeerError, "which has no gates"),
    "another activation": ({"activation": "geglu"}, tl.PlanMismatch, "activation"),
    "top_k": ({"top_k": "1"}, tl.TokenloomError, "top_k"),
    "clamp": ({"activation_clamp": "7"}, tl.PeerError, "activation_clamp is '7', expected a number above 0"),
    "recipe": ({"recipe": "rows"}, tl.PeerError, "recipe is 'rows', expected one of block, row"),
    "another recipe": ({"recipe": "row"}, tl.PlanMismatch, "recipe"),
    "schedule": ({"schedule": 32}, tl.PeerError, "schedule is 32, expected a MegaSchedule, or None"),
}


@on_ranks("several_ranks")
@pytest.mark.parametrize("what", MADE_WRONGLY)
def test_a_wrong_option_on_one_rank_is_an_error_on_all(context: RankContext, what: str) -> None:
    """At once: nobody waits for a layer that is not made."""
    wrong, others, said = MADE_WRONGLY[what]
    options: dict[str, Any] = {"hidden": 256, "intermediate": 128, "top_k": 1, "max_tokens_per_rank": 4}
    options |= {"num_experts": 4, "backend": "composed", "device": context.device}
    last = context.rank == context.num_ranks - 1
    with pytest.raises(tl.TokenloomError if last else others, match=said):
        tl.MegaMoE(context.group, **{**options, **(wrong if last else {})})
    with tl.MegaMoE(context.group, **options) as mega:  # ranks are in step
        assert mega.comm.num_ranks == context.num_ranks
