"""Layers under a placement compute what layers without one do, and keep each expert once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_map

import tokenloom as tl
from tests.support import emulator
from tests.support.layer_cases import HIDDEN, NUM_EXPERTS, TOP_K, LayerCase, make_layer
from tests.support.on_ranks import on_ranks
from tests.support.placements import drawn_placement
from tokenloom import reference
from tokenloom.comm.slot_rows import sum_at_owners
from tokenloom.ops import experts
from tokenloom.plan import Plan
from tokenloom.runtime.processes import RankContext
from tokenloom.training.shards import local_part
from tokenloom.training.slot_moves import moves_to_owners

pytestmark = pytest.mark.slow_on(1, 4)

EMULATED = True

CASE = LayerCase(dtype=torch.float32, router_grad="sum", biases=True, tokens=(9, 0, 12, 5, 1, 7, 0, 6))
PER_ROUTE = tl.Strategy(combine="all_to_all")
TOLERANCE = 2e-5
"""Of the largest value: float32, sums in another order; GEMMs of other numbers of rows."""


def placement_of(context: RankContext, spare: int, seed: int = 0) -> tl.Placement:
    return drawn_placement(Plan(context.num_ranks, NUM_EXPERTS, HIDDEN, 1, 1), spare, seed)


def batch(context: RankContext, case: LayerCase, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + context.rank)
    x = torch.randn(case.tokens[context.rank], HIDDEN, generator=generator)
    return x.to(context.device, case.dtype).requires_grad_()


def one_backward(layer: tl.ExpertParallelMoE, x: torch.Tensor, **routes: torch.Tensor) -> torch.Tensor:
    out, aux_loss = layer(x, **routes)
    factors = torch.linspace(-1, 1, HIDDEN, device=x.device).to(x.dtype)
    ((out * factors).sum() + aux_loss / layer.comm.num_ranks).backward()
    return out.detach()


def near(got: torch.Tensor, want: torch.Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    error = (got.double() - want.double()).abs().max() if want.numel() else torch.zeros(())
    assert error <= tolerance * max(1.0, want.abs().max().item() if want.numel() else 1.0), f"{what}: {error}"


def same_gradients(
    layer: tl.ExpertParallelMoE, x: torch.Tensor, other: tl.ExpertParallelMoE, other_x: torch.Tensor
) -> None:
    """Of two layers and their tokens, bit for bit, but for those of experts."""
    assert torch.equal(x.grad, other_x.grad)  # type: ignore[arg-type]
    for name, weight in layer.named_parameters():
        if not name.startswith("experts."):
            assert torch.equal(weight.grad, other.get_parameter(name).grad), name  # type: ignore[arg-type]


class RowByRow:
    """GEMMs each of whose rows is computed alike, whatever the number of rows: terms are added one by one."""

    def __init__(self, offsets: torch.Tensor) -> None:
        self._groups = [slice(*ends) for ends in pairwise(offsets.tolist())]

    def multiply(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = rows.new_zeros(len(rows), weights.shape[2])
        for group, weight in zip(self._groups, weights, strict=True):
            for k in range(rows.shape[1]):
                out[group] += rows[group, k, None] * weight[k]
        return out

    def weight_gradient(
        self, left: torch.Tensor, right: torch.Tensor, total: torch.Tensor | None = None
    ) -> torch.Tensor:
        found = torch.stack([left[group].T @ right[group] for group in self._groups])
        return found if total is None else total.add_(found)


@contextmanager
def row_by_row() -> Iterator[None]:
    """Experts whose rows do not depend on each other."""

    def gemms_for(rows: Any, w1: Any, w2: Any, offsets: torch.Tensor, host_offsets: Any) -> RowByRow:
        return RowByRow(offsets)

    def sum_rows(gemms: RowByRow, values: Any, weights: Any, total: Any) -> torch.Tensor:
        values = values if weights is None else values * weights[:, None]
        found = torch.stack([values[group].sum(0) for group in gemms._groups])
        return found if total is None else total.add_(found)

    with mock.patch.object(experts, "gemms_for", gemms_for), mock.patch.object(experts, "sum_rows", sum_rows):
        yield


# -- outputs and gradients --------------------------------------------------------------------------------------


ROUTES: dict[str, Callable[[int], torch.Tensor] | None] = {
    "chosen": None,
    "even": lambda tokens: torch.arange(tokens * TOP_K).view(tokens, TOP_K) % NUM_EXPERTS,
    "one expert": lambda tokens: torch.full((tokens, TOP_K), NUM_EXPERTS - 1),
}
"""Those that the router chooses, or given ones. The last expert has replicas."""


@on_ranks
@pytest.mark.sampled(2)
@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize(
    "options", [{}, {"redispatch_in_backward": True}, {"pool_rows": 800}, {"ranks_per_node": 2}], ids=str
)
def test_same_bits(context: RankContext, options: dict[str, Any], routes: str) -> None:
    """Summed per route, outputs and gradients of tokens do not depend on where experts are."""
    if context.num_ranks < 4:
        options = {name: value for name, value in options.items() if name != "ranks_per_node"}
    choose, x = ROUTES[routes], batch(context, CASE)
    given = {} if choose is None else {"topk_ids": choose(len(x)).to(context.device)}
    with row_by_row():
        plain = make_layer(CASE, context.group, strategy=PER_ROUTE, device=context.device)
        want = one_backward(plain, x, **given)
        for seed in (0, 1):
            placement = placement_of(context, 2, seed)
            layer = make_layer(
                CASE, context.group, strategy=PER_ROUTE, placement=placement, device=context.device, **options
            )
            again = batch(context, CASE)
            assert torch.equal(one_backward(layer, again, **given), want)
            same_gradients(layer, again, plain, x)
            layer.comm.check()


@on_ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_weights(context: RankContext, dtype: torch.dtype) -> None:
    """Bit for bit the reference's sums over slots, at the owner; other slots have none."""
    case = replace(CASE, dtype=dtype)
    placement = placement_of(context, 3)
    table = placement.to_tensor().tolist()
    layer = make_layer(case, context.group, placement=placement, main_grads=dtype == torch.bfloat16,
                       device=context.device)  # fmt: skip
    plain = make_layer(case, context.group, main_grads=dtype == torch.bfloat16, device=context.device)
    for made in (layer, plain):
        one_backward(made, batch(context, case))

    def of(weight: Any) -> torch.Tensor:
        return weight.main_grad if dtype == torch.bfloat16 else local_part(weight.grad)

    before = {name: of(weight).clone() for name, weight in layer.experts.named_parameters()}
    for _ in range(2):  # a second time changes nothing
        tl.reduce_replica_gradients(layer)
    ranks = layer.comm.engine.ranks
    for name, weight in layer.experts.named_parameters():
        everywhere = ranks.all_gather(before[name].flatten(), "test").view(-1, *before[name].shape)
        sums = reference.sum_slots(list(everywhere), table, NUM_EXPERTS).to(before[name].dtype)
        for slot, expert in enumerate(table[context.rank]):
            if expert >= 0 and placement.slots_of(expert)[0] == (context.rank, slot):
                assert torch.equal(of(weight)[slot], sums[expert]), name
            else:
                assert not of(weight)[slot].any(), name
        own = sums[list(plain.local_experts)]
        tolerance = TOLERANCE if dtype == torch.float32 else 4e-2
        near(own, of(plain.experts.get_parameter(name)), name, tolerance)


