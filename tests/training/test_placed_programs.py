"""Training programs under a placement: data parallelism, compilers, torch's checkpoints, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.layer_cases import HIDDEN, NUM_EXPERTS, make_layer
from tests.support.on_ranks import on_ranks
from tests.training.test_checkpoints import CASE, Program, assert_same
from tests.training.test_placed_layer import all_near, placement_of, replicas_are_equal
from tokenloom.runtime.processes import RankContext
from tokenloom.training.shards import local_part

pytestmark = [
    pytest.mark.slow_on(1, 4),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]


def placed_program(context: RankContext, kind: str, seed: int = 1, **options: Any) -> Program:
    program = Program(context, kind, "adamw", seed, **options)
    tl.follow_placement(program.optimizer, program.model)
    return program


def everything(program: Program) -> dict[str, torch.Tensor]:
    """Parameters, buffers and states as checkpoints have them, whole. Collective."""
    model, states = get_state_dict(program.run, program.optimizer)
    found = dict(model)
    for name, own in states["state"].items():
        found |= {f"{name}/{key}": each for key, each in own.items() if torch.is_tensor(each)}
    return {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().cpu().clone()
        for name, each in found.items()
    }


@on_ranks
@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp"])
def test_data_parallelism(context: RankContext, kind: str) -> None:
    """Experts are left alone by both, so their replicas are those of the experts' own ranks."""
    plain, placed = (
        Program(context, kind, "adamw", 1),
        placed_program(context, kind, placement=placement_of(context, 1)),
    )
    for program in (plain, placed):
        program.train(2)
    all_near(everything(placed), everything(plain))
    replicas_are_equal(placed.model.moe)


# -- torch's checkpoints ----------------------------------------------------------------------------------------


def save(context: RankContext, folder: str) -> dict[str, torch.Tensor]:
    program = placed_program(context, "plain", placement=placement_of(context, 2))
    program.train(2)
    model, states = get_state_dict(program.run, program.optimizer)
    dcp.save({"model": model, "optimizer": states}, checkpoint_id=folder, process_group=context.group)
    return everything(program)


def load(context: RankContext, folder: str, want: dict[str, torch.Tensor], spare: int | None) -> None:
    options = {} if spare is None else {"placement": placement_of(context, spare, seed=3)}
    program = placed_program(context, "plain", seed=2, **options)
    model, states = get_state_dict(program.run, program.optimizer)
    both: Any = {"model": model, "optimizer": states}
    dcp.load(both, checkpoint_id=folder, process_group=context.group)
    loaded = {"model_state_dict": both["model"], "optim_state_dict": both["optimizer"]}
    set_state_dict(program.run, program.optimizer, **loaded)
    assert_same(everything(program), want)
    if spare is not None:
        replicas_are_equal(program.model.moe)


@pytest.mark.parametrize("spare", [None, 0, 1])
def test_checkpoints(ranks: Ranks, spare: int | None, tmp_path: Path) -> None:
    """From a placement to another number of ranks, and to another placement or none."""
    want = ranks.run(save, str(tmp_path))[0]
    assert want["moe.experts.w1"].shape[0] == NUM_EXPERTS
    assert want["moe.experts.w1/exp_avg"].any()
    ranks.run(load, str(tmp_path), want, spare)
    fewer = max(1, ranks.num_ranks // 2)
    ranks.pool.run(load, str(tmp_path), want, spare, ranks=fewer)


@on_ranks
def test_full_state_dicts(context: RankContext) -> None:
    """Whole tensors need not travel: each rank takes its slots' experts."""
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    first = placed_program(context, "plain", placement=placement_of(context, 2))
    first.train(1)
    model, states = get_state_dict(first.run, first.optimizer, options=full)
    objects: list[Any] = [{"model": model, "optimizer": states}]
    torch.distributed.broadcast_object_list(objects, group=context.group, group_src=0)
    second = placed_program(context, "plain", seed=2, placement=placement_of(context, 1, seed=4))
    set_model_state_dict(second.run, objects[0]["model"], options=full)
    set_optimizer_state_dict(second.run, second.optimizer, objects[0]["optimizer"], options=full)
    assert_same(everything(second), everything(first))
    replicas_are_equal(second.model.moe)


# -- other ways of training -------------------------------------------------------------------------------------


@on_ranks
def test_compiled(context: RankContext) -> None:
    """To the compiler a layer is one operator, whatever its slots."""
    torch._dynamo.reset()
    layers = [make_layer(CASE, context.group, device=context.device) for _ in range(1)]
    layers += [make_layer(CASE, context.group, spare_slots=1, device=context.device) for _ in range(2)]
    for layer in layers[1:]:
        tl.place_experts(layer, _last_expert_everywhere(layer))
    run: list[Callable[..., Any]] = [*layers]
    run[2] = torch.compile(layers[2], fullgraph=True, backend="aot_eager")
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(context.rank)).to(context.device)
    outs = [each(x)[0] for each in run]
    for layer, out in zip(layers, outs, strict=True):
        out.square().sum().backward()
        tl.reduce_replica_gradients(layer)
    assert torch.equal(outs[1], outs[2])
    all_near({"out": outs[1].detach()}, {"out": outs[0].detach()})
    for name, weight in layers[1].experts.named_parameters():
        other = layers[2].experts.get_parameter(name)
        assert torch.equal(local_part(weight.grad), local_part(other.grad)), name  # type: ignore[arg-type]


