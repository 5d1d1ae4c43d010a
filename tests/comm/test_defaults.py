"""torch's default device and default dtype are the caller's business: every tensor made inside names its own.

The tests of other libraries set ``torch.set_default_device("cuda")``, and models are built under ``meta``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.cases import (
    BF16,
    FP32,
    FP64,
    Case,
    each_backend,
    expert_rows,
    make_comm,
    make_problem,
    same_bits,
    same_routed,
)
from tests.support.layer_cases import LayerCase, make_inputs, make_layer
from tokenloom import reference
from tokenloom.runtime.processes import RankContext
from tokenloom.training.shards import local_part

pytestmark = pytest.mark.slow_on(1, 4)

DEFAULTS = [("meta", FP32), ("cpu", BF16), ("cpu", FP64), ("meta", BF16), ("cuda", FP64)]
each_default = pytest.mark.parametrize(
    ("device", "dtype"), DEFAULTS, ids=[f"{device}, {str(dtype).removeprefix('torch.')}" for device, dtype in DEFAULTS]
)


@contextmanager
def defaults(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Ranks live longer than a test, so what it found is put back."""
    before = torch.get_default_dtype()
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


def skip_without_gpu(ranks: Ranks, device: str) -> None:
    if device == "cuda" and ranks.device != "cuda":
        pytest.skip("no such device")


@each_default
@each_backend
def test_communicator(ranks: Ranks, backend: str, device: str, dtype: torch.dtype) -> None:
    """Making one, every layout and size, FP8 on the way, and all gradients."""
    skip_without_gpu(ranks, device)
    ranks.run(check_communicator, backend, device, dtype)


def check_communicator(context: RankContext, backend: str, device: str, dtype: torch.dtype) -> None:
    case = Case("defaults", "", tokens=(5, 0, 3), unused=0.2, top_k=3, hidden=128, dtype=FP32, to_quantise=True)
    problem = make_problem(case, context.num_ranks)
    alignment = 4
    for layout in ("token", "rank", "expert"):
        options: dict[str, Any] = {"layout": layout, "alignment": alignment if layout == "expert" else 1}
        want = problem.dispatched(**options)
        ys = expert_rows(problem, want, FP32)
        weights = problem.topk_weights if layout == "expert" else None
        out = reference.combine(problem.plan, ys, want, problem.topk_ids, weights)[context.rank]
        y = ys[context.rank].to(context.device)
        with defaults("cpu", FP32):
            expected = go_there_and_back(context, backend, problem, options, y)
        with defaults(device, dtype):
            found = go_there_and_back(context, backend, problem, options, y)
        same_routed(found[0], want[context.rank], problem.plan)
        same_bits(found[1], out, f"{layout}, out")
        for got, wanted in zip(found[2:], expected[2:], strict=True):
            assert got.device == context.device
            same_bits(got, wanted.cpu(), f"{layout}, gradient or row")


def go_there_and_back(
    context: RankContext, backend: str, problem: Any, options: dict[str, Any], y: torch.Tensor
) -> list[Any]:
    """Routed, result, then all gradients and the rows of other kinds of calls."""
    x, ids, topk_weights = arguments(problem, context)
    modes = ("per_rank", "per_route") if options["layout"] == "expert" else ("per_rank",)
    with make_comm(context, backend, problem.plan) as comm:
        comm.describe()
        x.requires_grad_()
        topk_weights.requires_grad_()
        routed = comm.dispatch(x, ids, topk_weights, **options)
        _ = routed.topk_ids
        grads = []
        for mode in modes:
            leaf = y.clone().requires_grad_()
            out = comm.combine(leaf, routed, mode=mode)
            grads += torch.autograd.grad(out.square().sum(), [leaf], retain_graph=True)
            if options["layout"] == "expert":
                grads += torch.autograd.grad(comm.combine(y, routed, mode=mode).square().sum(), [topk_weights])
        grads += torch.autograd.grad(routed.tokens.nan_to_num().sum(), [x], retain_graph=True)
        if routed.topk_weights is not None:
            grads += torch.autograd.grad(routed.topk_weights.sum(), [topk_weights])
        if options["layout"] == "expert":
            rows = comm.row_weights(routed)
            grads += [rows.detach(), *torch.autograd.grad(rows.sum(), [topk_weights])]
        bounded: dict[str, Any] = options | {"sizes": "bounded"}
        if options["layout"] != "rank":
            bounded["capacity"] = 64
        with torch.no_grad():
            wide = comm.dispatch(x, ids, topk_weights, **bounded)
            first = comm.combine(y, routed)
            assert wide.tokens.device == context.device
            fp8 = comm.dispatch(x, ids, topk_weights, **options, to_fp8=True)
            assert fp8.scales is not None
        assert fp8.scales.dtype == FP32
        comm.check()
    return [routed, first, *grads]