@on_ranks
def test_bfloat16_is_summed_wide(context: RankContext) -> None:
    """And rounded once: 256 + 1 + 1 is 258, but 256 + 1 is 256 in bfloat16."""
    placement = tl.Placement([[0, 0, 0, -1]] * context.num_ranks, num_experts=1)
    owner = context.rank == 0
    rows = torch.tensor([[256.0 if owner else 0.0], [float(owner)], [float(owner)], [7.0]], dtype=torch.bfloat16)
    rows = rows.to(context.device)
    comm = tl.Communicator(context.group, num_experts=context.num_ranks, hidden=HIDDEN, top_k=1,
                           max_tokens_per_rank=1, device=context.device)  # fmt: skip
    sum_at_owners(comm.engine.ranks, moves_to_owners(placement), rows, "test")
    assert rows.flatten().tolist() == ([258.0, 0, 0, 7] if owner else [0, 0, 0, 7])


# -- steps ------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, eps=1e-3),
}
"""A large eps: AdamW divides by gradients, and would make much of the rounding of small ones."""


class Program:
    """A layer with its optimizer."""

    def __init__(self, context: RankContext, optimizer: str, **options: Any) -> None:
        self.context, self.layer = context, make_layer(CASE, context.group, device=context.device, **options)
        own, others = tl.split_parameters(self.layer)
        self.optimizer = OPTIMIZERS[optimizer]([{"params": others}, {"params": own}])
        tl.follow_placement(self.optimizer, self.layer)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        one_backward(self.layer, batch(self.context, CASE, number))
        self.optimizer.step()

    def everything(self) -> dict[str, torch.Tensor]:
        """Weights and states of all experts in their order, and all else. Collective."""
        found = dict(self.layer.state_dict())
        state = self.optimizer.state_dict()["state"]
        found |= {f"{key} {name}": each for key, own in state.items() for name, each in own.items()}
        return {name: whole(each) for name, each in found.items() if each is not None}


