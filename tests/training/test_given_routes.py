"""Layers that are given routes, or a mask of their padding: values, gradients, losses, counts and what is recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tokenloom as tl
from tests.conftest import Ranks
from tests.support import emulator
from tests.support.layer_cases import (
    HIDDEN,
    NUM_EXPERTS,
    ROUTERS,
    TOP_K,
    LayerCase,
    make_inputs,
    make_layer,
)
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.processes import RankContext
from tokenloom.training.shards import local_part

FP32 = torch.float32
CASE = LayerCase(router_grad="sum")
GIVEN = ("own choice", "live weights", "given weights")


def step(layer: tl.ExpertParallelMoE, x: torch.Tensor, factors: torch.Tensor, **given: Any) -> dict[str, torch.Tensor]:
    """All that a step gives here: of a weight that all ranks share, this rank's part."""
    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    layer.expert_counts.zero_()
    out, aux_loss = layer(leaf, **given)
    ((out * factors).sum() + aux_loss / layer.comm.num_ranks).backward()
    assert leaf.grad is not None
    grads = {name: local_part(each.grad) for name, each in layer.named_parameters() if each.grad is not None}
    return {
        **grads,
        "out": out.detach(),
        "aux_loss": aux_loss.detach(),
        "x": leaf.grad,
        "counts": layer.expert_counts.clone(),
    }


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


# -- given routes -------------------------------------------------------------------------------------------


def replay(context: RankContext, case: LayerCase) -> None:
    """Of its own routes a layer makes the same step, bit for bit; of others, one of their weights and counts."""
    layer = make_layer(case, context.group)
    x, factors = (given[context.rank].to(context.device) for given in make_inputs(case, context.num_ranks))
    with torch.no_grad(), layer.record_routing() as routes:
        layer(x)
    ((ids, weights),) = routes
    assert ids.shape == weights.shape == (len(x), TOP_K)
    want = step(layer, x, factors)
    assert_same(step(layer, x, factors, topk_ids=ids), want)

    # The router stands still for weights that are given, but not for its losses.
    found = step(layer, x, factors, topk_ids=ids.int(), topk_weights=weights)
    for name in ("out", "aux_loss", "counts", "experts.w1", "shared_w1"):
        assert torch.equal(found[name], want[name]), name
    leaf = weights.clone().requires_grad_()
    out, _ = layer(x, topk_ids=ids, topk_weights=leaf)
    (grad,) = torch.autograd.grad((out * factors).sum(), leaf)
    assert grad.any() or not len(x)

    others = (ids + 1) % NUM_EXPERTS
    moved = step(layer, x, factors, topk_ids=others)
    if case.balance_coef:
        assert moved["counts"].sum() == want["counts"].sum()
        assert torch.equal(moved["counts"], want["counts"].roll(1))


@pytest.mark.parametrize("router", ROUTERS)
def test_routes_given_again(ranks: Ranks, router: str) -> None:
    ranks.run(replay, replace(CASE, router=router))


def test_routes_given_again_without_losses(ranks: Ranks) -> None:
    ranks.run(replay, replace(CASE, balance_coef=0.0, z_coef=0.0))


@pytest.mark.parametrize("router", ["renormalized", "topk_softmax", "deepseek_v3", "softmax_topk"])
def test_weights_of_given_experts(router: str) -> None:
    """By the rule of the router, without groups and bias, and without the places that have no route."""
    rule = ROUTERS[router]
    logits = torch.randn(2, NUM_EXPERTS, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[6, 1, -1], [-1, -1, -1]])
    _, weights, probabilities = rule.route(logits, torch.ones(NUM_EXPERTS), ids)
    scores = logits.sigmoid() if rule.score == "sigmoid" else logits.softmax(-1)
    chosen = scores[0, [6, 1]]
    if rule.renormalize or rule.score == "topk_softmax":
        chosen = chosen / chosen.sum()
    torch.testing.assert_close(weights[0, :2], chosen * rule.scale)
    assert not weights[0, 2]
    assert not weights[1].any()
    (grad,) = torch.autograd.grad(weights.square().sum(), logits)
    assert grad[0].any()
    assert not grad[1].any()
    assert torch.equal(probabilities, rule.route(logits)[2])


def test_weights_of_part_of_the_experts_learn() -> None:
    """The gradient of the router is that of the formula."""
    rule = ROUTERS["renormalized"]
    logits = torch.randn(3, NUM_EXPERTS, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[6, 1, -1], [0, 1, 2], [-1, 7, -1]])
    torch.autograd.gradcheck(lambda logits: rule.route(logits, None, ids)[1], logits)


