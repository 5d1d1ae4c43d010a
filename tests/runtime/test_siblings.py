"""Communicators of one process group: who has parted, and who is only slow."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import tokenloom as tl
from tokenloom.runtime.siblings import THE_GROUP, Siblings
from tokenloom.runtime.store_notes import StoreNotes

FIRST, SECOND = "tokenloom/1", "tokenloom/2"


def two(rank: int, store: Any) -> tuple[Siblings, list[StoreNotes]]:
    """Two communicators of a rank of two, on connections of their own, each behind its tenth collective."""
    siblings, of_both = Siblings(), [StoreNotes(store, rank, 2) for _ in range(2)]
    for notes in of_both:
        siblings.add(notes)
        notes.by_pairs, notes.step = True, 10
    siblings.begin_partings(of_both[0])
    return siblings, of_both


@pytest.mark.parametrize("has_sent", [False, True])
@pytest.mark.parametrize("waits_for", [[0], [3]], ids=["this rank", "another"])
@pytest.mark.parametrize("has_begun", [False, True])
def test_who_has_parted(has_sent: bool, waits_for: list[int], has_begun: bool) -> None:
    """Rank 1 waits in the second communicator, and rank 0 in the first. They have parted unless one of them has begun
    what the other waits in: that one is slow to see what is there already. Or it waits for somebody else."""
    store = dist.HashStore()
    (here, mine), (there, theirs) = two(0, store), two(1, store)
    theirs[1].step = 11
    theirs[0].step += has_sent
    mine[1].step += has_begun
    mine[0].step = 11
    with there.waiting(theirs[1], "a dispatch", 11) as wait:
        wait.look(waits_for)
        parted = waits_for == [0] and not has_sent and not has_begun
        with here.waiting(mine[0], "a combine", 11) as own:
            if not parted:
                own.look([1])
                return
            with pytest.raises(tl.PlanMismatch, match=rf"{SECOND} \(a dispatch\), rank 0 has.*{FIRST} \(a combine\)"):
                own.look([1])
        with pytest.raises(tl.PlanMismatch, match=rf"{SECOND} \(a dispatch\), rank 0 has.*{FIRST} \(a combine\)"):
            wait.look([0])
    steps = {notes.step for notes in (*mine, *theirs)}
    assert len(steps) == 1
    assert steps.pop() > 11
    for notes, siblings in ((mine[0], here), (theirs[0], there)):
        siblings.raise_parting(notes)  # once


def test_who_waits_no_longer() -> None:
    """What a rank has said is taken back with the end of its wait."""
    store = dist.HashStore()
    (here, mine), (there, theirs) = two(0, store), two(1, store)
    theirs[1].step = mine[0].step = 11
    with there.waiting(theirs[1], "a dispatch", 11) as wait:
        wait.look([0])
    with here.waiting(mine[0], "a combine", 11) as own:
        own.look([1])


def test_who_comes_back() -> None:
    """A rank that comes back hears nothing of what was written down before."""
    store = dist.HashStore()
    (here, mine), (there, theirs) = two(0, store), two(1, store)
    here.write_parting(mine[0], (1, "communicator", SECOND, FIRST, 0), [{THE_GROUP: 0, FIRST: 11}])
    there.begin_partings(theirs[0], anew=True)
    there.raise_parting(theirs[0])
    assert theirs[0].step == 10


def test_a_group_with_the_name_of_one_that_came_apart() -> None:
    """torch makes groups with the keys of such that were destroyed. The new one works, on all ranks."""
    store = dist.HashStore()

    def made(rank: int) -> tuple[Siblings, StoreNotes]:
        siblings, notes = Siblings(), StoreNotes(store, rank, 2)
        siblings.add(notes)
        return siblings, notes

    (here, mine), (there, _) = made(0), made(1)
    here.part(mine, tl.PeerTimeout(0, [1], "a dispatch", 3, "no answer"))
    there.add(StoreNotes(store, 1, 2))  # which looks
    for siblings in (here, there):
        with pytest.raises(tl.CommunicatorBroken, match="rank 0 has waited in vain in a dispatch; make a new process"):
            siblings.require_together()
    for rank in range(2):
        made(rank)[0].require_together()