def whole(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu().clone()


def copies(state_dict: Any) -> Any:
    return tree_map(lambda each: each.clone() if isinstance(each, torch.Tensor) else each, dict(state_dict))


def all_near(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].shape == value.shape, name
        near(got[name], value, name, 1e-4)


def replicas_are_equal(layer: tl.ExpertParallelMoE) -> None:
    ranks, placement = layer.comm.engine.ranks, layer.comm.placement
    assert placement is not None
    for name, weight in layer.experts.named_parameters():
        part = local_part(weight.detach())
        slots = ranks.all_gather(part.flatten(), "test").view(-1, *part.shape)
        for rank, row in enumerate(placement.to_tensor().tolist()):
            for slot, expert in enumerate(row):
                if expert < 0:
                    assert not slots[rank, slot].any(), name
                else:
                    assert torch.equal(slots[rank, slot], slots[placement.slots_of(expert)[0]]), name


@on_ranks
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_and_new_places(context: RankContext, optimizer: str) -> None:
    """One owner steps, copies follow, and experts keep their states wherever they go."""
    plain = Program(context, optimizer)
    placed = Program(context, optimizer, placement=placement_of(context, 2))
    replicas_are_equal(placed.layer)
    for number in range(4):
        for program in (plain, placed):
            program.step(number)
        replicas_are_equal(placed.layer)
        all_near(placed.everything(), plain.everything())
        before = placed.everything()
        tl.place_experts(placed.layer, placement_of(context, 2, seed=number + 1), placed.optimizer)
        after = placed.everything()
        assert all(torch.equal(after[name], before[name]) for name in before)  # moved, and not changed
        replicas_are_equal(placed.layer)


@on_ranks
def test_spare_slots(context: RankContext) -> None:
    """They are empty at first, so that nothing differs; then experts of any rank come."""
    plain, placed = Program(context, "adamw"), Program(context, "adamw", spare_slots=1)
    local = NUM_EXPERTS // context.num_ranks
    assert list(placed.layer.slot_experts) == [*placed.layer.local_experts, -1]
    assert len(local_part(placed.layer.experts.w1)) == local + 1
    assert list(plain.layer.slot_experts) == list(plain.layer.local_experts)
    table = placed.layer.comm.placement.to_tensor()  # type: ignore[union-attr]
    table[:, local] = 3
    for number in range(2):
        plain.step(number)
        placed.step(number)
        tl.place_experts(placed.layer, tl.Placement(table, num_experts=NUM_EXPERTS), placed.optimizer)
    all_near(placed.everything(), plain.everything())
    assert placed.layer.slot_experts[local] == 3


# -- state dicts ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(emulator.ON, reason="without a process group no tensor knows whose experts it has")
@on_ranks
def test_state_dicts_fit_any_placement(context: RankContext) -> None:
    """From a placement to none, to another and back, with the optimizer's states; each expert once, in its order."""
    first = Program(context, "adamw", placement=placement_of(context, 2, seed=5))
    for number in range(2):
        first.step(number)
    want = first.everything()
    full = tl.gather_state_dict(first.layer)
    assert full["experts.w1"].shape[0] == NUM_EXPERTS
    assert all(torch.equal(value, want[name]) for name, value in full.items())
    # Copies: torch's optimizers take the tensors that they load.
    weights, states = (copies(each.state_dict()) for each in (first.layer, first.optimizer))
    for options in ({}, {"spare_slots": 1}, {"placement": placement_of(context, 1, seed=6)}):
        other = Program(context, "adamw", **options)
        other.layer.reset_parameters(seed=9)
        other.layer.load_state_dict(weights)
        other.optimizer.load_state_dict(copies(states))
        got = other.everything()
        assert all(torch.equal(value, want[name]) for name, value in got.items())
        again = Program(context, "adamw", **options)
        again.layer.load_state_dict(full)
        again.layer.load_state_dict(tl.shard_state_dict(again.layer, full))
        assert all(torch.equal(value, full[name]) for name, value in tl.gather_state_dict(again.layer).items())
        if other.layer.comm.placement is not None:
            replicas_are_equal(other.layer)
            replicas_are_equal(again.layer)
        first.step(2)
        other.step(2)
        all_near(other.everything(), first.everything())
        first.layer.load_state_dict(weights)
        first.optimizer.load_state_dict(copies(states))
        assert all(torch.equal(value, want[name]) for name, value in first.everything().items())