FAULTS: dict[str, tuple[type[Exception], str]] = {
    "weights alone": (tl.InvalidArgument, "topk_weights are given without topk_ids"),
    "ids of other tokens": (tl.ShapeMismatch, r"topk_ids is \[3, 3\], expected \[4, 3\]"),
    "float ids": (tl.DtypeMismatch, "topk_ids is torch.float32, expected torch.int32 or torch.int64"),
    "integer weights": (tl.DtypeMismatch, "topk_weights is torch.int64, expected floating point"),
    "an expert that is not there": (tl.InvalidExpertId, "8"),
    "mask of integers": (tl.DtypeMismatch, "token_mask is torch.int64, expected torch.bool"),
    "mask of other tokens": (tl.ShapeMismatch, r"token_mask is \[3\], expected \[4\]"),
    "a list as mask": (tl.InvalidArgument, "token_mask is a list"),
    "mask elsewhere": (tl.DeviceMismatch, "token_mask is on meta"),
}


def fail_on_one_rank(context: RankContext, fault: str) -> None:
    layer = make_layer(replace(CASE, dtype=FP32), context.group)
    error, named = FAULTS[fault]
    x = torch.ones(4, HIDDEN, device=context.device)
    ids = torch.arange(4 * TOP_K, device=context.device).view(4, TOP_K) % NUM_EXPERTS
    weights = torch.ones(4, TOP_K, device=context.device)
    mask = torch.ones(4, dtype=torch.bool, device=context.device)
    wrong: dict[str, dict[str, Any]] = {
        "weights alone": {"topk_weights": weights},
        "ids of other tokens": {"topk_ids": ids[:3]},
        "float ids": {"topk_ids": ids.float()},
        "integer weights": {"topk_ids": ids, "topk_weights": weights.long()},
        "an expert that is not there": {"topk_ids": ids + 1},
        "mask of integers": {"token_mask": mask.long()},
        "mask of other tokens": {"token_mask": mask[:3]},
        "a list as mask": {"token_mask": mask.tolist()},
        "mask elsewhere": {"token_mask": mask.to("meta")},
    }
    want, bad = layer(x, topk_ids=ids)[0], context.num_ranks - 1
    counts = layer.expert_counts.clone()
    if context.rank == bad:
        with pytest.raises(error, match=named):
            layer(x, **wrong[fault])
    else:
        with pytest.raises(tl.PeerError, match=named) as peer:
            layer(x, topk_ids=ids)
        assert peer.value.rank == bad
    assert torch.equal(layer.expert_counts, counts), "a call that failed counts"
    assert torch.equal(layer(x, topk_ids=ids)[0], want)


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_input_on_one_rank(ranks: Ranks, fault: str) -> None:
    if FAULTS[fault][0] is tl.InvalidExpertId and (emulator.ON or ranks.device == "cuda"):
        pytest.skip("kernels take ids that are too big for -1, without a word")
    ranks.run(fail_on_one_rank, fault)


# -- padding ------------------------------------------------------------------------------------------------


def pad(context: RankContext, case: LayerCase, given: str) -> None:
    """With padding anywhere, in two dimensions, and without it: everything is equal, bit for bit."""
    layer = make_layer(case, context.group)
    x, factors = (each[context.rank].to(context.device) for each in make_inputs(case, context.num_ranks))
    with torch.no_grad(), layer.record_routing() as routes:
        layer(x)
    ids, weights = routes[0]
    own: dict[str, Any] = {}
    if given != "own choice":
        own["topk_ids"] = ids
    if given == "given weights":
        own["topk_weights"] = weights
    want = step(layer, x, factors, **own)

    generator = torch.Generator().manual_seed(context.rank)
    mask = torch.zeros(16, dtype=torch.bool)
    mask[torch.randperm(16, generator=generator)[: len(x)]] = True
    mask = mask.view(2, 8).to(context.device)

    def padded(values: torch.Tensor, fill: float) -> torch.Tensor:
        everything = values.new_full((2, 8, values.shape[-1]), fill)
        everything[mask] = values
        return everything

    fills = {"topk_ids": 3, "topk_weights": torch.nan}
    more = {name: padded(value, fills[name]) for name, value in own.items()}
    found = step(layer, padded(x, 7.0), padded(factors, 5.0), token_mask=mask, **more)
    for name in ("out", "x"):
        assert not found[name][~mask].any(), name
        found[name] = found[name][mask]
    assert_same(found, want)

    with torch.no_grad(), layer.record_routing() as routes:
        layer(padded(x, torch.nan), token_mask=mask)
    assert torch.equal(routes[0][0], padded(ids, -1))
    assert torch.equal(routes[0][1], padded(weights, 0))
    with torch.no_grad():  # what was recorded is good for the same batch, without its mask too
        assert torch.equal(layer(padded(x, 7.0), topk_ids=routes[0][0], token_mask=mask)[0], padded(want["out"], 0))


