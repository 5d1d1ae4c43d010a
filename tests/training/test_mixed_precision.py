"""Layers whose experts are float32 among bfloat16: as FSDP2's MixedPrecisionPolicy leaves them, and by themselves."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tokenloom as tl
from tests.support.layer_cases import HIDDEN, NUM_EXPERTS, TOP_K, LayerCase, assert_near, make_inputs, make_layer
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.processes import RankContext
from tokenloom.training.shards import local_part

FP32, BF16 = torch.float32, torch.bfloat16
CASE = LayerCase(dtype=FP32, biases=True, router="gpt_oss", shared_gate=True)


class Block(nn.Module):
    """A dense layer and experts, of weights that bfloat16 holds exactly."""

    def __init__(self, context: RankContext, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(HIDDEN, HIDDEN, device=context.device)
        self.moe = make_layer(CASE, context.group, expert_grad_scale=1 / context.num_ranks, **options)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(parameter.bfloat16())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.moe(self.inner(x))


AUX_LOSS = 1
"""Its place among the results of a step."""


def step(context: RankContext, run: nn.Module, x: torch.Tensor, model: nn.Module) -> list[Any]:
    """Both results, and by name the gradients of experts."""
    out, aux_loss = run(x)
    _, factors = make_inputs(CASE, context.num_ranks)
    ((out.float() * factors[context.rank].to(context.device)).sum() + aux_loss).backward()
    experts = {name: each for name, each in model.named_parameters() if ".experts." in name}
    for name, each in experts.items():
        gradient = getattr(each, "main_grad", each.grad)
        assert gradient.dtype == each.dtype == FP32, name
    gradients = [local_part(getattr(each, "main_grad", each.grad)) for each in experts.values()]
    return [out.detach(), aux_loss.detach(), *gradients]


@on_ranks
@pytest.mark.parametrize("main_grads", [False, True])
@pytest.mark.parametrize("unit_per_layer", [False, True], ids=["one_unit", "unit_per_layer"])
def test_float32_experts_beside_fsdp_in_bfloat16(context: RankContext, unit_per_layer: bool, main_grads: bool) -> None:
    """The step is that of the same model under autocast, bit for bit in what experts compute.

    FSDP gives the router in bfloat16, as autocast does not: tensor cores of GPUs then sum its logits in another order.
    """
    x = make_inputs(CASE, context.num_ranks)[0][context.rank].to(context.device)
    plain, model = Block(context), Block(context, main_grads=main_grads)
    with torch.autocast(context.device.type, BF16):
        want = step(context, plain, x, plain)

    mesh = DeviceMesh.from_group(context.group, context.device.type)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    experts = set(model.moe.expert_parameters())
    for unit in (model.moe, model) if unit_per_layer else (model,):
        fully_shard(unit, mesh=mesh, mp_policy=policy, ignored_params=experts)
    found = step(context, model, x, model)
    assert found[0].dtype == BF16
    assert found[1].dtype == FP32
    for number, (one, other) in enumerate(zip(found, want, strict=True)):
        if number == AUX_LOSS and context.device.type == "cuda":
            torch.testing.assert_close(one, other, rtol=1e-6, atol=0.0)
        else:
            assert torch.equal(one, other), number
    for (name, sharded), parameter in zip(model.named_parameters(), plain.parameters(), strict=True):
        if ".experts." in name:
            continue
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=context.group)
        assert sharded.grad is not None
        assert sharded.grad.dtype == FP32
        whole = sharded.grad.full_tensor()  # type: ignore[attr-defined]
        assert_near(whole, parameter.grad / context.num_ranks, BF16, name)


@on_ranks
def test_other_options_of_the_policy(context: RankContext) -> None:
    mesh = DeviceMesh.from_group(context.group, context.device.type)
    x = make_inputs(CASE, context.num_ranks)[0][context.rank].to(context.device)

    def sharded(**options: Any) -> nn.Module:
        layer = make_layer(CASE, context.group)
        policy = MixedPrecisionPolicy(param_dtype=BF16, **options)
        return fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=set(layer.expert_parameters()))

    out, aux_loss = sharded(output_dtype=FP32)(x)
    assert out.dtype == aux_loss.dtype == FP32
    alone = sharded(cast_forward_inputs=False)
    out, _ = alone(x.bfloat16())
    assert out.dtype == BF16
    with pytest.raises((tl.DtypeMismatch, tl.PeerError), match="cast_forward_inputs=True"):
        alone(x)
    out, _ = alone(x.bfloat16())
    out.float().sum().backward()


@on_ranks
@pytest.mark.parametrize("what", ["narrow x", "wide x"])
def test_a_dtype_by_mistake(context: RankContext, what: str) -> None:
    """A dtype that nobody has cast for is an error as ever, on all ranks."""
    layer, last = make_layer(CASE, context.group), context.rank == context.num_ranks - 1
    x = torch.ones(3, HIDDEN, device=context.device)
    want = layer(x)[0]
    given = {"narrow x": x.bfloat16(), "wide x": x.double()}[what]
    with pytest.raises(tl.DtypeMismatch if last else tl.PeerError, match=r"the layer is torch\.float32"):
        layer(given if last else x)
    assert torch.equal(layer(x)[0], want)


def test_a_single_narrow_parameter_casts_nothing() -> None:
    layer = make_layer(CASE, None)
    assert layer.shared_w2 is not None
    layer.shared_w2.data = layer.shared_w2.data.bfloat16()
    with pytest.raises(tl.DtypeMismatch, match=r"the layer is torch\.float32"):
        layer(torch.ones(3, HIDDEN, dtype=BF16))


@on_ranks
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_float32_experts_take_narrow_tokens(context: RankContext, dtype: torch.dtype) -> None:
    """They go by the tokens: as under autocast, with gradients in float32."""
    sizes: dict[str, Any] = {"hidden": HIDDEN, "intermediate": 12, "num_experts": NUM_EXPERTS, "top_k": TOP_K}
    experts = tl.RoutedExperts(context.group, max_tokens_per_rank=8, dtype=FP32, **sizes)
    experts.reset_parameters(seed=1)
    generator = torch.Generator().manual_seed(context.rank)
    x = torch.randn(5, HIDDEN, generator=generator).to(context.device, dtype)
    ids = torch.randint(NUM_EXPERTS, (5, TOP_K), generator=generator).to(context.device)
    weights = torch.rand(5, TOP_K, generator=generator).to(context.device)
    results = []
    for autocast in (True, False):
        leaf = x.clone().requires_grad_()
        experts.zero_grad()
        with torch.autocast(context.device.type, dtype) if autocast else nullcontext():
            out = experts(leaf, ids, weights)
        out.float().square().sum().backward()
        assert leaf.grad is not None
        results.append([out.detach(), leaf.grad, *(local_part(each.grad) for each in experts.parameters())])
    assert [each.dtype for each in results[1]] == [dtype, dtype, FP32, FP32]
    for found, want in zip(*results, strict=True):
        assert torch.equal(found, want)