def _last_expert_everywhere(layer: tl.ExpertParallelMoE) -> tl.Placement:
    table = layer.comm.placement.to_tensor()  # type: ignore[union-attr]
    table[:, -1] = NUM_EXPERTS - 1
    return tl.Placement(table, num_experts=NUM_EXPERTS)


class Two(nn.Module):
    """Layers of one communicator, which has one placement for both."""

    def __init__(self, context: RankContext, **options: Any) -> None:
        super().__init__()
        self.first = make_layer(CASE, context.group, device=context.device, **options)
        where = {"comm": self.first.comm, "max_tokens_per_rank": None, "device": context.device}
        self.second = make_layer(CASE, None, **where)


@on_ranks
def test_layers_of_one_communicator(context: RankContext) -> None:
    """All of them move; a layer that was left behind says so, on all ranks, before anything is sent."""
    model = Two(context, spare_slots=1)
    optimizer = torch.optim.SGD(tl.split_parameters(model)[0], lr=0.1)
    tl.follow_placement(optimizer, model)
    placement = _last_expert_everywhere(model.first)
    x = torch.ones(3, HIDDEN, device=context.device)
    want = [layer(x)[0].detach() for layer in (model.first, model.second)]
    tl.place_experts(model.first, placement)
    with pytest.raises(tl.TokenloomError, match="the experts lie by another placement than their communicator's"):
        model.second(x)
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(tl.InvalidArgument, match="placed anew without this optimizer"):
            call()
    tl.place_experts(model, placement, optimizer)
    got = [layer(x)[0].detach() for layer in (model.first, model.second)]
    all_near(dict(enumerate(got)), dict(enumerate(want)))  # type: ignore[arg-type]
    optimizer.step()


@on_ranks
def test_an_optimizer_that_was_left_out(context: RankContext) -> None:
    """Its states come from where they were left, however often experts were placed meanwhile."""
    program = placed_program(context, "plain", placement=placement_of(context, 1))
    program.train(2)
    want = everything(program)
    layer = program.model.moe
    for seed in (2, 3):
        tl.place_experts(program.model, placement_of(context, 1, seed=seed))
    with pytest.raises(tl.InvalidArgument, match="placed anew without this optimizer"):
        program.optimizer.step()
    tl.place_experts(program.model, layer.comm.placement, program.optimizer)
    assert_same(everything(program), want)
    tl.place_experts(program.model, placement_of(context, 1, seed=4), program.optimizer)
    assert_same(everything(program), want)


@on_ranks
def test_moved_in_pieces(context: RankContext) -> None:
    """For serving: calls go on between the pieces, and a state dict of any stage is the same."""
    layer = make_layer(CASE, context.group, spare_slots=1, device=context.device)
    x = torch.ones(3, HIDDEN, device=context.device)
    full = tl.gather_state_dict(layer)
    with torch.no_grad():
        want = layer(x)[0]
        moving = layer.experts.move_experts(placement_of(context, 1), piece_bytes=1000)
        assert moving.num_steps > 2
        for _ in moving:
            assert_same(tl.gather_state_dict(layer), full)
            all_near({"out": layer(x)[0]}, {"out": want})
            assert layer.experts.placement == layer.comm.placement
    tl.place_experts(layer, placement_of(context, 1, seed=2))
    all_near({"out": layer(x)[0].detach()}, {"out": want})


