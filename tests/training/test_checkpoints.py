"""Checkpoints by torch's own tools: experts and their optimiser states, from any number of ranks to any other."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune

import tokenloom as tl
from tests.conftest import GROUP_SIZES, Ranks
from tests.support.layer_cases import HIDDEN, NUM_EXPERTS, LayerCase, make_layer
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.processes import RankContext
from tokenloom.training.shards import make_mesh

pytestmark = [
    pytest.mark.slow_on(4),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]

FP32 = torch.float32
CASE = LayerCase(router="deepseek_v3", balance_coef=0.0, z_coef=0.0, biases=True, router_grad="sum", dtype=FP32)
"""With a correction bias, which is a buffer, and with biases of experts, which are sharded like their weights."""
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "adamw_foreach": lambda groups: torch.optim.AdamW(groups, lr=0.01, foreach=True),
    "adamw_fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
}


class Model(nn.Module):
    def __init__(self, group: Any, case: LayerCase, seed: int, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(HIDDEN, HIDDEN, dtype=case.dtype)
        self.moe = make_layer(case, group, **options)
        self.to(self.moe.comm.device)
        self.moe.reset_parameters(seed=seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(self.inner(x))[0]


class Program:
    """A model, what is around it, and its optimiser.

    Args:
        kind: "plain", "ddp" or "fsdp".
        context: None for a process without a group.
        options: of the layer.
    """

    def __init__(self, context: RankContext | None, kind: str, optimizer: str, seed: int, **options: Any) -> None:
        group = None if context is None else context.group
        num_ranks = 1 if context is None else context.num_ranks
        # DDP and FSDP average what router_grad="sum" would sum.
        case = replace(CASE, expert_grad_scale=1 / num_ranks, router_grad="sum" if kind == "plain" else "local")
        self.context, self.kind = context, kind
        self.model = Model(group, case, seed, **options)
        self.run: nn.Module = self.model
        experts, self.others = tl.split_parameters(self.model)
        if kind == "ddp":
            self.run = tl.data_parallel(self.model, process_group=group)
        elif kind == "fsdp":
            assert context is not None
            mesh = DeviceMesh.from_group(context.group, context.device.type)
            fully_shard(self.model, mesh=mesh, ignored_params=set(experts))
            experts, self.others = tl.split_parameters(self.model)
        self.optimizer = OPTIMIZERS[optimizer]([{"params": self.others}, {"params": experts}])

    def train(self, steps: int) -> None:
        rank, device = (0, torch.device("cpu")) if self.context is None else (self.context.rank, self.context.device)
        for step in range(steps):
            x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
            self.optimizer.zero_grad()
            self.run(x).square().mean().backward()
            if self.kind == "plain" and self.context is not None:
                dist.all_reduce(self.model.inner.weight.grad, group=self.context.group)
                dist.all_reduce(self.model.inner.bias.grad, group=self.context.group)
            self.optimizer.step()

    def everything(self) -> dict[str, torch.Tensor]:
        """Parameters, buffers and optimiser states, whole, on the CPU. Collective."""
        named = dict(self.model.named_parameters())
        found = named | dict(self.model.named_buffers())
        for name, parameter in named.items():
            states = self.optimizer.state[parameter]
            found |= {f"{name}/{key}": value for key, value in states.items() if isinstance(value, torch.Tensor)}
        return {name: whole(value) for name, value in found.items() if "expert_counts" not in name}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


# -- saved and loaded by torch ----------------------------------------------------------------------------------


def save(context: RankContext, kind: str, optimizer: str, folder: str) -> dict[str, torch.Tensor]:
    program = Program(context, kind, optimizer, seed=1)
    program.train(2)
    everything = program.everything()
    program.model.moe.comm.close()  # torch's tools need no communicator
    model, states = get_state_dict(program.run, program.optimizer)
    dcp.save({"model": model, "optimizer": states}, checkpoint_id=f"{folder}/both", process_group=context.group)
    dcp.save(program.model.state_dict(), checkpoint_id=f"{folder}/weights", process_group=context.group)
    model = get_model_state_dict(program.run, options=FULL)
    states = get_optimizer_state_dict(program.run, program.optimizer, options=FULL)
    if context.rank == 0:
        assert model["moe.experts.w1"].shape[0] == NUM_EXPERTS
        torch.save({"model": model, "optimizer": states}, f"{folder}/full.pt")
    return everything


def load(
    context: RankContext | None, kind: str, optimizer: str, folder: str, want: dict[str, torch.Tensor], world: bool
) -> None:
    """Load each file into a new model, with other weights. ``world``: all ranks of torch.distributed are here."""
    group = None if context is None else context.group
    for way in ("both", "weights", "full", *(["broadcast"] if world else [])):
        program = Program(context, kind, optimizer, seed=2)
        if way == "both":
            model, states = get_state_dict(program.run, program.optimizer)
            both = {"model": model, "optimizer": states}
            dcp.load(both, checkpoint_id=f"{folder}/both", process_group=group)
            set_state_dict(
                program.run,
                program.optimizer,
                model_state_dict=both["model"],
                optim_state_dict=both["optimizer"],  # type: ignore[arg-type]
            )
        elif way == "weights":
            weights = program.model.state_dict()
            dcp.load(weights, checkpoint_id=f"{folder}/weights", process_group=group)
            program.model.load_state_dict(weights)
            got = {name: whole(value) for name, value in program.model.state_dict().items()}
            assert_same(got, {name: want[name] for name in got})
            continue
        else:
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=way == "broadcast")
            full: dict[str, Any] = {"model": {}, "optimizer": {}}
            if way == "full" or (context is not None and context.rank == 0):
                full = torch.load(f"{folder}/full.pt", weights_only=True)
            set_model_state_dict(program.run, full["model"], options=options)
            set_optimizer_state_dict(program.run, program.optimizer, full["optimizer"], options=options)
        assert_same(program.everything(), want)
        program.train(1)
        assert not torch.equal(program.everything()["moe.experts.w1"], want["moe.experts.w1"])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp"])
def test_what_any_number_of_ranks_saves_any_other_loads(
    ranks: Ranks, kind: str, optimizer: str, tmp_path: Path
) -> None:
    """Each rank writes its own experts, and reads what it needs of others' files."""
    if ranks.device == "cuda" and optimizer != "adamw_foreach":
        pytest.skip("the same on CPUs")
    want, *others = ranks.run(save, kind, optimizer, str(tmp_path))
    for other in others:
        assert_same(other, want)
    assert {name.rpartition("/")[2] for name in want if "w1/" in name} >= (
        {"momentum_buffer"} if optimizer == "sgd" else {"exp_avg", "exp_avg_sq"}
    )
    for num_ranks in GROUP_SIZES:
        if num_ranks <= ranks.pool.num_ranks:
            world = num_ranks == ranks.pool.num_ranks
            ranks.pool.run(load, kind, optimizer, str(tmp_path), want, world, ranks=num_ranks)
    if kind == "plain" and ranks.device == "cpu":
        load(None, kind, optimizer, str(tmp_path), want, False)


