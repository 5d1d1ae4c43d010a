"""ExpertParallelMoE inside training programs: gradients of W ranks against a dense computation of all their tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.layer_cases import (
    HIDDEN,
    ROUTERS,
    LayerCase,
    assert_near,
    dense_aux_loss,
    dense_layer,
    expect,
    full_weights,
    make_inputs,
    make_layer,
    short,
)
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.processes import RankContext

pytestmark = pytest.mark.slow_on(4)

CASE = LayerCase(dtype=torch.float32)
"""Losses and a shared expert; as many tokens as they like on each rank, none on the second."""
BLOCKS = 2


class Model(nn.Module):
    """Layers that share a communicator, each beside a residual, between a dense input and a dense head.

    Args:
        run: how each layer is called, as by checkpointing.
        options: of the layers.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh,
        case: LayerCase,
        run: Callable[..., Any] = lambda layer, x: layer(x),
        **options: Any,
    ) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inner, self.head = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        first = make_layer(case, group, **options)  # type: ignore[arg-type]
        shared = options | {"comm": first.comm, "max_tokens_per_rank": None}
        self.layers = nn.ModuleList([first, *(make_layer(case, None, **shared) for _ in range(BLOCKS - 1))])
        for number, layer in enumerate(self.layers[1:]):
            layer.reset_parameters(seed=number)
        self.run = run
        self.to(first.comm.device)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.inner(x)
        aux_loss = x.new_zeros(())
        for layer in self.layers:
            out, more = self.run(layer, x)
            x, aux_loss = x + out, aux_loss + more
        return self.head(x), aux_loss

    def sharded_names(self) -> list[str]:
        experts = {each for layer in self.layers for each in layer.expert_parameters()}
        return [name for name, parameter in self.named_parameters() if parameter in experts]


def data_parallel(model: Model, group: dist.ProcessGroup) -> nn.Module:
    """DDP around all but the experts."""
    return tl.data_parallel(model, process_group=group)


def expected_gradients(
    case: LayerCase,
    full: Mapping[str, torch.Tensor],
    xs: Sequence[torch.Tensor],
    factors: Sequence[torch.Tensor],
    groups: Sequence[Sequence[int]] | None = None,
) -> dict[str, torch.Tensor]:
    """Of the mean over ranks of their losses, by name, every expert computed on every token.

    Args:
        full: the full state dict. xs, factors: of every rank; its loss is the sum of outputs times factors.
        groups: ranks that share experts, whose balance loss is that of their tokens; all ranks by default.
    """
    weights = {name: value.double().requires_grad_() for name, value in full.items()}
    groups = groups or [range(len(xs))]
    hidden = [x.double() @ weights["inner.weight"].T for x in xs]
    loss = torch.zeros((), dtype=torch.float64)
    for index in range(BLOCKS):
        prefix = f"layers.{index}."
        own = {short(name.removeprefix(prefix)): each for name, each in weights.items() if name.startswith(prefix)}
        parts = [dense_layer(each, own, ROUTERS[case.router], None) for each in hidden]
        for group in groups:
            loss = loss + dense_aux_loss(case, [parts[rank] for rank in group]) / len(groups)
        hidden = [each + part.out for each, part in zip(hidden, parts, strict=True)]
    outs = [each @ weights["head.weight"].T for each in hidden]
    loss = loss + torch.stack([(out * f.double()).sum() for out, f in zip(outs, factors, strict=True)]).mean()
    loss.backward()
    return {name: value.grad for name, value in weights.items() if value.grad is not None}


def backward(
    context: RankContext, run: nn.Module, xs: Sequence[torch.Tensor], factors: Sequence[torch.Tensor]
) -> None:
    """Of this rank's loss; aux_loss is a mean over ranks already, and a trainer that averages leaves it as it is."""
    out, aux_loss = run(xs[context.rank].to(context.device))
    ((out * factors[context.rank].to(context.device)).sum() + aux_loss).backward()


def assert_gradients(model: Model, want: Mapping[str, torch.Tensor]) -> None:
    """Of the replicated parameters, and of this rank's experts."""
    own = model.layers[0].local_experts
    sharded = model.sharded_names()
    names = [name for name, _ in model.named_parameters()]
    assert set(names) == set(want)
    for name, parameter in model.named_parameters():
        grad = getattr(parameter, "main_grad", parameter.grad)
        grad = grad.full_tensor() if isinstance(grad, DTensor) and name not in sharded else grad
        wanted = want[name][own.start : own.stop] if name in sharded else want[name]
        assert_near(grad, wanted, torch.float32, f"gradient of {name}")


