"""Checkpoints: gathered on W ranks, loaded on any other number of ranks, and back, to the bit."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import tokenloom as tl
from tests.conftest import GROUP_SIZES, Ranks
from tests.support.layer_cases import HIDDEN, NUM_EXPERTS, LayerCase, assert_near, make_inputs, make_layer
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.processes import RankContext
from tokenloom.training.shards import local_part

CASE = LayerCase(router="deepseek_v3", balance_coef=0.0, z_coef=0.0, biases=True)
"""With a correction bias, which is a buffer, and with biases of experts, which are sharded like their weights."""
FP32, BF16 = torch.float32, torch.bfloat16


@on_ranks("several_ranks")
def test_no_checkpoint_without_masked_ranks(context: RankContext) -> None:
    """Their experts would be zeros in it."""
    model = make_model(context, replace(CASE, dtype=FP32), 1)  # float64 would travel by NCCL, which masks no ranks
    last = context.num_ranks - 1
    if context.rank == last:
        return
    for block in model[1:]:
        block.moe.comm.mask_ranks([last])
    with pytest.raises(tl.InvalidArgument, match=rf"rank\(s\) {last} are masked"):
        tl.gather_state_dict(model)


@on_ranks
def test_no_checkpoint_of_parts(context: RankContext) -> None:
    """Where something has cut experts once more, a rank has but a part of its own."""
    layer = make_layer(replace(CASE, dtype=FP32), context.group)
    assert context.group is not None
    mesh = DeviceMesh.from_group(context.group, context.device.type)
    layer.experts.w1 = nn.Parameter(DTensor.from_local(layer.experts.w1.detach().to_local()[:1], mesh, [Shard(0)]))
    with pytest.raises(tl.InvalidArgument, match="1 weights of experts are not in the state dict"):
        tl.gather_state_dict(layer)


class Block(nn.Module):
    """A layer inside a layer, beside replicated parameters and a buffer."""

    def __init__(self, context: RankContext | None, case: LayerCase) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, dtype=case.dtype)
        self.moe = make_layer(case, None if context is None else context.group)
        self.register_buffer("steps", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(self.norm(x))[0]


def make_model(context: RankContext | None, case: LayerCase, seed: int) -> nn.Sequential:
    """A model with two layers at different depths. Experts differ between seeds, and so does everything else."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN, dtype=case.dtype), Block(context, case), Block(context, case))
    if context is not None:
        model.to(context.device)
    for index, block in enumerate(model[1:]):
        block.moe.reset_parameters(seed=2 * seed + index)
        block.moe.correction_bias.uniform_(-0.5, 0.5)
        block.steps += seed
    return model


def pack(tensors: dict[str, torch.Tensor]) -> bytes:
    """Between processes, and as people keep checkpoints."""
    file = io.BytesIO()
    torch.save(tensors, file)
    return file.getvalue()


def unpack(data: bytes) -> dict[str, torch.Tensor]:
    return torch.load(io.BytesIO(data), weights_only=True)


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name


def outputs(context: RankContext | None, model: nn.Module, case: LayerCase) -> torch.Tensor:
    """[T, H] of this rank; without a context, of all four ranks' tokens at once."""
    xs, _ = make_inputs(case, 8)
    if context is None:
        return model(torch.cat(xs)).detach()
    # Ranks take the inputs of the eight in turn, so that groups of any size see the same tokens.
    mine = torch.cat(xs[context.rank :: context.num_ranks]).to(context.device)
    return model(mine).detach().cpu()


def write(context: RankContext, case: LayerCase) -> tuple[bytes, bytes]:
    """(checkpoint, outputs) of a new model."""
    model = make_model(context, case, seed=1)
    return pack(tl.gather_state_dict(model)), pack({"out": outputs(context, model, case)})


def read(context: RankContext, case: LayerCase, data: bytes) -> tuple[bytes, bytes]:
    """(checkpoint, outputs) of another model that loaded ``data``."""
    model = make_model(context, case, seed=2)
    result = model.load_state_dict(tl.shard_state_dict(model, unpack(data)))
    assert not result.missing_keys
    assert not result.unexpected_keys
    return pack(tl.gather_state_dict(model)), pack({"out": outputs(context, model, case)})


def by_token(outs: list[bytes], case: LayerCase) -> torch.Tensor:
    """The outputs of all ranks in the order of the eight inputs, whatever the number of ranks."""
    sizes = [len(x) for x in make_inputs(case, 8)[0]]
    parts: dict[int, torch.Tensor] = {}
    for rank, out in enumerate(outs):
        indices = range(rank, 8, len(outs))
        parts |= zip(indices, unpack(out)["out"].split([sizes[i] for i in indices]), strict=True)
    return torch.cat([parts[i] for i in range(8)])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float64, FP32, BF16], ids=str)
