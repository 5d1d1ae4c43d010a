"""Layers with ``balance="batch"`` compute what others do, and helpers' gradients come home."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tokenloom as tl
from tests.support import emulator
from tests.support.layer_cases import HIDDEN, NUM_EXPERTS, make_layer
from tests.support.on_ranks import on_ranks
from tests.training.test_placed_layer import (
    CASE,
    PER_ROUTE,
    ROUTES,
    TOLERANCE,
    Program,
    all_near,
    batch,
    near,
    one_backward,
    placement_of,
    row_by_row,
    same_gradients,
)
from tokenloom import reference
from tokenloom.comm.pulled_experts import PulledExperts
from tokenloom.runtime.processes import RankContext
from tokenloom.training.shards import local_part

pytestmark = pytest.mark.slow_on(1, 4)

EMULATED = True


def make(context: RankContext, case: Any = CASE, **options: Any) -> tl.ExpertParallelMoE:
    given = {"balance": "batch", "rows_per_pull": 0, "device": context.device} | options
    if "placement" not in given:
        given = {"spare_slots": 1} | given
    return make_layer(case, context.group, **given)


def on_given(context: RankContext, routes: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    choose = ROUTES[routes]
    return {} if choose is None else {"topk_ids": choose(len(x)).to(context.device)}


@on_ranks
@pytest.mark.sampled(3)
@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize(
    "options",
    [{}, {"redispatch_in_backward": True}, {"pool_rows": 800}, {"ranks_per_node": 2}, {"spare_slots": 8}, {"seed": 1}],
    ids=str,
)
def test_same_bits(context: RankContext, options: dict[str, Any], routes: str) -> None:
    """Summed per route, which is the default, outputs and gradients of tokens are those of a plain layer."""
    if context.num_ranks < 4:
        options = {name: value for name, value in options.items() if name != "ranks_per_node"}
    x = batch(context, CASE)
    given = on_given(context, routes, x)
    if "seed" in options:
        options = {"placement": placement_of(context, 2, options["seed"])}
    with row_by_row():
        plain = make_layer(CASE, context.group, strategy=PER_ROUTE, device=context.device)
        want = one_backward(plain, x, **given)
        layer = make(context, **options)
        assert layer.experts.strategy == PER_ROUTE
        again = batch(context, CASE)
        assert torch.equal(one_backward(layer, again, **given), want)
        same_gradients(layer, again, plain, x)
    layer.comm.check()
    stats = layer.comm.balance_stats()
    assert stats.batches == 1
    if routes == "one expert" and context.num_ranks > 1 and "placement" not in options:
        assert (stats.split, stats.pulls) == (1, context.num_ranks - 1)  # all from one rank
        assert stats.rows == -(-stats.rows_by_placement // context.num_ranks)


@pytest.mark.skipif(emulator.ON, reason="a patch of one rank would be one of all")
@on_ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("routes", ["chosen", "one expert"])
def test_gradients_of_weights(context: RankContext, dtype: torch.dtype, routes: str) -> None:
    """Bit for bit the reference's sums over the slots of the batch, at the owner; pulled slots have none."""
    case = replace(CASE, dtype=dtype)
    layer = make(context, case, spare_slots=3)
    plain = make_layer(case, context.group, device=context.device)
    ranks, before, tables = layer.comm.engine.ranks, [], []
    sum_gradients = PulledExperts.sum_gradients

    def watched(self: PulledExperts, gradients: Any) -> None:
        before.extend(each.clone() for each in gradients)
        table = layer.comm.placement.to_tensor()  # type: ignore[union-attr]
        for rank, slot, expert, _ in self.pulls:
            table[rank, slot] = expert
        tables.append(table.tolist())
        sum_gradients(self, gradients)

    with mock.patch.object(PulledExperts, "sum_gradients", watched):
        x = batch(context, case)
        one_backward(layer, x, **on_given(context, routes, x))
    x = batch(context, case)
    one_backward(plain, x, **on_given(context, routes, x))
    (table,), local = tables, NUM_EXPERTS // context.num_ranks
    for rows, (name, weight) in zip(before, layer.experts.named_parameters(), strict=True):
        everywhere = ranks.all_gather(rows.flatten(), "test").view(-1, *rows.shape)
        sums = reference.sum_slots(list(everywhere), table, NUM_EXPERTS).to(rows.dtype)
        found = local_part(weight.grad)
        assert torch.equal(found[:local], sums[list(plain.local_experts)]), name
        assert not found[local:].any(), name
        tolerance = TOLERANCE if dtype == torch.float32 else 4e-2
        near(found[:local], local_part(plain.experts.get_parameter(name).grad), name, tolerance)


