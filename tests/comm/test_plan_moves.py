"""Plans of moves, of random placements: nothing is read after it was overwritten, nothing moves in vain."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenloom as tl
from tokenloom.comm.plan_moves import cut_into_pieces, plan_moves


@st.composite
def pairs(draw: st.DrawFn) -> tuple[tl.Placement, tl.Placement]:
    """Two placements of the same sizes, from no spare slot to many."""
    ranks, per_rank, spare = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(0, 2))
    experts, slots = ranks * per_rank, ranks * (per_rank + spare)

    def one() -> tl.Placement:
        more = draw(st.lists(st.integers(-1, experts - 1), min_size=slots - experts, max_size=slots - experts))
        table = torch.tensor(draw(st.permutations([*range(experts), *more])))
        return tl.Placement(table.view(ranks, -1), num_experts=experts)

    return one(), one()


def living_rows(placement: tl.Placement, masked: set[int]) -> dict[int, list[int]]:
    return {r: list(placement.experts_of(r)) for r in range(placement.num_ranks) if r not in masked}


def check(old: tl.Placement, new: tl.Placement, masked: set[int], stale: set[int]) -> None:
    """Carry the plan out on lists of what each slot holds."""
    held = {r: [-1] * len(row) if r in stale else row for r, row in living_rows(old, masked).items()}
    stages, now, moved = plan_moves(old, new, masked, stale), old, 0
    for stage in stages:
        scratch: dict[int, tuple[int, int]] = {}
        for copy in stage.copies:
            assert held[copy.source[0]][copy.source[1]] == copy.expert, "what is read is not the expert"
            assert copy.source[0] == copy.to[0] or copy.expert not in held[copy.to[0]], "it was on this rank"
        for copy in stage.copies:
            rank, slot = copy.to
            ruling = -1 if rank in stale and not moved else now.experts_of(rank)[slot]
            if copy.by_scratch:
                assert rank not in scratch, "scratch memory has room for one"
                scratch[rank] = slot, copy.expert
            else:
                assert ruling == -1, "a slot is overwritten whose expert still counts"
                held[rank][slot] = copy.expert
        for rank, (slot, expert) in scratch.items():
            held[rank][slot] = expert
        moved += len(stage.copies)
        now = stage.placement
        for rank, row in living_rows(now, masked).items():
            assert all(e in (-1, found) for e, found in zip(row, held[rank], strict=True)), "the table is ahead"
        had = {e for row in living_rows(old, masked).values() for e in row}
        assert had <= {e for row in living_rows(now, masked).values() for e in row} | {-1}, "an expert is lost"
    for rank, row in living_rows(new, masked).items():
        assert Counter(now.experts_of(rank)) == Counter(row)
        if rank not in stale:
            stay = Counter(row) & Counter(old.experts_of(rank))
            same = Counter(a for a, b in zip(old.experts_of(rank), now.experts_of(rank), strict=True) if a == b)
            assert all(same[e] == stay[e] for e in stay if e >= 0), "an expert that stays has left its slot"
    gone = Counter({r: sum((Counter(row) - Counter([-1] * len(row) if r in stale else old.experts_of(r))).values())
                    - max(0, Counter(row)[-1] - ([-1] * len(row) if r in stale else old.experts_of(r)).count(-1))
                    for r, row in living_rows(new, masked).items()})  # fmt: skip
    assert moved == sum(gone.values()), "something moves that need not"


@settings(max_examples=150, derandomize=True, deadline=None)
@given(pairs())
def test_moves(pair: tuple[tl.Placement, tl.Placement]) -> None:
    check(*pair, set(), set())


@pytest.mark.soak
@settings(max_examples=100_000, deadline=None)
@given(pairs())
def test_moves_at_length(pair: tuple[tl.Placement, tl.Placement]) -> None:
    """The same, as often as a release promises, and others each time."""
    check(*pair, set(), set())


@settings(max_examples=150, derandomize=True, deadline=None)
@given(pairs(), st.data())
def test_without_ranks(pair: tuple[tl.Placement, tl.Placement], data: st.DataObject) -> None:
    """Masked ranks neither read nor written, stale ones filled whole; or a named error, if an expert is nowhere."""
    old, new = pair
    some = st.sets(st.integers(0, old.num_ranks - 1), max_size=old.num_ranks - 1)
    masked, stale = data.draw(some), data.draw(some)
    stale -= masked
    readable = {e for r, row in living_rows(old, masked).items() if r not in stale for e in row} - {-1}
    wanted = {e for row in living_rows(new, masked).values() for e in row} - {-1}
    if readable != wanted:
        with pytest.raises(tl.InvalidArgument, match=r"have no slot to be read|on masked ranks alone"):
            plan_moves(old, new, masked, stale)
        return
    check(old, new, masked, stale)
    assert all(stage.placement.experts_of(r) == new.experts_of(r) for stage in plan_moves(old, new, masked, stale)[-1:]
               for r in masked)  # fmt: skip


@settings(max_examples=150, derandomize=True, deadline=None)
@given(pairs(), st.integers(0, 50), st.integers(1, 60))
def test_pieces(pair: tuple[tl.Placement, tl.Placement], expert_bytes: int, piece_bytes: int) -> None:
    """Each byte of each copy travels once, and no rank sends or receives more than a piece in a step."""
    for stage in plan_moves(*pair):
        covered: Counter[tuple[object, int]] = Counter()
        steps = cut_into_pieces(stage.copies, expert_bytes, piece_bytes)
        for pieces in steps:
            for side in ("source", "to"):
                of_ranks: Counter[int] = Counter()
                for piece in pieces:
                    of_ranks[getattr(piece.copy, side)[0]] += piece.end - piece.begin
                assert all(count <= piece_bytes for count in of_ranks.values())
            assert pieces or not expert_bytes or not stage.copies
            covered.update((piece.copy, byte) for piece in pieces for byte in range(piece.begin, piece.end))
        assert steps
        assert covered == Counter((copy, byte) for copy in stage.copies for byte in range(expert_bytes))


def test_a_swap_and_a_circle() -> None:
    """Without a spare slot: one stage, everything by scratch."""

    def table(*rows: list[int]) -> tl.Placement:  # fmt: skip
        return tl.Placement(torch.tensor(rows), num_experts=sum(map(len, rows)))

    for old, new in (
        (table([0, 1], [2, 3]), table([0, 3], [2, 1])),
        (table([0, 1], [2, 3], [4, 5]), table([5, 1], [2, 0], [4, 3])),
    ):
        (stage,) = plan_moves(old, new)
        assert all(copy.by_scratch for copy in stage.copies)
        assert len(stage.copies) == old.num_ranks
    assert plan_moves(table([0, 1], [2, 3]), table([1, 0], [3, 2])) == ()  # the order within a rank says nothing