@pytest.mark.parametrize("given", GIVEN)
def test_padding_is_left_out(ranks: Ranks, given: str) -> None:
    ranks.run(pad, CASE, given)


@pytest.mark.parametrize("router", ["deepseek_v3", "gpt_oss"])
def test_padding_and_other_routers(ranks: Ranks, router: str) -> None:
    ranks.run(pad, replace(CASE, router=router, dtype=FP32, biases=True, shared_gate=True), "own choice")


@on_ranks
def test_padding_alone(context: RankContext) -> None:
    """On one rank nothing is left; it takes part all the same."""
    layer = make_layer(CASE, context.group)
    x = torch.randn(4, HIDDEN, dtype=CASE.dtype, device=context.device, requires_grad=True)
    mask = torch.full((4,), context.rank > 0, device=context.device)
    out, aux_loss = layer(x, token_mask=mask)
    (out.square().sum() + aux_loss).backward()
    assert x.grad is not None
    if context.rank == 0:
        assert not out.any()
        assert not x.grad.any()
    assert layer.expert_counts.sum() == 4 * TOP_K * (context.num_ranks - 1)


def test_padding_does_not_count_as_tokens() -> None:
    """Of a batch with more places than the layer has room for."""
    layer = make_layer(replace(CASE, tokens=(4,)), None)
    x, mask = torch.randn(6, HIDDEN, dtype=CASE.dtype), torch.tensor([True, False, True, True, False, True])
    assert torch.equal(layer(x, token_mask=mask)[0][mask], layer(x[mask])[0])
    with pytest.raises(tl.ShapeMismatch, match="x has 6 tokens"):
        layer(x)


# -- records ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_is_computed_again_is_recorded_once(use_reentrant: bool) -> None:
    layer = make_layer(CASE, None)
    x = torch.randn(5, HIDDEN, dtype=CASE.dtype, requires_grad=True)
    with layer.record_routing() as routes:
        out, _ = checkpoint(layer, x, use_reentrant=use_reentrant)
        out.sum().backward()
        layer(x[:2])
    layer(x)
    assert [len(ids) for ids, _ in routes] == [5, 2]
    assert not any(weights.requires_grad for _, weights in routes)


def test_records_within_each_other() -> None:
    layer, x = make_layer(CASE, None), torch.randn(5, HIDDEN, dtype=CASE.dtype)
    with layer.record_routing() as outer:
        with layer.record_routing() as inner:
            layer(x)
        layer(x)
    assert (len(outer), len(inner)) == (2, 1)


# -- compiled -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("given", [*GIVEN, "padding"])
def test_compiled(given: str, again: bool) -> None:
    """Eager's bits in one graph, with records and gradients of given weights."""
    layer = make_layer(replace(CASE, dtype=FP32, router="deepseek_v3", router_grad="local"), None)
    x, factors = torch.randn(5, HIDDEN), torch.randn(5, HIDDEN)
    with layer.record_routing() as routes:
        layer(x)
    ids, weights = routes[0]
    weights.requires_grad_()
    options = {
        "own choice": {},
        "live weights": {"topk_ids": ids},
        "given weights": {"topk_ids": ids, "topk_weights": weights},
        "padding": {"token_mask": torch.tensor([True, False, True, True, False])},
    }[given]

    def run(x: torch.Tensor, **options: torch.Tensor) -> Any:
        moved = {name: value * 1 if value.is_floating_point() else value.clone() for name, value in options.items()}
        if again:
            return checkpoint(layer, x.sin(), use_reentrant=False, **moved)
        return layer(x.sin(), **moved)

    def one(function: Any) -> list[torch.Tensor]:
        layer.zero_grad()
        weights.grad = None
        layer.expert_counts.zero_()
        leaf = x.clone().requires_grad_()
        with layer.record_routing() as routes:
            out, aux_loss = function(leaf, **options)
            ((out * factors).sum() + aux_loss).backward()
        assert len(routes) == 1
        grads = [each.grad for each in (leaf, weights, *layer.parameters()) if each.grad is not None]
        return [out.detach(), aux_loss.detach(), layer.expert_counts.clone(), *routes[0], *grads]

    torch._dynamo.reset()
    want, got = one(run), one(torch.compile(run, fullgraph=True, backend="aot_eager"))
    assert len(got) == len(want)
    for number, (found, wanted) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(found, wanted), number