@on_ranks
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_steps(context: RankContext, optimizer: str) -> None:
    """Training goes the same way, and state dicts know nothing of it."""
    plain = Program(context, optimizer)
    balanced = Program(context, optimizer, spare_slots=2, balance="batch", rows_per_pull=0)
    for number in range(4):
        for program in (plain, balanced):
            program.step(number)
        all_near(balanced.everything(), plain.everything())


@on_ranks
def test_replicas_beside(context: RankContext) -> None:
    """Replicas and helpers of one expert: what helpers computed comes to the owner, and then all slots are summed."""
    plain = Program(context, "adamw")
    placement = placement_of(context, 2, seed=4)
    balanced = Program(context, "adamw", placement=placement, balance="batch", rows_per_pull=0)
    for number in range(3):
        for program in (plain, balanced):
            program.step(number)
        all_near(balanced.everything(), plain.everything())


@on_ranks
@pytest.mark.parametrize("how", ["micro-batches", "checkpoint", "autocast", "main grads", "frozen", "without grad"])
def test_ways_to_train(context: RankContext, how: str) -> None:
    """Slots are filled again for each backward, whatever came between; recomputation comes to the same split."""
    options: dict[str, Any] = {"main_grads": how == "main grads"}
    case = replace(CASE, frozen=("w1", "w2")) if how == "frozen" else CASE
    layers = [make_layer(case, context.group, device=context.device, strategy=PER_ROUTE, **options)]
    layers.append(make(context, case, **options))
    found = []
    for layer in layers:
        xs = [batch(context, case, step) for step in range(2)]
        routes = [{"topk_ids": torch.full((len(x), 3), expert)} for x, expert in zip(xs, (1, 2), strict=True)]

        def run(x: torch.Tensor, ids: torch.Tensor, layer: Any = layer) -> torch.Tensor:
            return layer(x, topk_ids=ids.to(context.device))[0]

        with torch.autocast(context.device.type, torch.bfloat16, enabled=how == "autocast"), row_by_row():
            if how == "without grad":
                with torch.no_grad():
                    found.append([run(x, **{"ids": each["topk_ids"]}) for x, each in zip(xs, routes, strict=True)])
                continue
            outs = []
            for x, each in zip(xs, routes, strict=True):
                if how == "checkpoint":
                    outs.append(checkpoint(run, x, each["topk_ids"], use_reentrant=False))
                else:
                    outs.append(run(x, each["topk_ids"]))
            for out in outs if how == "checkpoint" else reversed(outs):
                (out.float() * torch.linspace(-1, 1, HIDDEN, device=out.device)).sum().backward()
        found.append([*(out.detach() for out in outs), *(x.grad for x in xs)])
        weights = dict(layer.experts.named_parameters())
        local = NUM_EXPERTS // context.num_ranks
        for name in ("w1_bias", "w2_bias") if how == "frozen" else ("w1", "w2", "w1_bias", "w2_bias"):
            weight = weights[name]
            grad = weight.main_grad if how == "main grads" else local_part(weight.grad)
            assert not grad[local:].any()
            found[-1].append(grad[:local])
    tokens = 2 if how == "without grad" else 4
    for got, want in zip(found[1][:tokens], found[0][:tokens], strict=True):
        assert torch.equal(got, want)
    for got, want in zip(found[1][tokens:], found[0][tokens:], strict=True):
        near(got, want, how, 4e-2 if how == "autocast" else TOLERANCE)
    batches = 4 if how == "checkpoint" else 2
    assert layers[1].comm.balance_stats().batches == batches
    assert layers[1].comm.balance_stats().split == (batches if context.num_ranks > 1 else 0)