def train_two_steps(
    context: RankContext, run: nn.Module, model: Model, full: Mapping[str, torch.Tensor], case: LayerCase
) -> None:
    """Each time from zero gradients, which are compared; ``run`` is the model, or what is around it."""
    xs, factors = make_inputs(case, context.num_ranks)
    want = expected_gradients(case, full, xs, factors)
    for _ in range(2):
        model.zero_grad()
        backward(context, run, xs, factors)
        assert_gradients(model, want)


# -- DDP ----------------------------------------------------------------------------------------------------

PROGRAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpoint": {"run": lambda layer, x: checkpoint(layer, x, use_reentrant=False)},
    "reentrant_checkpoint": {"run": lambda layer, x: checkpoint(layer, x, use_reentrant=True)},
    "rows_sent_again": {"redispatch_in_backward": True},
    "rows_sent_again_in_a_checkpoint": {
        "redispatch_in_backward": True,
        "run": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    },
    "bounded_rows": {"pool_rows": 200},
}


def train_beside_ddp(context: RankContext, name: str, case: LayerCase) -> None:
    """Two steps: DDP makes its buckets anew after the first."""
    model = Model(context.group, replace(case, expert_grad_scale=1 / context.num_ranks), **PROGRAMS[name])
    full = tl.gather_state_dict(model)
    train_two_steps(context, data_parallel(model, context.group), model, full, case)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_ddp_around_the_dense_part(ranks: Ranks, name: str) -> None:
    """Ranks differ in their tokens and the second has none."""
    ranks.run(train_beside_ddp, name, CASE)


@pytest.mark.parametrize("name", ["plain", "checkpoint"])
def test_ddp_with_all_tokens_on_one_rank(ranks: Ranks, name: str) -> None:
    ranks.run(train_beside_ddp, name, replace(CASE, tokens=(9, 0, 0, 0, 0, 0, 0, 0)))


# -- accumulation -------------------------------------------------------------------------------------------


