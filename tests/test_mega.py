"""MegaMoE against torch: the same quantisation points, products in float64, routes added in ascending k."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.nn import functional

import tokenloom as tl
from tests.conftest import Ranks
from tests.small_kernels import needs_nvrtc
from tokenloom import quant
from tokenloom.jit import compiler
from tokenloom.jit.compiler import Resources
from tokenloom.kernels.mega.launch import OwnTokens, meet_ranks_spec, route_lists_spec, sum_routes_spec
from tokenloom.launch import RankContext
from tokenloom.plan import Plan
from tokenloom.tune.mega import SCHEDULES

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
WHOLE_LIMIT, ROW_LIMIT = 1e-3, 5e-3
"""Of 1 - 2 sum(xy) / sum(x^2 + y^2), over all values and for the worst row: sums of float32 and of float64 quantise
some activations to neighbouring codes."""


@dataclass(frozen=True)
class Case:
    """One layer and its tokens, for a group of any size.

    Attributes:
        why: what goes wrong without this case.
        tokens: of rank r: ``tokens[r % len(tokens)]``.
        pick: how experts are drawn: "distinct", "repeats", "one expert" (the last), "none".
        unused: share of -1.
        quantised: x is FP8 already.
        shared: number of shared experts.
    """

    why: str
    tokens: tuple[int, ...] = (70, 33, 0, 64)
    experts_per_rank: int = 4
    hidden: int = 512
    intermediate: int = 256
    top_k: int = 2
    pick: str = "distinct"
    unused: float = 0.0
    clamp: float | None = None
    powers: bool = False
    fast_math: bool = True
    quantised: bool = False
    shared: int = 0


CASES = {
    "plain": Case("the usual case: unequal tokens"),
    "fp8": Case("x and its scales come as they are sent", quantised=True),
    "no wide scales": Case("rows of scales that are no multiples of 16 bytes", hidden=384, intermediate=640),
    "one block": Case("K of a GEMM is one block", hidden=128, intermediate=128),
    "top8": Case("eight terms in a sum, several experts of a token on one rank", top_k=8, experts_per_rank=8),
    "top32": Case("the largest K", top_k=32, pick="repeats", tokens=(9, 5)),
    "repeats": Case("the same expert twice is two routes of one row", pick="repeats", top_k=4, experts_per_rank=1),
    "masked": Case("-1 in any place, whole rows of -1", unused=0.6, top_k=3),
    "all masked": Case("tokens without routes are 0", pick="none"),
    "one expert": Case(
        "all routes of all tokens on one expert: the largest list", pick="one expert", tokens=(150, 90)
    ),
    "many experts": Case("most experts are empty", experts_per_rank=40, tokens=(5, 3)),
    "no tokens": Case("nobody has any", tokens=(0,)),
    "one token": Case("M = 1", tokens=(1,)),
    "many tokens": Case("several tiles of an expert", tokens=(700, 500)),
    "clamp": Case("gates and ups are limited", clamp=0.7),
    "powers of two": Case("scales of x and of activations", powers=True),
    "exact functions": Case("the other exponential", fast_math=False, clamp=20.0),
    "shared expert": Case("every token goes to it, those without routes too", unused=0.5, shared=1),
    "two shared experts": Case("x as it is sent, of odd sizes", quantised=True, shared=2, hidden=384, top_k=30),
    "shared and tiles": Case(
        "several tiles of a shared expert", shared=1, powers=True, clamp=1.0, tokens=(300, 0, 129)
    ),
    "as real models": Case("wide rows", hidden=7168, intermediate=2048, experts_per_rank=2, top_k=2, tokens=(40, 130)),
}


@dataclass(frozen=True)
class Layer:
    """Weights of all experts, shared ones last, and inputs of all ranks."""

    w1: torch.Tensor
    w1_scales: torch.Tensor
    w2: torch.Tensor
    w2_scales: torch.Tensor
    xs: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]


def make_layer(case: Case, num_ranks: int, device: torch.device, seed: int = 0) -> Layer:
    generator = torch.Generator(device).manual_seed(seed)
    experts, width, hidden = num_ranks * case.experts_per_rank, case.intermediate, case.hidden

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    # Blocks of many magnitudes, so that a scale of the wrong block shows; gates in silu's curved part.
    w1 = randn(experts + case.shared, 2 * width, hidden) / hidden**0.5
    w1 *= randn(len(w1), 2 * width // 128, hidden // 128).exp().repeat_interleave(128, 1).repeat_interleave(128, 2)
    w2 = randn(experts + case.shared, hidden, width) / width**0.5
    w2 *= randn(len(w2), hidden // 128, width // 128).exp().repeat_interleave(128, 1).repeat_interleave(128, 2)
    xs, all_ids, weights = [], [], []
    for rank in range(num_ranks):
        tokens = case.tokens[rank % len(case.tokens)]
        xs.append((randn(tokens, hidden) * randn(tokens, 1).exp()).to(BF16))
        draws = torch.rand(tokens, max(experts, case.top_k), generator=generator, device=device)
        ids = draws.argsort(1)[:, : case.top_k] % experts
        if case.pick == "repeats":
            ids = (draws[:, : case.top_k] * experts).long()
        if case.pick in ("one expert", "none"):
            ids = torch.full_like(ids, experts - 1 if case.pick == "one expert" else -1)
        ids[torch.rand(ids.shape, generator=generator, device=device) < case.unused] = -1
        all_ids.append(ids)
        weights.append(torch.rand(ids.shape, generator=generator, device=device) + 0.1)
    return Layer(*quant.quantize_fp8_blocks(w1), *quant.quantize_fp8_blocks(w2), xs, all_ids, weights)


def dense(w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return w.double() * scales.double().repeat_interleave(128, -2).repeat_interleave(128, -1)


def expected(case: Case, layer: Layer, rank: int) -> torch.Tensor:
    """Of one rank's tokens."""
    x, ids, weights = layer.xs[rank], layer.ids[rank], layer.weights[rank]
    shared = torch.arange(len(layer.w1) - case.shared, len(layer.w1), device=x.device).expand(len(x), -1)
    ids, weights = torch.cat([ids, shared], 1), torch.cat([weights, torch.ones_like(shared, dtype=FP32)], 1)
    x = quant.dequantize_fp8(*quant.quantize_fp8(x, power_of_two_scales=case.powers)).double()
    rows = torch.zeros(*ids.shape, case.hidden, dtype=BF16, device=x.device)
    for e in ids.unique().tolist():
        if e < 0:
            continue
        token, k = (ids == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ dense(layer.w1[e], layer.w1_scales[e]).T).chunk(2, -1)
        if case.clamp is not None:
            gate, up = gate.clamp(max=case.clamp), up.clamp(-case.clamp, case.clamp)
        act = (functional.silu(gate) * up * weights[token, k, None]).float()
        act = quant.dequantize_fp8(*quant.quantize_fp8(act, power_of_two_scales=case.powers)).double()
        rows[token, k] = (act @ dense(layer.w2[e], layer.w2_scales[e]).T).to(BF16)
    total = torch.zeros(len(x), case.hidden, device=x.device)
    for k in range(ids.shape[1]):
        total = torch.where(ids[:, k, None] >= 0, total + rows[:, k].float(), total)
    return total.to(BF16)