@on_ranks
def test_by_calls(context: RankContext) -> None:
    """What a layer does, by the communicator's calls: pull, compute, and bring gradients home."""
    case = replace(CASE, shared=0, biases=False)
    layer = make(context, case)
    x = batch(context, case).detach()
    routes = on_given(context, "one expert", x)["topk_ids"]
    weights = torch.full(routes.shape, 0.25, device=context.device)
    want = layer.experts(x, routes, weights)
    comm = layer.comm
    w1, w2 = (local_part(layer.experts.get_parameter(name)).detach().clone() for name in ("w1", "w2"))
    w1[-1], w2[-1] = torch.nan, torch.nan
    routed = comm.dispatch(x, routes, weights)
    experts, local = routed.slot_experts.tolist(), NUM_EXPERTS // context.num_ranks
    first = context.rank * local
    numbers = torch.tensor([*range(first, first + local), -1], device=context.device)
    tl.pull_experts(comm, routed, [w1, w2, numbers])
    assert numbers.tolist() == experts, "one number of each slot is a tensor too"
    offsets = routed.expert_offsets
    assert offsets is not None
    rows = routed.tokens
    y = torch.zeros_like(rows)
    for slot, (begin, end) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False)):
        gate, up = (rows[begin:end] @ w1[slot].T).chunk(2, 1)
        y[begin:end] = (torch.nn.functional.silu(gate) * up) @ w2[slot].T
    near(comm.combine(y, routed), want.detach(), "out")
    gradients = [torch.full_like(w1, context.rank + 1.0)]
    tl.sum_pulled_gradients(comm, routed, gradients)
    assert bool(gradients[0][local:].any()) == (experts[-1] < 0)
    owner = context.rank == context.num_ranks - 1
    helpers = sum(range(1, context.num_ranks))
    assert gradients[0][local - 1].unique().tolist() == [context.rank + 1.0 + owner * helpers]


@on_ranks
def test_refusals(context: RankContext) -> None:
    """Named on all ranks, before anything travels."""
    layer, plain = make(context), make_layer(CASE, context.group, device=context.device)
    x = batch(context, CASE).detach()
    ids = torch.zeros(len(x), 3, dtype=torch.int64)
    routed = layer.comm.dispatch(x, ids)
    tensors = [local_part(each.detach()) for each in layer.experts.parameters()]
    with pytest.raises(tl.InvalidArgument, match="of another communicator"):
        tl.pull_experts(plain.comm, routed, tensors)
    with pytest.raises(tl.InvalidArgument, match="batches are not balanced"):
        tl.pull_experts(plain.comm, plain.comm.dispatch(x, ids), tensors)
    with pytest.raises(tl.ShapeMismatch, match="a row for each slot"):
        tl.pull_experts(layer.comm, routed, [tensors[0][1:]])
    if context.num_ranks > 1:
        with pytest.raises(tl.PlanMismatch, match="bytes of each tensor's slot"):
            tl.pull_experts(layer.comm, routed, tensors[: 1 + (context.rank == 1)])
    tl.pull_experts(layer.comm, routed, tensors)
    with pytest.raises(tl.InvalidArgument, match="comm is given with balance beside it"):
        tl.RoutedExperts(comm=layer.comm, hidden=HIDDEN, intermediate=12, num_experts=NUM_EXPERTS, top_k=3,
                         balance="batch", rows_per_pull=0)  # fmt: skip


