"""Experts that move between ranks while calls go on: every call has the same result, before, between and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.comm.test_masks import backend_of, group
from tests.support.cases import make_comm
from tests.support.on_ranks import on_ranks
from tests.support.placements import drawn_placement
from tokenloom.plan import Plan
from tokenloom.runtime.processes import RankContext

__all__ = ["group"]
EMULATED = True
NEW = torch.float8_e4m3fn


def weights_of(experts: torch.Tensor) -> list[torch.Tensor]:
    """What slots hold of these experts, in tensors of several widths; the first is what multiplies their rows."""
    values = torch.arange(1, 14) + 20 * experts[:, None].clamp(min=0)
    return [
        experts.float() * (experts >= 0) + 1.0,
        values[:, :6].to(torch.int16).unflatten(1, (2, 3)),
        values.to(torch.float32).to(NEW),
        values[:, :5].to(torch.float64),
    ]


def held(comm: tl.Communicator) -> list[torch.Tensor]:
    """Of all slots of this rank. Those without an expert have what is no expert's."""
    assert comm.placement is not None
    experts = torch.tensor(comm.placement.experts_of(comm.rank))
    return [torch.where((experts < 0).view(-1, *[1] * (w.dim() - 1)), -w.float(), w.float()).to(w.dtype)
            .to(comm.device) for w in weights_of(experts)]  # fmt: skip


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.flatten().view(torch.uint8), b.to(a.device).flatten().view(torch.uint8))


def require_held(comm: tl.Communicator, tensors: list[torch.Tensor]) -> None:
    """Every slot has what its expert has, by the placement that rules."""
    assert comm.placement is not None
    experts = torch.tensor(comm.placement.experts_of(comm.rank))
    for tensor, want in zip(tensors, weights_of(experts), strict=True):
        assert same_bytes(tensor[experts.to(tensor.device) >= 0], want[experts >= 0])


def serve(context: RankContext, comm: tl.Communicator, tensors: list[torch.Tensor], number: int = 0) -> None:
    """A call: rows times the first weight of their expert, which are whole numbers, so that all sums are exact."""
    plan, generator = comm.plan, torch.Generator().manual_seed(100 * number + context.rank)
    count = (context.rank + number) % (plan.max_tokens_per_rank + 1)
    ids = torch.randint(-1, plan.num_experts, (count, plan.top_k), generator=generator)
    x = torch.randint(1, 9, (count, plan.hidden), generator=generator).float()
    routed = comm.dispatch(x.to(context.device), ids.to(context.device), layout="slots")
    out = comm.combine(routed.tokens * tensors[0][:, None, None], routed, weighted=False)
    factors = torch.where((ids < 0) | torch.isin(ids, torch.tensor(comm.lost_experts()).long()), 0, ids + 1)
    assert torch.equal(out.cpu(), x * factors.sum(1, keepdim=True))


def placed_comm(context: RankContext, spare: int, seed: int = 0, **options: Any) -> tl.Communicator:
    plan = Plan(context.num_ranks, 3 * context.num_ranks, 8, 3, 6)
    return make_comm(context, backend_of(context), plan, placement=drawn_placement(plan, spare, seed), **options)


@on_ranks("group")
@pytest.mark.parametrize(("spare", "piece_bytes"), [(0, 1000), (2, 13), (1, 40)])
def test_there_and_back(context: RankContext, spare: int, piece_bytes: int) -> None:
    """Through three placements: in pieces of an odd size or a whole expert, with spare slots and without any."""
    comm = placed_comm(context, spare)
    tensors, number = held(comm), 0
    first = comm.placement
    assert first is not None
    for seed in (1, 2, 0):
        placement = drawn_placement(comm.plan, spare, seed)
        moving, before = tl.move_experts(comm, tensors, placement, piece_bytes=piece_bytes), comm.placement
        assert comm.placement == before
        assert moving.num_steps >= 69 // piece_bytes
        for number in moving:
            if number % 7 == 1 or moving.is_done:
                require_held(comm, tensors)
                serve(context, comm, tensors, number)
        assert comm.placement == moving.placement
        for rank in range(context.num_ranks):
            assert sorted(moving.placement.experts_of(rank)) == sorted(placement.experts_of(rank))
        assert not moving.step()
        require_held(comm, tensors)
    again = tl.move_experts(comm, tensors, drawn_placement(comm.plan, spare, 0))
    assert again.num_steps == 0, "the order of slots within a rank says nothing"
    comm.check()


