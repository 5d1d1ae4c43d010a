"""Layers that somebody has wrapped, cast, emptied, frozen or put under a policy of checkpointing."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import tokenloom as tl
from tests.support.layer_cases import HIDDEN, LayerCase, keeping_products, make_layer
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.processes import RankContext

FP32 = torch.float32
CASE = LayerCase(router="deepseek_v3", balance_coef=0.0, z_coef=0.0, biases=True, dtype=FP32)


class Counted(nn.Module):
    """Keeps something beside tensors."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.steps = layer, 7

    def get_extra_state(self) -> Any:
        return {"steps": self.steps}

    def set_extra_state(self, state: Any) -> None:
        self.steps = state["steps"]


@on_ranks("four")
def test_names_that_a_wrapper_changes(context: RankContext) -> None:
    """Experts are found by what they are. By their names they would be taken for replicated, and lost."""
    layer = make_layer(CASE, context.group)
    module = Counted(checkpoint_wrapper(layer))
    full = tl.gather_state_dict(module)
    assert full["layer.experts.w1"].shape[0] == layer.comm.plan.num_experts
    assert full["_extra_state"] == {"steps": 7}
    assert full.keys() == tl.gather_state_dict(Counted(layer)).keys()
    other = Counted(checkpoint_wrapper(make_layer(CASE, context.group)))
    other.steps = 0
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(tl.shard_state_dict(other, full))
    assert other.steps == 7
    for found, wanted in zip(other.parameters(), module.parameters(), strict=True):
        assert torch.equal(found, wanted)


class Cut(nn.Module):
    """Puts half of a tensor into its state dict, as wrappers that shard parameters do."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.register_state_dict_post_hook(Cut.halve)

    @staticmethod
    def halve(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        state["layer.experts.w1"] = state["layer.experts.w1"][:1]


def test_experts_that_are_not_there() -> None:
    """Whatever else is gathered would be no checkpoint."""
    with pytest.raises(tl.InvalidArgument, match="1 weights of experts are not in the state dict"):
        tl.gather_state_dict(Cut(make_layer(CASE, None)))


def test_the_correction_bias_of_a_narrow_checkpoint() -> None:
    """load_state_dict(assign=True) brings the checkpoint's tensors; steps of a bias would be rounded away."""
    layer = make_layer(CASE, None)
    layer.load_state_dict({name: value.bfloat16() for name, value in layer.state_dict().items()}, assign=True)
    assert layer.correction_bias.dtype == FP32
    assert layer.experts.w1.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_correction_bias_stays_float32(dtype: torch.dtype) -> None:
    """In bfloat16 small steps would be rounded away."""
    layer = make_layer(CASE, None)
    before = layer.correction_bias.clone()
    layer.to(dtype)
    assert layer.experts.w1.dtype == dtype
    assert torch.equal(layer.correction_bias, before)
    assert layer.correction_bias.dtype == FP32


def test_a_layer_that_was_on_meta() -> None:
    layer = make_layer(CASE, None, main_grads=True)
    layer.to("meta").to_empty(device="cpu")
    layer.reset_parameters(seed=3)
    assert not layer.correction_bias.any()
    assert not layer.expert_counts.any()
    layer(torch.ones(2, HIDDEN))[0].sum().backward()
    assert layer.experts.w1.main_grad.any()
    assert layer.experts.w1.grad is None


def test_experts_that_thaw() -> None:
    """Those of a copy too, which had no hook to take along."""
    layer = make_layer(CASE, None, main_grads=True)
    layer.requires_grad_(False)
    for each in (layer, copy.deepcopy(layer)):
        each.requires_grad_(True)
        each(torch.ones(2, HIDDEN))[0].sum().backward()
        assert each.experts.w1.main_grad.any()
        assert each.experts.w1.grad is None
        once = each.experts.w1.main_grad.clone()
        each(torch.ones(2, HIDDEN))[0].sum().backward()
        torch.testing.assert_close(each.experts.w1.main_grad, 2 * once)  # and no hook adds twice


