"""Notes that ranks leave for each other, and what stays of them."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.conftest import CPU_RANKS
from tests.runtime.test_rank_group import call, on_group, open_call, send_rows
from tests.support.on_ranks import on_ranks
from tokenloom.runtime import store_notes
from tokenloom.runtime.process_groups import store_of
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.store_notes import StoreNotes

TIMEOUT_S, OPEN_TIMEOUT_S = 1.0, 20.0
ALL = list(range(CPU_RANKS))
PAIR = [1, 2]


@on_ranks("four")
def test_notes(context: RankContext) -> None:
    """Each rank has its own, the latest ones can be read, and ranks that made other groups before agree on where."""
    own, alone = dist.new_group(ALL), [dist.new_group([rank]) for rank in ALL]
    for _ in range(1 + 2 * context.rank):
        RankGroup(alone[context.rank])
    ranks = RankGroup(own)
    for number in range(store_notes.KEPT_NOTES + 1):
        ranks.notes.post(f"fault/{number}", f"{number} of {context.rank}")
    open_call(ranks)
    other = (context.rank + 1) % context.num_ranks
    assert ranks.notes.read("fault/0", other) is None
    for number in range(1, store_notes.KEPT_NOTES + 1):
        assert ranks.notes.read(f"fault/{number}", other) == f"{number} of {other}"
    assert ranks.notes.read("something else", other) is None
    send_rows(ranks)
    ranks.close()
    assert ranks.notes.read("fault/1", other) is None, "what the others delete is not waited for"


@on_group(PAIR)
@pytest.mark.parametrize("end", ["close", "drop", "time out", "close with links"])
def test_the_store_does_not_grow(ranks: RankGroup, end: str) -> None:
    """A server that makes a new communicator a hundred times, after closing one, losing one or timing out. Where ranks
    may be masked they have found each other in the store, to connect."""
    group = ranks.process_group
    store = store_of(group)
    open_call(ranks)
    first: set[str] = set()
    for number in range(10):
        ranks.notes.post("fault/1", "something")
        open_call(ranks)
        if end == "time out":
            ranks.notes.give_up("the test")
        if end != "drop":
            ranks.close()
        ranks = RankGroup(group, timeout_s=TIMEOUT_S, open_timeout_s=OPEN_TIMEOUT_S)
        ranks.notes.sign_in(1)  # as ranks do by themselves on a busy machine
        if end == "close with links":
            ranks.mask_late()
        open_call(ranks)  # both have left the last one
        send_rows(ranks)  # and nobody has begun with this one
        if number == 2:  # the last but one of those that were dropped is only now undone
            first = ours(store)
        open_call(ranks)
    assert len(ours(store)) <= len(first), ours(store) ^ first
    send_rows(ranks)


def ours(store: Any) -> set[str]:
    """Keys of communicators. One more of each rank says where it waits, if it ever has."""
    return {key for key in store.list_keys() if "tokenloom/" in key and "tokenloom/waits/" not in key}


def test_notes_stay_until_the_last_rank_has_left() -> None:
    """A rank that has left and then was masked is not counted for one of those that are left: the last of these still
    hears who has left. It deletes the notes."""
    store = dist.HashStore()
    notes = notes_of_all(store, 3)
    notes[0].leave()
    for rank in (1, 2):
        notes[rank].gone = frozenset([0])
    notes[1].leave()
    assert notes[2].who_left_before(1) == [0, 1]
    notes[2].leave()
    assert not {key for key in store.list_keys() if "/made/" not in key}


@pytest.mark.parametrize(("say", "hear"), [("give_up", "who_gave_up"), ("fail", "who_failed")])
def test_who_is_gone_hides_nobody(say: str, hear: str) -> None:
    """A rank gives up, and behind it one that is masked, which the others do not care for."""
    notes = notes_of_all(dist.HashStore(), 4)
    for rank in (0, 1, 2):
        notes[rank].gone = frozenset([3])
    getattr(notes[3], say)("the test")
    assert getattr(notes[0], hear)() is None
    for rank in (1, 3):
        getattr(notes[rank], say)(f"rank {rank}")
        assert getattr(notes[0], hear)() == (1, "rank 1")


class Deleting:
    """A store in which another rank deletes a key at the moment when it is read."""

    def __init__(self, store: dist.Store, key: str) -> None:
        self._store, self._key = store, key

    def __getattr__(self, name: str) -> Any:
        if name in ("get", "compare_set"):
            self._store.delete_key(self._key)
        return getattr(self._store, name)


def test_a_note_that_is_deleted_meanwhile() -> None:
    """A masked rank that lives may read while the last of the others leaves. It does not wait for the note."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))
    notes = StoreNotes(store, 0, 2)
    notes.say("roll call", 1, everybody=True)
    notes._store = Deleting(store, notes.key("roll call"))
    began = time.monotonic()
    assert notes.hear("roll call") is None
    assert time.monotonic() - began < 5.0


def notes_of_all(store: dist.Store, num_ranks: int) -> list[StoreNotes]:
    """The notes of all ranks, in one process."""
    return [StoreNotes(store, rank, num_ranks) for rank in range(num_ranks)]


@on_group(PAIR)
def test_a_forked_child_leaves_the_store_alone(ranks: RankGroup) -> None:
    """It shares its parent's connection, so what it says would be taken for its parent's, and it would read the
    answers that its parent waits for."""
    ranks.notes.post("before", "the fork")
    open_call(ranks)
    child = os.fork()
    if child == 0:
        ranks.notes.post("child", "was here")
        ranks.close()
        os._exit(0 if ranks.notes.read("before", 1 - ranks.rank) is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    open_call(ranks)
    assert ranks.notes.read("before", 1 - ranks.rank) == "the fork"
    assert ranks.notes.read("child", 1 - ranks.rank) is None
    call(ranks)