def difference(got: torch.Tensor, want: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    got, want = got.double(), want.double()
    norm = (got.square() + want.square()).sum(dim)
    return torch.where(norm > 0, 1 - 2 * (got * want).sum(dim) / norm, 0)


def make_mega(context: RankContext, case: Case, layer: Layer) -> tl.MegaMoE:
    mega = tl.MegaMoE(
        context.group,
        len(layer.w1) - case.shared,
        case.hidden,
        case.intermediate,
        case.top_k,
        max(1, *(len(x) for x in layer.xs)),
        activation_clamp=case.clamp,
        fast_math=case.fast_math,
        power_of_two_scales=case.powers,
        num_shared_experts=case.shared,
        device=context.device,
    )
    mine = torch.arange(context.rank * case.experts_per_rank, (context.rank + 1) * case.experts_per_rank)
    mine = torch.cat([mine, torch.arange(len(layer.w1) - case.shared, len(layer.w1))]).to(context.device)

    def of_this_rank(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(torch.uint8)[mine].view(tensor.dtype)

    mega.load_weights(*(of_this_rank(w) for w in (layer.w1, layer.w2, layer.w1_scales, layer.w2_scales)))
    return mega


def inputs(case: Case, layer: Layer, rank: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    x = layer.xs[rank]
    given = quant.quantize_fp8(x, power_of_two_scales=case.powers) if case.quantised else x
    return given, layer.ids[rank], layer.weights[rank]


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.dtype, got.shape) == (BF16, want.shape)
    assert not got.isnan().any()
    if got.numel():
        assert difference(got, want) < WHOLE_LIMIT
        assert (difference(got, want, -1) < ROW_LIMIT).all()


def check_case(context: RankContext, name: str) -> None:
    case = CASES[name]
    layer = make_layer(case, context.num_ranks, context.device)
    with make_mega(context, case, layer) as mega:
        given = inputs(case, layer, context.rank)
        stats = torch.ones(case.experts_per_rank, dtype=torch.int32, device=context.device)
        out = mega(*given, expert_stats=stats)
        mega.check()
        assert_near(out, expected(case, layer, context.rank))
        routes = torch.cat([ids.flatten() for ids in layer.ids])
        first = context.rank * case.experts_per_rank
        counts = [int((routes == first + e).sum()) + 1 for e in range(case.experts_per_rank)]
        assert stats.tolist() == counts
        for _, schedule in SCHEDULES:
            mega.schedule = schedule
            for _ in range(2):
                assert torch.equal(mega(*given), out)
        mega.check()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_mega(hoppers: Ranks, name: str) -> None:
    hoppers.run(check_case, name)


def check_changing_routing(context: RankContext) -> None:
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


@pytest.mark.gpu
def test_replays_with_changing_routing(hoppers: Ranks) -> None:
    """Counts, lists and places are made anew in each replay."""
    hoppers.run(check_changing_routing)


def check_faults(context: RankContext, fault: str) -> None:
    case = Case("", tokens=(30, 20))
    layer = make_layer(case, context.num_ranks, context.device)
    x, ids, weights = inputs(case, layer, context.rank)
    want = expected(case, layer, context.rank)
    with make_mega(context, case, layer) as mega:
        assert_near(mega(x, ids, weights), want)
        mega.check()
        if context.rank == 0:
            bad: dict[str, Any] = {"expert_stats": torch.zeros(1, device=context.device)} if fault == "stats" else {}
            with pytest.raises(tl.TokenloomError, match="expert_stats is" if fault == "stats" else "x is"):
                mega(x if fault == "stats" else x[:, :256], ids, weights, **bad)
        else:
            out = mega(x, ids, weights)
            with pytest.raises(tl.PeerError, match="rank 0"):
                mega.check()
            assert out.isnan().all()
        mega.check()  # raised once
        assert_near(mega(x, ids, weights), want)
        mega.check()


@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["stats", "x"])
def test_a_fault_on_one_rank(hoppers: Ranks, fault: str) -> None:
    """An error there, a PeerError elsewhere, NaN until then; the next call is all ranks' again, though a call of the
    layer is two of the communicator."""
    hoppers.run(check_faults, fault)


def check_new_weights(context: RankContext) -> None:
    case = Case("", tokens=(30, 20))
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
            mega.load_weights(good[0], good[1].to(BF16), *good[2:])  # a copy would convert it
        with pytest.raises(tl.DtypeMismatch, match=r"^w1 is torch\.int32"):
            mega.load_weights(good[0].to(torch.int32), good[1].to(torch.int32))
        mega.load_weights(*good)
        graph.replay()
        weights = {name: getattr(second, name) for name in ("w1", "w1_scales", "w2", "w2_scales")}
        assert_near(out, expected(case, replace(first, **weights), context.rank))
        mega.check()


@pytest.mark.gpu
def test_a_graph_uses_weights_that_are_loaded_later(hoppers: Ranks) -> None:
    hoppers.run(check_new_weights)


SPECS = {
    "real model": (Plan(8, 256, 7168, 8, 8192), 2048, 0, torch.float8_e4m3fn),
    "one expert": (Plan(1, 3, 128, 1, 1), 128, 0, torch.bfloat16),
    "many ranks": (Plan(32, 64, 384, 32, 9), 256, 0, torch.float32),
    "shared": (Plan(8, 256, 7168, 8, 8192), 2048, 1, torch.bfloat16),
    "shared FP32": (Plan(2, 8, 384, 30, 9), 256, 2, torch.float32),
    "shared FP8": (Plan(2, 8, 384, 30, 9), 256, 2, torch.float8_e4m3fn),
}


@needs_nvrtc
@pytest.mark.parametrize("name", SPECS)
def test_kernels_compile(name: str) -> None:
    plan, intermediate, shared, dtype = SPECS[name]
    lists = route_lists_spec(plan, intermediate, shared, OwnTokens(dtype))
    for spec, _ in (lists, meet_ranks_spec(plan), sum_routes_spec(plan, shared)):
        _, log = compiler.compile_kernel(spec)
        needs = Resources.from_log(log)
        assert (needs.stack_bytes, needs.spill_bytes) == (0, 0), log
        assert needs.registers * spec.threads <= 65536