def test_a_policy_that_keeps_products() -> None:
    """Biases are added to something else than what the policy has kept, or recomputation would add them again."""
    layer = make_layer(CASE, None)
    x = torch.ones(5, HIDDEN, requires_grad=True)
    given = [x, *layer.parameters()]
    wanted = torch.autograd.grad(layer(x)[0].square().sum(), given)
    out, _ = checkpoint(layer, x, use_reentrant=False, context_fn=keeping_products)
    for found, want in zip(torch.autograd.grad(out.square().sum(), given), wanted, strict=True):
        assert torch.equal(found, want)


BAD_OPTIONS: dict[str, dict[str, Any]] = {
    "router is None": {"router": None},
    "weight_layout is 'x'": {"weight_layout": "x"},
    "pool_rows is 0": {"pool_rows": 0},
    "pool_rows is True": {"pool_rows": True},
    "pool_rows is 1.5": {"pool_rows": 1.5},
    "dtype is torch.int32": {"dtype": torch.int32},
    "dtype is torch.float8_e4m3fn": {"dtype": torch.float8_e4m3fn},
}


@pytest.mark.parametrize("said", BAD_OPTIONS)
def test_bad_options_are_named(said: str) -> None:
    with pytest.raises(tl.InvalidArgument, match=said):
        make_layer(CASE, None, **BAD_OPTIONS[said])


# -- made on meta, and pickled --------------------------------------------------------------------------------


@on_ranks
@pytest.mark.parametrize("how", ["context", "argument", "shared communicator", "assigned"])
def test_a_layer_that_is_made_on_meta(context: RankContext, how: str) -> None:
    """No memory until to_empty; then a seed, or a checkpoint, gives what any layer has."""
    want = make_layer(CASE, context.group)
    comm = want.comm if how == "shared communicator" else None
    given = {"comm": comm, "max_tokens_per_rank": None} if comm else {}
    group = None if comm else context.group
    with torch.device("meta") if how != "argument" else nullcontext():
        layer = make_layer(CASE, group, **given, **({"device": "meta"} if how == "argument" else {}))
    assert all(each.is_meta for each in (*layer.parameters(), *layer.buffers()))
    assert layer.comm.device == context.device
    x = torch.ones(3, HIDDEN, device=context.device)
    with pytest.raises(tl.DeviceMismatch, match="to_empty"):
        layer(x)
    if how == "assigned":
        layer.load_state_dict(want.state_dict(), assign=True)
    else:
        layer.to_empty(device=context.device)
        if how == "argument":
            layer.reset_parameters(seed=9)
            want.reset_parameters(seed=9)
        else:
            layer.load_state_dict(want.state_dict())
    assert not layer.expert_counts.is_meta
    assert not layer.expert_counts.any()
    (out, aux_loss), (wanted, loss) = layer(x), want(x)
    assert torch.equal(out, wanted)
    assert torch.equal(aux_loss, loss)
    (out.sum() + aux_loss).backward()


def test_a_device_that_is_given_goes_before_meta() -> None:
    with torch.device("meta"):
        layer = make_layer(CASE, None, device="cpu")
    assert not any(each.is_meta for each in (*layer.parameters(), *layer.buffers()))


def test_a_layer_is_not_pickled(tmp_path: Path) -> None:
    """What stands for its ranks is of this process. It is copied, and saved by its state."""
    layer = make_layer(CASE, None)
    for module in (layer, layer.experts, nn.Sequential(layer)):
        for save in (pickle.dumps, lambda module: torch.save(module, tmp_path / "model.pt")):
            with pytest.raises(tl.InvalidArgument, match=r"cannot be pickled(.|\n)*state_dict"):
                save(module)
        copy.deepcopy(module)
        copy.copy(module)
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    other = make_layer(CASE, None)
    other.load_state_dict(torch.load(tmp_path / "state.pt"))


@on_ranks
def test_weights_in_shared_memory(context: RankContext) -> None:
    """torch's ``share_memory_`` of a DTensor is a segmentation fault."""
    layer = make_layer(CASE, context.group)
    want = layer.experts.w1.to_local().clone()
    assert layer.share_memory() is layer
    assert layer.experts.w1.to_local().is_shared()
    assert layer.router_weight.is_shared()
    assert torch.equal(layer.experts.w1.to_local(), want)
    layer(torch.ones(3, HIDDEN, device=context.device))[0].sum().backward()
