"""Gradients of expert weights in float32, summed over micro-batches."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import tokenloom as tl
from tests.support.layer_cases import HIDDEN, LayerCase, make_layer
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.processes import RankContext

BATCHES = 64
CASE = LayerCase(dtype=torch.bfloat16)
"""Each gradient is rounded to bfloat16 once, wherever it is summed; a sum of 64 in bfloat16 loses more by far."""


def batches(device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(5, HIDDEN, generator=generator).to(device, CASE.dtype) for _ in range(BATCHES)]


def backward(run: Any, x: torch.Tensor) -> None:
    out, aux_loss = run(x)
    (out.float().square().mean() + aux_loss).backward()


def largest_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize(
    "is_compiled", [pytest.param(False, id="eager"), pytest.param(True, id="compiled", marks=pytest.mark.slow)]
)
def test_sums_over_micro_batches_lose_nothing(is_compiled: bool, device: str) -> None:
    layer, plain = make_layer(CASE, None, main_grads=True, device=device), make_layer(CASE, None, device=device)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if is_compiled else layer
    sums = [torch.zeros_like(weight, dtype=torch.float64) for weight in plain.expert_parameters()]
    for x in batches(device):
        backward(run, x)
        before = [weight.grad for weight in plain.expert_parameters()]
        plain.zero_grad()
        backward(plain, x)
        for total, weight, earlier in zip(sums, plain.expert_parameters(), before, strict=True):
            assert weight.grad is not None
            total += weight.grad.double()
            if earlier is not None:  # and on with the sum in bfloat16
                weight.grad += earlier
    for weight, narrow, want in zip(layer.expert_parameters(), plain.expert_parameters(), sums, strict=True):
        assert weight.grad is None
        assert weight.main_grad.dtype == torch.float32
        assert largest_error(weight.main_grad.double(), want) < BATCHES * 2**-24
        assert narrow.grad is not None
        assert largest_error(narrow.grad.double(), want) > 2**-9


def test_only_expert_weights_have_main_grads_and_nothing_sets_them_back(device: str) -> None:
    layer, plain = make_layer(CASE, None, main_grads=True, device=device), make_layer(CASE, None, device=device)
    x = batches(device)[0]
    assert [name for name, _ in layer.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert set(layer.state_dict()) == set(plain.state_dict())
    assert [not weight.main_grad.any() for weight in layer.expert_parameters()] == [True, True]
    for times in (1, 2):
        backward(layer, x)
        layer.zero_grad()
        plain.zero_grad()
        backward(plain, x)
        for weight, other in zip(layer.expert_parameters(), plain.expert_parameters(), strict=True):
            assert other.grad is not None
            assert torch.equal(weight.main_grad, times * other.grad.float())
    assert not any(hasattr(weight, "main_grad") for weight in (*plain.parameters(), *layer.replicated_parameters()))
    backward(layer, x)
    for weight, other in zip(layer.replicated_parameters(), plain.replicated_parameters(), strict=True):
        assert weight.grad is not None
        assert other.grad is not None
        assert torch.equal(weight.grad, other.grad)


def test_the_owner_may_set_them_back_or_put_a_part_of_a_buffer_there(device: str) -> None:
    """As Megatron-LM's data parallelism does."""
    layer, x = make_layer(CASE, None, main_grads=True, device=device), batches(device)[0]
    backward(layer, x)
    want = layer.experts.w1.main_grad.clone()
    layer.experts.w1.main_grad.zero_()
    buffer = torch.zeros(layer.experts.w1.numel() + 8, device=device)
    layer.experts.w1.main_grad, before = buffer[8:].view_as(layer.experts.w1), layer.experts.w1.main_grad
    backward(layer, x)
    assert torch.equal(buffer[8:].view_as(want), want)
    assert not before.any()
    assert not buffer[:8].any()


def test_copies_and_frozen_weights() -> None:
    layer, x = make_layer(CASE, None, main_grads=True), batches()[0]
    layer.experts.w2.requires_grad_(False)
    twin = copy.deepcopy(layer)
    backward(twin, x)
    assert twin.experts.w1.main_grad.any()
    assert twin.experts.w1.grad is None
    assert not twin.experts.w2.main_grad.any()
    assert not layer.experts.w1.main_grad.any()
    backward(copy.copy(layer), x)  # which has the same parameters
    backward(layer, x)
    assert torch.equal(layer.experts.w1.main_grad, 2 * twin.experts.w1.main_grad)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_parameters_that_are_new(is_compiled: bool) -> None:
    """Of a checkpoint that load_state_dict assigns. A forward makes their memory, once."""
    layer, (x, *_) = make_layer(CASE, None, main_grads=True), batches()
    layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()}, assign=True)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if is_compiled else layer
    backward(run, x)
    first = layer.experts.w1.main_grad
    assert first.any()
    assert layer.experts.w1.grad is None
    backward(run, x)
    assert layer.experts.w1.main_grad is first


def test_gradients_that_are_asked_for_are_given_out() -> None:
    """torch.autograd.grad accumulates nothing, here neither."""
    layer = make_layer(CASE, None, main_grads=True)
    assert isinstance(layer, tl.ExpertParallelMoE)
    (grad,) = torch.autograd.grad(layer(batches()[0])[0].sum(), layer.experts.w1)
    assert grad.dtype == CASE.dtype
    assert not layer.experts.w1.main_grad.any()


@on_ranks
def test_a_cast_keeps_them(context: RankContext) -> None:
    """torch puts other tensors in the places of DTensors."""
    layer = make_layer(replace(CASE, dtype=torch.float32), context.group, main_grads=True)
    x = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(1)).to(context.device)  # some for each rank
    backward(layer, x)
    kept = [weight.main_grad for weight in layer.expert_parameters()]
    seen: list[torch.Tensor] = []
    layer.experts.w1.register_hook(seen.append)
    layer.to(context.device)  # torch swaps DTensors for others even where nothing changes
    layer.to(torch.bfloat16)
    assert all(weight.dtype == torch.bfloat16 for weight in layer.expert_parameters())
    assert all(weight.main_grad is each for weight, each in zip(layer.expert_parameters(), kept, strict=True))
    twin = copy.deepcopy(layer)
    backward(twin, x.bfloat16())
    assert not torch.equal(twin.experts.w1.main_grad, kept[0])
    assert twin.experts.w1.grad is None
    before = kept[0].clone()
    backward(layer, x.bfloat16())
    assert not torch.equal(kept[0], before)
    assert all(weight.grad is None for weight in layer.expert_parameters())
    assert len(seen) == 1
    assert kept[0].shape == layer.experts.w1.to_local().shape
    assert not isinstance(kept[0], DTensor)

    layer.to("meta").to_empty(device=context.device)
    layer.reset_parameters(seed=1)
    backward(layer, x.bfloat16())
    assert layer.experts.w1.main_grad.any()
    assert layer.experts.w1.grad is None