@on_ranks
def test_norms(context: RankContext) -> None:
    """Each expert counts once, with its whole gradient, once gradients are summed."""
    norms = []
    for options in ({}, {"placement": placement_of(context, 2)}):
        layer = make_layer(CASE, context.group, device=context.device, **options)
        layer(torch.ones(4, HIDDEN, device=context.device))[0].square().sum().backward()
        tl.reduce_replica_gradients(layer)
        norms.append(tl.clip_grad_norm_(layer.expert_parameters(), 1e-3))
    assert abs(norms[1] / norms[0] - 1) < 1e-4


# -- bad input --------------------------------------------------------------------------------------------------


@on_ranks
def test_refusals(context: RankContext) -> None:
    """Before anything is sent; the layer works on."""
    placement = placement_of(context, 1)
    layer = make_layer(CASE, context.group, placement=placement, device=context.device)
    comm = layer.comm
    sizes = {"max_tokens_per_rank": None, "device": context.device}
    with pytest.raises(tl.InvalidArgument, match="make the communicator with the placement"):
        make_layer(CASE, None, comm=comm, placement=placement, **sizes)
    with pytest.raises(tl.InvalidArgument, match="make the communicator with the placement"):
        make_layer(CASE, None, comm=comm, spare_slots=1, **sizes)
    with pytest.raises(tl.InvalidArgument, match="both placement and spare_slots"):
        make_layer(CASE, context.group, placement=placement, spare_slots=1, device=context.device)
    with pytest.raises(tl.InvalidArgument, match="spare_slots is -1"):
        make_layer(CASE, context.group, spare_slots=-1, device=context.device)
    with pytest.raises(tl.InvalidArgument, match="slots_per_rank"):
        tl.place_experts(layer, placement_of(context, 2))
    with pytest.raises(tl.InvalidArgument, match="was made without a placement"):
        tl.place_experts(make_layer(CASE, context.group, device=context.device), placement)
    with pytest.raises(tl.InvalidArgument, match="no ExpertParallelMoE"):
        tl.place_experts(nn.Linear(2, 2), placement)
    optimizer = torch.optim.SGD(layer.expert_parameters(), lr=0.1)
    with pytest.raises(tl.InvalidArgument, match="no weights of the module's experts"):
        tl.follow_placement(optimizer, make_layer(CASE, context.group, device=context.device))
    tl.follow_placement(optimizer, layer)
    with pytest.raises(tl.InvalidArgument, match="follows a placement already"):
        tl.follow_placement(optimizer, layer)
    wrong = {"w1": torch.zeros(NUM_EXPERTS + 1, *layer.experts.w1.shape[1:], device=context.device)}
    with pytest.raises(tl.ShapeMismatch, match=f"expected {NUM_EXPERTS} experts in their order"):
        layer.experts.load_state_dict(wrong, strict=False)
    if context.num_ranks > 1:
        with pytest.raises(tl.PlanMismatch, match=r"slots of expert|placement before|slots_per_rank"):
            tl.place_experts(layer, placement_of(context, 1, seed=context.rank))
        if context.rank == 0:
            layer.experts.w1.grad = torch.zeros_like(layer.experts.w1)
        with pytest.raises(tl.PlanMismatch, match="tensors"):
            tl.reduce_replica_gradients(layer)
        layer.zero_grad()
    layer(torch.ones(3, HIDDEN, device=context.device))
    comm.check()


@on_ranks
def test_pruned_experts(context: RankContext) -> None:
    """Masks would have to follow replicas."""
    layer = make_layer(CASE, context.group, spare_slots=1, device=context.device)
    nn.utils.prune.custom_from_mask(layer.experts, "w2", torch.ones_like(layer.experts.w2))
    for call in (layer.state_dict, lambda: tl.place_experts(layer, _last_expert_everywhere(layer))):
        with pytest.raises(tl.InvalidArgument, match="parametrized or pruned"):
            call()
