"""Layers under torch's modes, behind its parametrizations, and with inputs that a collective still brings."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn.utils import parametrize, prune

import tokenloom as tl
from tests.comm.test_torch_modes import GradientUnderWay
from tests.support.layer_cases import HIDDEN, LayerCase, make_layer
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.processes import RankContext
from tokenloom.training.shards import local_part

FP32 = torch.float32
CASE = LayerCase(router="deepseek_v3", dtype=FP32)


def rows(dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=FP32).to(dtype)


def gradients(layer: tl.ExpertParallelMoE, x: torch.Tensor) -> list[torch.Tensor]:
    out, aux_loss = layer(x)
    return list(torch.autograd.grad(out.square().sum() + aux_loss, list(layer.parameters())))


# -- inference mode -------------------------------------------------------------------------------------------


def test_a_layer_made_in_inference_mode_trains() -> None:
    """Its buffers could not be written to outside, and its parameters not be saved for backward."""
    with torch.inference_mode():
        layer = make_layer(CASE, None)
    want = gradients(make_layer(CASE, None), rows())
    for found, wanted in zip(gradients(layer, rows()), want, strict=True):
        assert torch.equal(found, wanted)
    with torch.no_grad():
        layer(rows())
    layer.update_correction_bias(0.1)


def test_main_grads_that_a_forward_in_inference_mode_makes() -> None:
    """A parameter that somebody has put in gets its main_grad in the next forward, which may be an evaluation."""
    layer = make_layer(CASE, None, main_grads=True)
    layer.experts.w1 = nn.Parameter(layer.experts.w1.detach().clone())
    with torch.inference_mode():
        layer(rows())
    layer(rows())[0].sum().backward()
    assert layer.experts.w1.grad is None
    assert layer.experts.w1.main_grad.abs().sum() > 0


def test_main_grads_have_no_graph() -> None:
    """With create_graph=True gradients have one, which the sum kept, batch after batch. In a view it was an error."""
    layer = make_layer(CASE, None, main_grads=True)
    buffer = torch.zeros(layer.experts.w1.numel())
    with torch.no_grad():
        layer.experts.w1.main_grad = buffer[:].view(layer.experts.w1.shape)
    loss = layer(rows())[0].square().sum()
    with pytest.warns(UserWarning, match="create_graph=True"):
        loss.backward(create_graph=True)
    assert buffer.abs().sum() > 0
    assert not any(weight.main_grad.requires_grad for weight in layer.expert_parameters())
    layer.zero_grad()


# -- autocast -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_autocast_takes_no_integers(dtype: torch.dtype) -> None:
    """They were cast to bfloat16, whatever they meant: ids instead of their embeddings, say."""
    layer = make_layer(CASE, None)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(tl.DtypeMismatch, match="autocast"):
        layer(torch.ones(5, HIDDEN).to(dtype))


@pytest.mark.parametrize("shared", [0, 8])
@pytest.mark.parametrize("dtype", [torch.float64, FP32, torch.bfloat16], ids=str)
def test_the_result_has_the_dtype_of_autocast(dtype: torch.dtype, shared: int) -> None:
    """autocast leaves products in float64 as they are, and the shared expert's made the sum float64."""
    layer = make_layer(LayerCase(dtype=dtype, shared=shared), None)
    with torch.autocast("cpu", torch.float16):
        out, _ = layer(rows(dtype))
    assert out.dtype == torch.float16


# -- parameters under other names -----------------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


@on_ranks("four")
def test_parametrized_and_pruned_experts(context: RankContext) -> None:
    """By their new names they counted as replicated: averaged over ranks by a trainer, and drawn alike on all."""
    layer, plain = make_layer(CASE, context.group), make_layer(CASE, context.group)
    parametrize.register_parametrization(layer.experts, "w1", Doubled())
    prune.identity(layer.experts, "w2")
    names = {id(parameter): name for name, parameter in layer.named_parameters()}
    experts = sorted(names[id(each)] for each in layer.expert_parameters())
    assert experts == ["experts.parametrizations.w1.original", "experts.w2_orig"]
    assert len(layer.replicated_parameters()) == len(plain.replicated_parameters())
    for each in (layer, plain):
        each.reset_parameters(seed=5)
    layer(rows())  # pruning computes w2 before a forward
    assert torch.equal(layer.experts.w1, plain.experts.w1 * 2)
    assert torch.equal(layer.experts.w2, plain.experts.w2)


# -- inputs and gradients that are under way ------------------------------------------------------------------


@on_ranks
@pytest.mark.parametrize("again", [False, True], ids=["rows kept", "sent again"])
def test_inputs_that_are_under_way(context: RankContext, again: bool) -> None:
    """``DTensor.to_local()`` may give such tensors. Kernels got address 0 for them."""
    layer = make_layer(CASE, context.group, redispatch_in_backward=again)
    x = rows().to(context.device)
    want, _ = layer(x)
    wanted = torch.autograd.grad(want.square().sum(), list(layer.parameters()))
    out, _ = layer(AsyncCollectiveTensor(x.clone()))
    assert type(out) is torch.Tensor
    assert torch.equal(out, want)
    found = torch.autograd.grad(GradientUnderWay.apply(out).square().sum(), list(layer.parameters()))
    for name, one, other in zip(dict(layer.named_parameters()), found, wanted, strict=True):
        assert torch.equal(local_part(one), local_part(other)), name


@pytest.mark.filterwarnings("ignore:Sparse")
def test_inputs_without_memory_of_their_own() -> None:
    layer = make_layer(CASE, None)
    for x in (rows().to_sparse(), rows().to_sparse_csr()):
        with pytest.raises(tl.InvalidArgument, match="strided memory of its own"):
            layer(x)
    layer(rows())