@on_ranks("group")
def test_the_old_table_rules(context: RankContext) -> None:
    """Until all pieces of a stage are there; and an expert that stays is not copied."""
    comm = tl_comm = placed_comm(context, 0)
    tensors, before = held(comm), comm.placement
    assert before is not None
    table = before.to_tensor()
    table[0, 1], table[1, 2] = table[1, 2].item(), table[0, 1].item()
    kept = [tensor.data_ptr() for tensor in tensors]
    moving = tl.move_experts(comm, tensors, tl.Placement(table, num_experts=comm.plan.num_experts), piece_bytes=50)
    assert moving.num_steps == 2
    assert "2 experts of" in repr(moving)
    contents = [tensor.clone() for tensor in tensors]
    assert moving.step()
    assert comm.placement == before
    assert all(map(same_bytes, contents, tensors))
    assert not moving.step()
    assert tl_comm.placement == moving.placement == tl.Placement(table, num_experts=comm.plan.num_experts)
    changed = [sum(not same_bytes(a[s, None], b[s, None]) for s in range(3))
               for a, b in zip(contents, tensors, strict=True)]  # fmt: skip
    assert changed == [int(context.rank < 2)] * len(tensors)
    assert kept == [tensor.data_ptr() for tensor in tensors]


def _only_on(rank: int, context: RankContext, act: Callable[[], object], error: type, match: str, others: str) -> None:
    """An error of one rank, of which the others hear."""
    if context.rank == rank:
        with pytest.raises(error, match=match):
            act()
    else:
        with pytest.raises((tl.PeerError, tl.PlanMismatch), match=others):
            act()


@on_ranks("group")
def test_refusals(context: RankContext) -> None:
    """Before anything is sent, on all ranks; and moves work after that."""
    comm = placed_comm(context, 1)
    tensors, wanted = held(comm), drawn_placement(comm.plan, 1, 5)
    last = context.num_ranks - 1

    def move(mine: list[Any] = tensors, to: Any = wanted, **options: Any) -> tl.MovingExperts:
        return tl.move_experts(comm, mine, to, **options)

    here = context.rank == last
    for mine, error, match in (
        ([tensors[0][:2]], tl.ShapeMismatch, r"tensors\[0\] is \[2\], expected \[4, ...\]"),
        ([*tensors[:2], tensors[2].T.contiguous().T], tl.ShapeMismatch, r"tensors\[2\] has strides"),
        ([3.0], tl.InvalidArgument, r"tensors\[0\] is a float"),
        (torch.zeros(4, 4), tl.InvalidArgument, r"tensors is a Tensor, expected a list of tensors \[4, ...\]"),
    ):
        given = mine if here else tensors
        _only_on(last, context, lambda given=given: move(given), error, match, "rank|tensors")
    with pytest.raises(tl.InvalidArgument, match=f"stale is 1, expected a list of ranks 0..{last}"):
        move(stale=1)
    with pytest.raises(tl.InvalidArgument, match=r"comm is a str, expected a tokenloom\.Communicator"):
        tl.move_experts("comm", tensors, wanted)  # type: ignore[arg-type]
    with pytest.raises(tl.PlanMismatch, match="bytes of each tensor's slot"):
        move(tensors[:-1] if here else tensors)
    with pytest.raises(tl.PlanMismatch, match="piece_bytes"):
        move(piece_bytes=5 + here)
    with pytest.raises(tl.PlanMismatch, match="slots of expert"):
        move(to=drawn_placement(comm.plan, 1, 6) if here else wanted)
    _only_on(
        last, context, lambda: move(piece_bytes=0 if here else 8), tl.InvalidArgument, "piece_bytes is 0", "piece"
    )
    with pytest.raises(tl.InvalidArgument, match="slots_per_rank"):
        move(to=drawn_placement(comm.plan, 2, 6))
    moving = move(piece_bytes=40)
    moving.step()
    for other, name in (
        (move, "move_experts"),
        (lambda: comm.set_placement(wanted), "set_placement"),
        (lambda: tl.restore_experts(comm, tensors, lambda expert: []), "restore_experts"),
    ):
        for rank in (0, last):  # the first one's values are those that others are compared with
            with pytest.raises(tl.PlanMismatch, match=f"has call=({name}|a step of move_experts), .*has call="):
                (other if context.rank == rank else moving.step)()
    moving.step()
    comm.set_placement(wanted)  # by somebody else
    with pytest.raises(tl.InvalidArgument, match="changed while experts move"):
        moving.step()


