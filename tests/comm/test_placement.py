"""Placements themselves, and the rule of who gets which route: properties of any placement and any routing."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenloom as tl
from tokenloom import reference
from tokenloom.ops.slots_of_routes import SlotTable
from tokenloom.plan import Plan

CPU = torch.device("cpu")
TABLE = [[0, 1, 3], [2, 3, -1]]


def test_what_it_says() -> None:
    """Slots of an expert are ascending, empty slots are no expert's, and a tensor makes an equal one."""
    placement = tl.Placement(TABLE, num_experts=4)
    assert (placement.num_ranks, placement.slots_per_rank, placement.num_experts) == (2, 3, 4)
    assert [placement.slots_of(e) for e in range(4)] == [((0, 0),), ((0, 1),), ((1, 0),), ((0, 2), (1, 1))]
    assert placement.replicas == (1, 1, 1, 2)
    assert placement.num_empty == 1
    assert placement.experts_of(1) == (2, 3, -1)
    table = placement.to_tensor()
    assert table.dtype == torch.int64
    assert table.tolist() == TABLE
    assert repr(placement) == "Placement([[0, 1, 3], [2, 3, -1]], num_experts=4)"
    assert str(placement) == "4 experts in 2 x 3 slots: 1 empty, 1 experts replicated (slots): 3 (2)"
    for dtype in (torch.int32, torch.int8):
        assert tl.Placement(table.to(dtype), num_experts=4) == placement


def test_equality() -> None:
    """Equal tables are equal placements and one key; the same table of more experts would lack some."""
    placement, other = tl.Placement(TABLE, num_experts=4), tl.Placement([[0, 1, 3], [2, -1, 3]], num_experts=4)
    assert placement != other
    assert placement != TABLE
    assert len({placement, tl.Placement(TABLE, num_experts=4), other}) == 2


def test_it_never_changes() -> None:
    """Neither by its attributes, nor by the tensor that it was made from or that it gives."""
    table = torch.tensor(TABLE)
    placement = tl.Placement(table, num_experts=4)
    table.zero_()
    placement.to_tensor().zero_()
    with pytest.raises(AttributeError, match="never changes"):
        placement.num_ranks = 3
    with pytest.raises(AttributeError, match="never changes"):
        del placement.num_ranks
    assert placement == tl.Placement(TABLE, num_experts=4)
    for same in (copy.deepcopy(placement), pickle.loads(pickle.dumps(placement))):  # as ranks send it to each other
        assert same == placement
        assert same.slots_of(3) == ((0, 2), (1, 1))


def test_default() -> None:
    """Expert e on rank e // L, spare slots empty."""
    assert tl.Placement.default(4, 2).to_tensor().tolist() == [[0, 1], [2, 3]]
    assert tl.Placement.default(4, 2, 3).to_tensor().tolist() == [[0, 1, -1], [2, 3, -1]]
    for slots in (1, 2.0, True):
        with pytest.raises(tl.InvalidArgument, match=f"slots_per_rank is {slots}, expected at least 2"):
            tl.Placement.default(4, 2, slots)  # type: ignore[arg-type]
    with pytest.raises(tl.InvalidArgument, match="num_experts is 5, expected a multiple of the 2 ranks"):
        tl.Placement.default(5, 2)


@pytest.mark.parametrize(
    ("table", "num_experts", "kind", "text"),
    [
        ([[0, 1], [2, -1]], 4, tl.InvalidArgument, r"expert 3 has no slot \(1 of 4 experts have none, in 4 slots\)"),
        ([[0, 1]], 4, tl.InvalidArgument, r"expert 2 has no slot \(2 of 4 experts have none, in 2 slots\)"),
        ([[0, 4]], 4, tl.InvalidArgument, r"table\[0, 1\] is 4, expected -1 .empty. or 0..3"),
        ([[0], [-2]], 1, tl.InvalidArgument, r"table\[1, 0\] is -2, expected"),
        ([0, 1], 2, tl.ShapeMismatch, r"table is \[2\], expected \[ranks, slots of a rank\]"),
        (torch.empty(1, 0, dtype=torch.int64), 1, tl.ShapeMismatch, r"table is \[1, 0\], expected"),
        ([[]], 1, tl.ShapeMismatch, r"table is \[1, 0\], expected"),
        ([[0.0]], 1, tl.InvalidArgument, "table is torch.float32, expected integers"),
        ([[True]], 1, tl.InvalidArgument, "table is torch.bool, expected integers"),
        ([[0], [1, 2]], 3, tl.InvalidArgument, r"expected integers \[ranks, slots of a rank\]"),
        ("table", 3, tl.InvalidArgument, r"expected integers \[ranks, slots of a rank\]"),
        (TABLE, 0, tl.InvalidArgument, "num_experts is 0, expected a positive integer"),
        (TABLE, 4.0, tl.InvalidArgument, "num_experts is 4.0, expected a positive integer"),
    ],
)
def test_bad_tables(table: Any, num_experts: Any, kind: type[Exception], text: str) -> None:
    """Each is named, with what was expected."""
    with pytest.raises(kind, match=text):
        tl.Placement(table, num_experts=num_experts)