# -- without ranks ----------------------------------------------------------------------------------------------

HELD = [[0, 1, -1, -1], [2, 3, -1, -1], [4, 5, -1, -1], [6, 7, -1, 0]]
"""Expert 0 has a replica on the last rank, expert 1 has none."""


class Death(BaseException):
    """Ends a rank as if its process had ended: nobody tells the others."""

    known_to_all = True


def experts_held(context: RankContext, **options: Any) -> tuple[tl.RoutedExperts, torch.Tensor, torch.Tensor]:
    """Experts by that placement, tokens of this rank, and weights of their routes."""
    placement = tl.Placement(HELD, num_experts=NUM_EXPERTS)
    comm = tl.Communicator(
        context.group, num_experts=NUM_EXPERTS, hidden=HIDDEN, top_k=3, max_tokens_per_rank=6, placement=placement,
        balance="batch", device="cpu", backend="collective", dtype=torch.float32, **options,
    )  # fmt: skip
    experts = tl.RoutedExperts(
        comm=comm, hidden=HIDDEN, intermediate=12, num_experts=NUM_EXPERTS, top_k=3, dtype=torch.float32
    )
    experts.reset_parameters(seed=3)
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(context.rank)).requires_grad_()
    return experts, x, torch.full((6, 3), 0.25)


def nothing_beside(experts: tl.RoutedExperts) -> None:
    """Slots that are empty by the placement have no gradients."""
    empty = [slot for slot, expert in enumerate(experts.slot_experts) if expert < 0]
    for weight in experts.parameters():
        assert not local_part(weight.grad)[empty].any()  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.skipif(emulator.ON, reason="its ranks share a process, and other tests mask those of kernels")
@on_ranks("four")
def test_an_owner_is_masked_before_backward(context: RankContext) -> None:
    """Its experts are pulled from the next replica.

    Where there is none, the routes are lost: their gradients are zero, whatever other batches have left in the slot.
    """
    experts, x, weights = experts_held(context)
    xs = [x.detach().clone().requires_grad_() for _ in range(3)]
    outs = [experts(each, torch.full((6, 3), expert), weights) for each, expert in zip(xs, (1, 0, 2), strict=True)]
    (wanted,) = torch.autograd.grad(outs[1].sum(), xs[1], retain_graph=True)
    if context.rank == 0:
        experts(x, torch.full((6, 3), 2), weights)
        return
    experts(x, torch.full((6, 3), 2), weights)
    experts.comm.mask_ranks([0])
    for out in outs[:2]:
        out.sum().backward()
        nothing_beside(experts)
    assert not xs[0].grad.any()  # type: ignore[union-attr]
    assert xs[1].grad is not None
    routes_left = 3 * (xs[1].grad * wanted).sum(1) / wanted.square().sum(1)  # a token's three routes are alike
    near(routes_left, routes_left.round(), "routes that are left")
    near(xs[1].grad, wanted * routes_left[:, None] / 3, "gradient of tokens")


@pytest.mark.skipif(emulator.ON, reason="a patch of one rank would be one of all")
@on_ranks("four")
@pytest.mark.parametrize("expert", [0, 1])
@pytest.mark.parametrize("backward", [False, True])
def test_a_rank_dies_before_it_sends_experts(context: RankContext, backward: bool, expert: int) -> None:
    """The others mask it and nobody else, though some may learn of it before others, and go on."""
    experts, x, weights = experts_held(context, on_timeout="mask", timeout_s=1.5)
    ids = torch.full((6, 3), expert)
    if context.rank == 0:
        out = experts(x, ids, weights) if backward else x
        with mock.patch.object(PulledExperts, "pull", side_effect=Death), pytest.raises(Death):
            out.sum().backward() if backward else experts(x, ids, weights)
        return
    for _ in range(2):
        experts(x, ids, weights).sum().backward()
        assert experts.comm.masked_ranks() == [0]
        nothing_beside(experts)