def save_replicas(context: RankContext, folder: str) -> dict[str, torch.Tensor]:
    """Experts over the rows of a mesh, and replicas of them over its columns, which save under the same names."""
    size = max(1, context.num_ranks // 2)
    mesh = init_device_mesh(context.device.type, (context.num_ranks // size, size), mesh_dim_names=("dp", "ep"))
    model = Model(mesh["ep"], CASE, seed=1)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    return tl.gather_state_dict(model)


def load_weights(context: RankContext, folder: str, want: dict[str, torch.Tensor]) -> None:
    model = Model(context.group, CASE, seed=2)
    weights = model.state_dict()
    dcp.load(weights, checkpoint_id=folder)
    model.load_state_dict(weights)
    assert_same(tl.gather_state_dict(model), want)


def test_replicas_of_experts_are_saved_once(ranks: Ranks, tmp_path: Path) -> None:
    if ranks.num_ranks != ranks.pool.num_ranks:
        pytest.skip("a mesh takes all processes of the pool")
    want = ranks.run(save_replicas, str(tmp_path))[0]
    ranks.run(load_weights, str(tmp_path), want)
    kept = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata["moe.experts.w1"]
    assert len(kept.chunks) == max(1, ranks.num_ranks // 2)  # type: ignore[union-attr]


# -- files of one rank ------------------------------------------------------------------------------------------


def pack(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def named(rank: int, num_ranks: int) -> str:
    local = NUM_EXPERTS // num_ranks
    return f"experts {rank * local} to {(rank + 1) * local - 1}"


def load_files_of_other_ranks(context: RankContext) -> bytes:
    """Each rank reads the file of the rank before, and of itself."""
    program = Program(context, "plain", "adamw", seed=1)
    program.train(1)
    before = program.everything()
    own = pack({"model": program.model.state_dict(), "optimizer": program.optimizer.state_dict()})
    files: list[Any] = [None] * context.num_ranks
    dist.all_gather_object(files, own, group=context.group)
    other = (context.rank - 1) % context.num_ranks
    said = f"moe.experts.w1 holds {named(other, context.num_ranks)}, and this rank has " + named(
        context.rank, context.num_ranks
    )
    renamed = {name: value.double() for name, value in unpack(files[other])["model"].items()}
    for state in (unpack(files[other])["model"], renamed):
        for assign in (False, True):
            with pytest.raises(tl.InvalidArgument, match=said):
                program.model.load_state_dict(state, assign=assign)
    with pytest.raises(tl.InvalidArgument, match=said):
        tl.shard_state_dict(program.model, {"moe.experts.w1": renamed["moe.experts.w1"]})
    program = Program(context, "plain", "adamw", seed=2)
    program.optimizer.load_state_dict(unpack(files[other])["optimizer"])
    with pytest.raises(RuntimeError, match=r"different mesh|cross-mesh"):
        program.train(1)

    program = Program(context, "plain", "adamw", seed=2)
    for assign in (False, True):
        program.model.load_state_dict(unpack(own)["model"], assign=assign)
    program = Program(context, "plain", "adamw", seed=2)
    program.model.load_state_dict(unpack(own)["model"])
    program.optimizer.load_state_dict(unpack(own)["optimizer"])
    assert_same(program.everything(), before)
    program.train(1)
    return own


def test_experts_of_another_rank_are_refused(ranks: Ranks) -> None:
    """What rank 0 saves by itself would come back on all ranks, and all other experts would be lost."""
    if ranks.num_ranks == 1:
        pytest.skip("it has no others")
    files = ranks.run(load_files_of_other_ranks)
    alone = Model(None, CASE, seed=1)
    if ranks.device == "cpu":
        with pytest.raises(tl.InvalidArgument, match=named(0, ranks.num_ranks)):
            alone.load_state_dict(unpack(files[0])["model"])


@on_ranks
def test_plain_weights_of_all_experts_and_of_one_rank(context: RankContext) -> None:
    """The first are what other programs save. The second are old files, which cannot say whose experts they hold."""
    model = Model(context.group, CASE, seed=1)
    full = tl.gather_state_dict(model)
    other = Model(context.group, CASE, seed=2)
    other.load_state_dict(full)  # each rank takes its own
    assert_same(tl.gather_state_dict(other), full)
    state = other.state_dict()
    assert all(isinstance(state[f"moe.experts.{name}"], DTensor) for name in ("w1", "w2", "w1_bias", "w2_bias"))

    plain = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()}
    other = Model(context.group, CASE, seed=3)
    if context.num_ranks == 1:
        other.load_state_dict(plain)
    else:
        with pytest.warns(UserWarning, match=f"taken for this rank's, {named(context.rank, context.num_ranks)}"):
            other.load_state_dict(plain)
    assert_same(tl.gather_state_dict(other), full)
    plain["moe.experts.w1"] = plain["moe.experts.w1"][:, :1]
    with pytest.raises(RuntimeError, match=r"(?s)size mismatch for moe.experts.w1|exception occurred"):
        other.load_state_dict(plain)


@on_ranks
def test_pruned_experts(context: RankContext) -> None:
    """Its mask is a buffer with a part of each rank, which DDP must not broadcast."""
    models = []
    for seed in (1, 2):
        model = Model(context.group, CASE, seed)
        prune.custom_from_mask(model.moe.experts, "w2", (model.moe.experts.w2 > 0).to(FP32))
        models.append(model)
    one, other = models
    run = tl.data_parallel(one, process_group=context.group)
    for _ in range(2):
        run(torch.ones(3, HIDDEN, device=context.device)).sum().backward()
    kept = [(name, whole(value)) for name, value in one.moe.experts.state_dict().items()]
    assert [name for name, _ in kept] == ["w1", "w1_bias", "w2_bias", "w2_orig", "w2_mask"]
    other.load_state_dict(unpack(pack(one.state_dict())))
    for name, value in kept:
        assert torch.equal(whole(other.moe.experts.state_dict()[name]), value), name


# -- what is kept -----------------------------------------------------------------------------------------------


@on_ranks
def test_weights_do_not_keep_their_group(context: RankContext) -> None:
    """torch keeps meshes for ever; the threads of a group that is kept may abort Python as it ends."""
    layer = make_layer(CASE, context.group)
    ranks = layer.comm.engine.ranks
    group = ranks.process_group
    before = sys.getrefcount(group)
    mesh = make_mesh(ranks)
    assert mesh is not None
    assert sys.getrefcount(group) == before
    assert mesh == layer.experts.w1.device_mesh
    assert dist.get_process_group_ranks(mesh.get_group()) == list(range(context.num_ranks))


@on_ranks
def test_full_weights_on_the_first_rank_alone(context: RankContext) -> None:
    model = Model(context.group, CASE, seed=1)
    full, once = tl.gather_state_dict(model), tl.gather_state_dict(model, to="rank0")
    assert_same(once, full if context.rank == 0 else {})
    if context.num_ranks > 1:
        with pytest.raises(tl.PlanMismatch, match="to="):
            tl.gather_state_dict(model, to="all" if context.rank else "rank0")
    with pytest.raises(tl.InvalidArgument, match="to is 'rank1'"):
        tl.gather_state_dict(model, to="rank1")  # type: ignore[arg-type]


@on_ranks("four")
def test_one_expert_at_a_time_travels(context: RankContext) -> None:
    """Beside the result nobody has room for all experts.

    Weights of 4 MB an expert, and biases, which travel at once.
    """
    experts = tl.RoutedExperts(
        context.group, hidden=1024, intermediate=512, num_experts=NUM_EXPERTS, top_k=2, max_tokens_per_rank=4,
        biases=True, dtype=FP32, device=context.device,
    )  # fmt: skip
    ranks, sizes = experts.comm.engine.ranks, []
    gather = ranks.all_gather

    def counted(row: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        out = gather(row, *args, **options)
        sizes.append(out.nbytes)
        return out

    ranks.all_gather = counted  # type: ignore[method-assign]
    full = tl.gather_state_dict(experts, to="rank0")
    if context.rank == 0:
        assert torch.equal(full["w1"][experts.local_experts.start], experts.w1.to_local()[0].cpu())
    assert max(sizes) <= 4 << 20
    assert sum(sizes) >= sum(parameter.numel() for parameter in experts.parameters()) * 4


# -- norms of gradients -----------------------------------------------------------------------------------------


def clip(context: RankContext, kind: str, dtype: torch.dtype) -> None:
    """The norm is that of the full gradients, and the same scale is everywhere."""
    options = {"main_grads": kind == "main_grads"}
    model = Model(context.group, replace(CASE, dtype=dtype), 1, **options)
    experts, _ = tl.split_parameters(model)
    if kind == "fsdp":
        mesh = DeviceMesh.from_group(context.group, context.device.type)
        fully_shard(model, mesh=mesh, ignored_params=set(experts))
    generator = torch.Generator().manual_seed(1)
    model(torch.randn(6, HIDDEN, generator=generator).to(context.device, dtype)).square().sum().backward()
    if kind != "fsdp":
        for parameter in model.inner.parameters():
            dist.all_reduce(parameter.grad, group=context.group)

    def gradients() -> list[torch.Tensor]:
        found = []
        for parameter in model.parameters():
            grad = parameter.grad
            if grad is None:
                parts = torch.empty(context.num_ranks * parameter.main_grad.numel(), device=context.device)
                dist.all_gather_into_tensor(parts, parameter.main_grad.flatten(), group=context.group)
                grad = parts
            found.append(whole(grad).double().flatten())
        return found

    before = gradients()
    want = torch.cat(before).norm()
    norm = tl.clip_grad_norm_(model.parameters(), 0.5 * want.item())
    assert norm.dtype == FP32
    assert not isinstance(norm, DTensor)
    torch.testing.assert_close(norm.double().cpu(), want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=0)
    for got, full in zip(gradients(), before, strict=True):
        torch.testing.assert_close(got, 0.5 * full, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    assert tl.clip_grad_norm_(model.parameters(), 1e9) < norm


@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "fsdp", "main_grads"])
def test_the_norm_of_all_gradients(ranks: Ranks, kind: str, dtype: torch.dtype) -> None:
    """Of DTensors on two meshes, of those beside plain tensors, and of gradients in two dtypes."""
    if dtype != FP32 and kind == "main_grads" and ranks.device == "cuda":
        pytest.skip("the same on CPUs")
    ranks.run(clip, kind, dtype)


def test_no_gradients_have_no_norm() -> None:
    assert tl.clip_grad_norm_(Model(None, CASE, seed=1).parameters(), 1.0) == 0


@on_ranks
def test_the_norm_of_one_gradient(context: RankContext) -> None:
    """Without the brackets, as torch takes it: an iteration over its rows finds no gradients."""
    model = Model(context.group, CASE, seed=1)
    model(torch.ones(3, HIDDEN, device=context.device)).sum().backward()
    for parameter in (model.inner.weight, model.moe.experts.w1):
        assert parameter.grad is not None
        norm = tl.clip_grad_norm_(parameter, 1e-3)
        assert norm > 1e-3
        torch.testing.assert_close(whole(parameter.grad).norm().item(), 1e-3, rtol=1e-2, atol=0)


@on_ranks
def test_a_norm_beside_a_layer_that_one_rank_still_has(context: RankContext) -> None:
    """Python lets go of dropped layers when it likes. What ranks count for the norm counts in no layer alone."""
    kept, model = Model(context.group, CASE, seed=1), Model(context.group, CASE, seed=1)
    if context.rank:
        kept.moe.comm.close()
    for _ in range(2):
        model(torch.ones(3, HIDDEN, device=context.device)).sum().backward()
        tl.clip_grad_norm_(model.parameters(), 1.0)


@on_ranks
def test_frozen_experts(context: RankContext) -> None:
    """torch initialises optimiser states of what wants gradients; the rest has none."""
    model = Model(context.group, CASE, seed=1)
    model.moe.experts.requires_grad_(False)
    experts, others = tl.split_parameters(model)
    optimizer = torch.optim.AdamW([{"params": others}, {"params": experts}])
    states = get_optimizer_state_dict(model, optimizer)["state"]
    assert not any("experts" in name for name in states)
    model(torch.ones(3, HIDDEN, device=context.device)).sum().backward()
    assert all(parameter.grad is None for parameter in experts)


@on_ranks
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_step_before_backward(context: RankContext, is_compiled: bool) -> None:
    """It would give wrong gradients, in silence.

    In place of a DTensor; what autograd has saved is its local part.
    """
    layer = make_layer(CASE, context.group)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if is_compiled else layer
    x = torch.ones(5, HIDDEN, device=context.device)
    out, _ = run(x)
    with torch.no_grad():
        layer.experts.w2.mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    run(x)[0].sum().backward()