def accumulate(context: RankContext, case: LayerCase, main_grads: bool) -> None:
    """Three micro-batches, in some of which ranks have no tokens; DDP reduces in the last one."""
    model = Model(context.group, replace(case, expert_grad_scale=1 / context.num_ranks), main_grads=main_grads)
    full = tl.gather_state_dict(model)
    ddp = data_parallel(model, context.group)
    xs, factors = make_inputs(case, context.num_ranks)
    micro = [([x[i::3] for x in xs], [f[i::3] for f in factors]) for i in range(3)]
    for batch in micro[:-1]:
        with ddp.no_sync():  # type: ignore[operator]
            backward(context, ddp, *batch)
    backward(context, ddp, *micro[-1])
    if case.balance_coef:
        parts = [expected_gradients(case, full, *batch) for batch in micro]
        want = {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
    else:
        want = expected_gradients(case, full, xs, factors)
    assert_gradients(model, want)


@pytest.mark.parametrize("main_grads", [False, True])
def test_micro_batches_equal_one_batch(ranks: Ranks, main_grads: bool) -> None:
    ranks.run(accumulate, replace(CASE, balance_coef=0.0, z_coef=0.0), main_grads)


def test_losses_of_the_router_are_those_of_a_micro_batch(ranks: Ranks) -> None:
    """They are means over tokens and products of means: what is added up are the micro-batches' own."""
    ranks.run(accumulate, CASE, False)


# -- losses --------------------------------------------------------------------------------------------------


@on_ranks("several_ranks")
@pytest.mark.parametrize("left_out", ["out", "aux_loss"])
def test_a_loss_of_one_result_on_one_rank(context: RankContext, left_out: str) -> None:
    """The last rank leaves one of the results out of its loss, as one without tokens may. Its backward takes part in
    both gradients; else a sum over ranks would pair with another one, in silence."""
    case, last = replace(LayerCase(), router_grad="sum"), context.num_ranks - 1
    layer = make_layer(case, context.group)
    (xs, factors), share = make_inputs(case, context.num_ranks), last / context.num_ranks
    wanted = case
    if left_out == "aux_loss":
        wanted = replace(case, balance_coef=share * case.balance_coef, z_coef=share * case.z_coef)
    else:
        factors = [*factors[:-1], torch.zeros_like(factors[-1])]
    want = expect(wanted, full_weights(layer), xs, factors)
    out, aux_loss = layer(xs[context.rank].to(context.device))
    out *= factors[context.rank].to(context.device)  # in place, as users may
    losses = {"out": out.sum(), "aux_loss": aux_loss / context.num_ranks}
    if context.rank == last:
        del losses[left_out]
    torch.stack(list(losses.values())).sum().backward()
    for name in ("router_weight", "shared_w1"):
        assert_near(layer.get_parameter(name).grad, want.grads[name], case.dtype, f"gradient of {name}")


# -- FSDP2 --------------------------------------------------------------------------------------------------


def fully_sharded(context: RankContext, unit_per_layer: bool, **options: Any) -> Model:
    """Everything but the experts is sharded over the ranks."""
    model = Model(context.group, replace(CASE, expert_grad_scale=1 / context.num_ranks), **options)
    mesh = DeviceMesh.from_group(context.group, context.device.type)
    experts = set(tl.split_parameters(model)[0])
    for layer in model.layers if unit_per_layer else []:
        fully_shard(layer, mesh=mesh, ignored_params=experts)
    fully_shard(model, mesh=mesh, ignored_params=experts)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert (parameter.device_mesh == mesh) is (name not in model.sharded_names())
    return model


@on_ranks
def test_seeds_beside_fsdp(context: RankContext) -> None:
    """Sharded first, and then drawn, as models that were on the meta device are."""
    model, whole = fully_sharded(context, True), Model(context.group, CASE)
    for number, layers in enumerate(zip(model.layers, whole.layers, strict=True)):
        for layer in layers:
            layer.reset_parameters(seed=number)
        sharded, want = (dict(layer.named_parameters()) for layer in layers)
        for name, value in sharded.items():
            wanted = want[name]
            assert torch.equal(value.full_tensor(), wanted.full_tensor() if isinstance(wanted, DTensor) else wanted), (
                name
            )


@on_ranks
@pytest.mark.parametrize("name", ["plain", "checkpoint"])
@pytest.mark.parametrize("unit_per_layer", [False, True], ids=["one_unit", "unit_per_layer"])
def test_fsdp_around_the_dense_part(context: RankContext, name: str, unit_per_layer: bool) -> None:
    full = tl.gather_state_dict(Model(context.group, CASE))
    model = fully_sharded(context, unit_per_layer, **PROGRAMS[name])
    train_two_steps(context, model, model, full, CASE)


@on_ranks
def test_checkpoints_beside_fsdp(context: RankContext) -> None:
    """torch's tools gather experts like what FSDP has sharded. test_checkpoints.py distributes them too."""
    model = fully_sharded(context, True)
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in tl.gather_state_dict(model).items():
        assert torch.equal(value, found[name].cpu()), name
    assert {name: value.shape for name, value in found.items()} == {
        name: value.shape for name, value in tl.gather_state_dict(Model(context.group, CASE)).items()
    }


# -- DeviceMesh ---------------------------------------------------------------------------------------------


def train_on_a_mesh(context: RankContext) -> None:
    """Experts are sharded over ``ep`` and replicated over ``dp``, all else is replicated over both."""
    size = max(1, context.num_ranks // 2)
    mesh = init_device_mesh(context.device.type, (context.num_ranks // size, size), mesh_dim_names=("dp", "ep"))
    model = Model(mesh["ep"], replace(CASE, expert_grad_scale=1 / context.num_ranks))
    assert model.layers[0].comm.num_ranks == size
    full = tl.gather_state_dict(model)
    ddp = data_parallel(model, context.group)
    xs, factors = make_inputs(CASE, context.num_ranks)
    backward(context, ddp, xs, factors)
    for layer in model.layers:
        for parameter in layer.expert_parameters():
            dist.all_reduce(parameter.grad.to_local(), group=mesh.get_group("dp"))
    assert_gradients(model, expected_gradients(CASE, full, xs, factors, mesh.mesh.tolist()))


@pytest.mark.slow
def test_a_mesh_of_data_and_expert_parallelism(ranks: Ranks) -> None:
    if ranks.num_ranks != ranks.pool.num_ranks:
        pytest.skip("a mesh takes all processes of the pool")
    ranks.run(train_on_a_mesh)
