"""Counts of routes: over all training forwards until they are used, once for each, and exact."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tokenloom as tl
from tests.support.layer_cases import HIDDEN, NUM_EXPERTS, TOP_K, LayerCase, keeping_products, make_inputs, make_layer
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.processes import RankContext

FP32 = torch.float32
CASE = LayerCase(router="deepseek_v3", balance_coef=0.0, z_coef=0.0, dtype=FP32)


def rows(num_tokens: int = 5) -> torch.Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(4), dtype=FP32)


# -- micro-batches ------------------------------------------------------------------------------------------


@on_ranks
def test_micro_batches_of_a_step_count_together(context: RankContext) -> None:
    """Three micro-batches move the bias as the whole batch does, and the next step counts from 0."""
    layer, whole = (make_layer(CASE, context.group) for _ in range(2))
    x = make_inputs(CASE, context.num_ranks)[0][context.rank].to(context.device)
    for part in (x[::3], x[1::3], x[2::3]):
        layer(part)[0].sum().backward()
    whole(x)
    assert layer.expert_counts.dtype == torch.int64
    assert torch.equal(layer.expert_counts, whole.expert_counts)
    assert layer.expert_counts.sum() == sum(CASE.tokens[: context.num_ranks]) * TOP_K
    for each in (layer, whole):
        each.update_correction_bias(0.125)
        assert not each.expert_counts.any()
    assert layer.correction_bias is not None
    assert whole.correction_bias is not None
    assert torch.equal(layer.correction_bias, whole.correction_bias)
    before = layer.correction_bias.clone()
    layer.update_correction_bias(0.125)  # without another forward there is nothing to go by
    assert torch.equal(layer.correction_bias, before)


def test_only_training_counts() -> None:
    layer, x = make_layer(CASE, None), rows()
    layer(x)
    want = layer.expert_counts.clone()
    layer.eval()
    layer(x)
    layer.train()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            layer(x)
    layer.saved_activations(x)
    assert torch.equal(layer.expert_counts, want)
    layer(x)
    assert torch.equal(layer.expert_counts, 2 * want)


def test_large_counts_are_exact() -> None:
    """In float32 all of these experts have the same load."""
    layer = make_layer(CASE, None)
    layer.expert_counts.fill_(2**40)
    layer.expert_counts[3] += 1
    assert layer.correction_bias is not None
    layer.correction_bias.zero_()
    layer.update_correction_bias(0.5)
    assert layer.correction_bias.tolist() == [0.5 if expert != 3 else -0.5 for expert in range(NUM_EXPERTS)]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_counts_of_a_layer_that_was_moved(device: str) -> None:
    """No checkpoint has them, so what to_empty leaves there would be counted on for ever."""
    layer = make_layer(CASE, None)
    state = layer.state_dict()
    assert "expert_counts" not in state
    layer.expert_counts.fill_(7)
    layer.to(device).to_empty(device="cpu")
    layer.load_state_dict(state)
    assert layer.expert_counts.tolist() == [0 if device == "meta" else 7] * NUM_EXPERTS
    layer.to(torch.bfloat16)
    assert layer.expert_counts.dtype == torch.int64


# -- activation checkpoints ---------------------------------------------------------------------------------


class Megatron(torch.autograd.Function):
    """As programs write it: forward without a graph, then again within backward, whose backward runs there."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], x: torch.Tensor) -> Any:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        leaf = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            outputs = ctx.run(leaf)
        with_graph = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
        torch.autograd.backward(*zip(*with_graph, strict=True))
        return None, leaf.grad


plain = partial(checkpoint, use_reentrant=False)
reentrant = partial(checkpoint, use_reentrant=True)
CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "none": lambda layer, x: layer(x),
    "plain": plain,
    "reentrant": reentrant,
    "selective": partial(plain, context_fn=keeping_products),
    "whole": partial(plain, early_stop=False),
    "megatron": Megatron.apply,
    "plain in plain": lambda layer, x: plain(lambda x: plain(layer, x), x),
    "plain in reentrant": lambda layer, x: reentrant(lambda x: plain(layer, x), x),
    "reentrant in reentrant": lambda layer, x: reentrant(lambda x: reentrant(layer, x), x),
}


def count_under(run: Callable[..., Any], layer: tl.ExpertParallelMoE, function: Any) -> None:
    layer(rows())
    want = layer.expert_counts.clone()
    layer.expert_counts.zero_()
    for step in (1, 2):
        out, _ = run(function, rows().requires_grad_())
        out.square().sum().backward()
        assert torch.equal(layer.expert_counts, step * want)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_what_is_computed_again_counts_once(name: str) -> None:
    layer = make_layer(CASE, None)
    count_under(CHECKPOINTS[name], layer, layer)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "plain", "reentrant", "megatron"])
def test_a_compiled_layer_counts_once(name: str) -> None:
    """Within checkpoints that the compiler does not see."""
    layer = make_layer(CASE, None)
    torch._dynamo.reset()
    count_under(CHECKPOINTS[name], layer, torch.compile(layer, backend="aot_eager"))


@pytest.mark.slow
def test_a_compiled_checkpoint_counts_once() -> None:
    layer = make_layer(CASE, None)
    torch._dynamo.reset()
    run = torch.compile(lambda _, x: plain(layer, x), fullgraph=True, backend="aot_eager")
    count_under(run, layer, layer)


@pytest.mark.slow
def test_a_compiled_layer_that_is_evaluated() -> None:
    layer, x = make_layer(CASE, None), rows()
    torch._dynamo.reset()
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    run(x)
    want = layer.expert_counts.clone()
    assert want.any()
    layer.eval()
    run(x)
    layer.train()
    with torch.no_grad():
        run(x)
    assert torch.equal(layer.expert_counts, want)


def test_a_second_backward_counts_nothing() -> None:
    """A graph that is kept runs a node again."""
    layer, x = make_layer(CASE, None), rows().requires_grad_()
    layer(x)
    want = layer.expert_counts.clone()
    layer.expert_counts.zero_()

    def twice(layer: Any, leaf: torch.Tensor) -> Any:
        out, _ = layer(leaf)
        torch.autograd.grad(out.sum(), leaf, retain_graph=True)
        return out, out

    class Twice(Megatron):
        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            leaf = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                out, _ = twice(layer, leaf)
            out.backward(grads[0])
            return None, leaf.grad

    Twice.apply(layer, x)[0].sum().backward()
    assert torch.equal(layer.expert_counts, want)