@on_ranks("group")
def test_a_rank_is_masked_meanwhile(context: RankContext) -> None:
    """The move ends with a named error, what rules goes on, and another move begins without the rank."""
    comm = placed_comm(context, 2)
    placement = torch.arange(comm.plan.num_experts).view(context.num_ranks, 3)
    placement = tl.Placement(torch.cat([placement, placement[:, :2].roll(1, 0)], 1),
                             num_experts=comm.plan.num_experts)  # fmt: skip
    tensors, last = held(comm), context.num_ranks - 1
    moving = tl.move_experts(comm, tensors, placement, piece_bytes=30)
    moving.step()
    if context.rank == last:
        return
    before = comm.placement
    comm.mask_ranks([last])
    with pytest.raises(tl.PeerError, match=f"rank {last} was masked while experts moved"):
        moving.step()
    with pytest.raises(tl.InvalidArgument, match="has ended"):
        moving.step()
    assert comm.placement == before
    serve(context, comm, tensors)
    assert before is not None
    living, experts = before.to_tensor(), comm.plan.num_experts
    living[:last] = living[:last].roll(1, 0)
    for _ in tl.move_experts(comm, tensors, tl.Placement(living, num_experts=experts)):
        serve(context, comm, tensors)
    require_held(comm, tensors)


@on_ranks("group")
@pytest.mark.parametrize("piece_bytes", [13, 1000])
def test_balanced_batches_meanwhile(context: RankContext, piece_bytes: int) -> None:
    """They pull experts into empty slots, but not into those that a move fills piece by piece."""
    plan = Plan(context.num_ranks, 3 * context.num_ranks, 8, 3, 6)
    comm = make_comm(context, backend_of(context), plan, spare_slots=2, balance="batch")
    tensors = held(comm)
    assert comm.placement is not None
    table = comm.placement.to_tensor()
    table[:, 3] = table[:, 0].roll(-1)
    ids = torch.zeros(6, 3, dtype=torch.int64, device=context.device)
    x = torch.ones(6, 8, device=context.device)
    before = comm.dispatch(x, ids)
    moving = tl.move_experts(comm, tensors, tl.Placement(table, num_experts=plan.num_experts), piece_bytes=piece_bytes)
    with pytest.raises(tl.InvalidArgument, match="one is on its way there"):
        tl.pull_experts(comm, before, tensors)
    for _ in moving:
        routed = comm.dispatch(x, ids)
        tl.pull_experts(comm, routed, tensors)
        experts = routed.slot_experts.tolist()
        assert experts[3] in (-1, table[comm.rank, 3])
        assert (experts[4] == 0) == (comm.rank > 0 and experts[3] != 0)
        for tensor, want in zip(tensors, weights_of(routed.slot_experts.cpu()), strict=True):
            filled = routed.slot_experts >= 0
            if not moving.is_done:
                filled[3] = False
            assert same_bytes(tensor[filled], want[filled.cpu()])
    require_held(comm, tensors)
    comm.check()