def test_expert_out_of_range() -> None:
    """-1 is none, and no index from the end."""
    for expert in (-1, 4):
        with pytest.raises(tl.InvalidArgument, match=f"expert is {expert}, expected 0..3"):
            tl.Placement(TABLE, num_experts=4).slots_of(expert)


def test_rank_out_of_range() -> None:
    """Likewise."""
    placement = tl.Placement(TABLE, num_experts=4)
    for rank in (-1, placement.num_ranks):
        with pytest.raises(tl.InvalidArgument, match=f"rank is {rank}, expected 0..{placement.num_ranks - 1}"):
            placement.experts_of(rank)


# -- who gets which route ---------------------------------------------------------------------------------------


@st.composite
def placements(draw: st.DrawFn) -> tl.Placement:
    num_ranks, local, spare = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(0, 4))
    num_experts = num_ranks * local
    more = draw(st.lists(st.integers(-1, num_experts - 1), min_size=num_ranks * spare, max_size=num_ranks * spare))
    slots = draw(st.permutations([*range(num_experts), *more]))
    return tl.Placement(torch.tensor(slots).view(num_ranks, -1), num_experts=num_experts)


def slots_by_torch(placement: tl.Placement, ids: torch.Tensor, rank: int, masked: set[int]) -> torch.Tensor:
    per_rank = placement.slots_per_rank
    table = SlotTable(placement.num_experts, placement.num_ranks, per_rank, rank, CPU)
    slots = [placement.slots_of(e) for e in range(placement.num_experts)]
    table.write([[r * per_rank + s for r, s in each if r not in masked] for each in slots], masked)
    return table.slots_of_routes(ids)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(placement=placements(), data=st.data())
def test_the_rule(placement: tl.Placement, data: st.DataObject) -> None:
    """Any placement, any routing, any ranks that are gone."""
    check_rule(placement, data)


@pytest.mark.soak
@settings(max_examples=100_000, deadline=None)
@given(placement=placements(), data=st.data())
def test_the_rule_at_length(placement: tl.Placement, data: st.DataObject) -> None:
    """The same, as often as a release promises, and others each time."""
    check_rule(placement, data)


def check_rule(placement: tl.Placement, data: st.DataObject) -> None:
    """No route is lost or doubled, each goes to a living slot of its expert, and those of a source are shared evenly.

    Torch's form and the reference, which share nothing, agree on every slot.
    """
    num_ranks, num_experts = placement.num_ranks, placement.num_experts
    top_k, tokens = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 12))
    masked = data.draw(st.sets(st.integers(0, num_ranks - 1), max_size=num_ranks - 1))
    seed, hot = data.draw(st.integers(0, 999)), data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    generator = torch.Generator().manual_seed(seed)
    all_ids = []
    for _ in range(num_ranks):
        ids = torch.randint(-1, num_experts, (tokens, top_k), generator=generator)
        all_ids.append(torch.where(torch.rand(ids.shape, generator=generator) < hot, seed % num_experts, ids))
    plan = Plan(num_ranks, num_experts, 1, top_k, max(1, tokens))
    of_slots, want = reference.place(plan, all_ids, placement.to_tensor().tolist(), masked)
    assert of_slots.num_experts == num_ranks * placement.slots_per_rank
    experts = placement.to_tensor().flatten()
    lost = placement.lost_without(masked)
    for rank, ids in enumerate(all_ids):
        found = slots_by_torch(placement, ids, rank, masked)
        assert torch.equal(found, want[rank].int())
        gone = (ids < 0) | torch.isin(ids, torch.tensor(lost, dtype=torch.int64))
        assert torch.equal(found < 0, gone), "a route is -1 if, and only if, its expert has no slot"
        assert torch.equal(experts[found[~gone].long()], ids[~gone]), "a slot holds the expert of its routes"
        counts = Counter(found[~gone].tolist())
        for e in set(range(num_experts)) - set(lost):
            slots = [r * placement.slots_per_rank + s for r, s in placement.slots_of(e) if r not in masked]
            shares = [counts[slot] for slot in slots]
            assert max(shares) - min(shares) <= 1, "replicas share the routes of a source evenly"
            assert sum(shares) == int((ids == e).sum())


def test_the_rule_by_hand() -> None:
    """Sources begin at another replica each, and the index runs by token, then k."""
    placement = tl.Placement([[0, 1], [0, 0]], num_experts=2)
    ids = torch.tensor([[0, 1, 0], [0, -1, 0]])
    assert slots_by_torch(placement, ids, 0, set()).tolist() == [[0, 1, 2], [3, -1, 0]]
    assert slots_by_torch(placement, ids, 1, set()).tolist() == [[2, 1, 3], [0, -1, 2]]
    assert slots_by_torch(placement, ids, 1, {0}).tolist() == [[3, -1, 2], [3, -1, 2]]