def test_a_checkpoint_of_any_number_of_ranks_loads_on_any_other(ranks: Ranks, dtype: torch.dtype) -> None:
    """Written on W, read on 1, 2, 4 (8), and read again on W: the same weights, and there the same outputs.

    Between different W outputs differ by the order of sums; in bfloat16 that is enough to change a choice of the
    second layer's router, so only weights are compared there.
    """
    case = replace(CASE, dtype=dtype)
    written = ranks.run(write, case)
    full = unpack(written[0][0])
    for data, _ in written:
        assert_same(unpack(data), full)  # every rank has all of it
    first = by_token([out for _, out in written], case)

    alone = make_model(None, case, seed=2)
    alone.load_state_dict(tl.shard_state_dict(alone, full))
    assert_same(tl.gather_state_dict(alone), full)
    if dtype != BF16:
        assert_near(first, outputs(None, alone, case), dtype, "outputs of one process")

    for num_ranks in GROUP_SIZES:
        if num_ranks > ranks.pool.num_ranks:
            continue
        results = ranks.pool.run(read, case, pack(tl.gather_state_dict(alone)), ranks=num_ranks)
        for data, _ in results:
            assert_same(unpack(data), full)
        again = by_token([out for _, out in results], case)
        if num_ranks == ranks.num_ranks:
            assert torch.equal(again, first)
        elif dtype != BF16:
            assert_near(again, first, dtype, f"outputs of {num_ranks} ranks")


@on_ranks
def test_which_experts_a_rank_keeps(context: RankContext) -> None:
    model = make_model(context, CASE, seed=1)
    full = tl.gather_state_dict(model)
    layer = model[1].moe
    local = NUM_EXPERTS // context.num_ranks
    assert layer.local_experts == range(context.rank * local, (context.rank + 1) * local)
    own = slice(layer.local_experts.start, layer.local_experts.stop)
    part = tl.shard_state_dict(model, full)
    assert part.keys() == full.keys() == model.state_dict().keys()
    for name, value in full.items():
        assert value.device.type == "cpu"
        assert not value.requires_grad
        sharded = name.endswith((".w1", ".w2", ".w1_bias", ".w2_bias"))
        assert value.shape[0:1] == ((NUM_EXPERTS,) if sharded else model.state_dict()[name].shape[0:1])
        has_mesh = hasattr(model.state_dict()[name], "device_mesh")
        assert has_mesh == (sharded and layer.experts.mesh is not None), "torch's checkpoints save what lies here"
        kept = local_part(part[name])
        assert torch.equal(kept.cpu(), value[own] if sharded else value)
        assert kept.untyped_storage().nbytes() == kept.nbytes, "all ranks' experts stay in memory"
        assert torch.equal(kept.cpu(), local_part(model.state_dict()[name]).cpu())
    # The canonical layouts: what other frameworks' checkpoints are converted to.
    assert full["1.moe.experts.w1"].shape == (NUM_EXPERTS, 2 * CASE.intermediate, HIDDEN)
    assert full["1.moe.experts.w2"].shape == (NUM_EXPERTS, HIDDEN, CASE.intermediate)
    assert full["1.moe.experts.w1_bias"].shape == (NUM_EXPERTS, 2 * CASE.intermediate)
    assert full["1.moe.experts.w2_bias"].shape == (NUM_EXPERTS, HIDDEN)
    assert full["1.moe.correction_bias"].dtype == FP32
    assert full["1.steps"] == 8
    assert "1.moe.expert_counts" not in full  # of the last forward, not of the model
    full["1.moe.router_weight"].zero_()
    assert layer.router_weight.abs().sum() > 0  # the dict owns its tensors


@on_ranks
def test_a_layer_by_itself(context: RankContext) -> None:
    """The module is the layer itself: names have no prefix."""
    layer = make_layer(CASE, context.group)
    full = tl.gather_state_dict(layer)
    assert full["experts.w1"].shape[0] == full["experts.w2"].shape[0] == NUM_EXPERTS
    with torch.no_grad():
        layer.experts.w1.zero_()
    layer.load_state_dict(tl.shard_state_dict(layer, full))
    assert_same(tl.gather_state_dict(layer), full)


@on_ranks
def test_a_layer_under_two_names(context: RankContext) -> None:
    """One layer under two names, as models that share layers have it: both names are sharded."""
    layer = make_layer(CASE, context.group)
    model = nn.ModuleDict({"first": layer, "again": layer})
    full = tl.gather_state_dict(model)
    assert full["first.experts.w1"].shape[0] == full["again.experts.w1"].shape[0] == NUM_EXPERTS
    model.load_state_dict(tl.shard_state_dict(model, full))


def test_another_number_of_experts_is_named() -> None:
    model = make_model(None, CASE, seed=1)
    full = tl.gather_state_dict(model)
    full["2.moe.experts.w2"] = full["2.moe.experts.w2"][:6]
    with pytest.raises(tl.ShapeMismatch, match=r"2\.moe\.experts\.w2 has 6 experts, the layer has 8"):
        tl.shard_state_dict(model, full)


def test_missing_and_unexpected_names_are_left_to_load_state_dict() -> None:
    """strict=False must be able to load part of a model."""
    model = make_model(None, CASE, seed=1)
    full = tl.gather_state_dict(model)
    del full["1.moe.experts.w1"], full["0.bias"]
    full["3.weight"] = torch.zeros(1)
    part = tl.shard_state_dict(model, full)
    with pytest.raises(
        RuntimeError, match=r"Missing key\(s\).*0\.bias.*1\.moe\.experts\.w1(.|\n)*Unexpected key\(s\).*3\.w"
    ):
        model.load_state_dict(part)
    result = model.load_state_dict(part, strict=False)
    assert result.missing_keys == ["0.bias", "1.moe.experts.w1"]
    assert result.unexpected_keys == ["3.weight"]