def arguments(problem: Any, context: RankContext) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As Problem.arguments, which leaves it to torch where a tensor is made."""
    rank, where = context.rank, context.device
    tensors = (problem.xs[rank], problem.topk_ids[rank], problem.topk_weights[rank])
    x, ids, weights = (tensor.to(where, copy=True) for tensor in tensors)
    return x, ids, weights


@pytest.mark.sampled(3)
@each_default
@pytest.mark.parametrize("router", ["softmax_topk", "deepseek_v3"])
def test_layer(ranks: Ranks, router: str, device: str, dtype: torch.dtype) -> None:
    """Making one, forward, backward, the bias of its router and its checkpoint."""
    skip_without_gpu(ranks, device)
    ranks.run(check_layer, router, device, dtype)


def check_layer(context: RankContext, router: str, device: str, dtype: torch.dtype) -> None:
    case = LayerCase(router=router, dtype=FP32)
    xs, factors = make_inputs(case, context.num_ranks)
    x, factor = xs[context.rank].to(context.device), factors[context.rank].to(context.device)
    for options in ({}, {"redispatch_in_backward": True, "main_grads": True}, {"pool_rows": 400}):
        with defaults("cpu", FP32):
            want = train(context, case, x, factor, options)
        with defaults(device, dtype):
            got = train(context, case, x, factor, options)
        for ours, theirs in zip(got, want, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


def train(
    context: RankContext, case: LayerCase, x: torch.Tensor, factor: torch.Tensor, options: dict[str, Any]
) -> list[torch.Tensor]:
    layer = make_layer(replace(case, shared=8), context.group, device=context.device, **options)
    leaf = x.clone().requires_grad_()
    with torch.no_grad():
        layer(x)
    out, aux_loss = layer(leaf)
    ((out * factor).sum() + aux_loss).backward()
    assert leaf.grad is not None
    if layer.correction_bias is not None:
        layer.update_correction_bias(0.01)
    full = tl.gather_state_dict(layer)
    layer.load_state_dict(tl.shard_state_dict(layer, full))
    layer.saved_activations(x)
    layer.comm.check()
    layer.comm.close()
    grads = [local_part(parameter.grad) for parameter in layer.parameters() if parameter.grad is not None]
    sums = [weight.main_grad for weight in layer.expert_parameters() if "main_grads" in options]
    return [out.detach(), aux_loss.detach(), leaf.grad, *grads, *sums, *full.values()]


def test_a_layer_has_the_default_dtype() -> None:
    """As nn.Linear has, and only that: losses and weights of routes are float32 at least."""
    with defaults("cpu", BF16):
        layer = make_layer(LayerCase(), None, dtype=None, device="cpu")
        assert {parameter.dtype for parameter in layer.parameters()} == {BF16}
        out, aux_loss = layer(torch.ones(3, layer.experts.hidden))
    assert (out.dtype, aux_loss.dtype) == (BF16, FP32)


@pytest.mark.sampled(3)
@each_default
def test_tune(ranks: Ranks, tmp_path: Any, device: str, dtype: torch.dtype) -> None:
    """The profile draws routes and makes its samples by itself."""
    skip_without_gpu(ranks, device)
    if ranks.num_ranks > 2:
        pytest.skip("two ranks show it")
    ranks.run(check_tune, str(tmp_path), device, dtype)


def check_tune(context: RankContext, folder: str, device: str, dtype: torch.dtype) -> None:
    sizes = {"num_tokens": 13, "hidden": 48, "intermediate": 32, "num_experts": 8, "top_k": 3, "dtype": BF16}
    with pytest.MonkeyPatch.context() as patch, defaults(device, dtype):
        patch.setenv("TOKENLOOM_CACHE_DIR", folder)
        found = tl.tune.profile(context.group, iterations=1, device=context.device, **sizes)  # type: ignore[arg-type]
    assert found.strategy is not None
