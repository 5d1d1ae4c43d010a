"""Texts that the ranks of one communicator leave for each other in the key-value store of their process group.

No note waits for another rank, and none raises: without a store, or once its host is gone, no note is seen.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tokenloom.runtime.process_groups import raise_if_of_handler

Answer = TypeVar("Answer")

POLL_S = 0.02
"""How often a rank looks for a note that others are about to leave."""
KEPT_NOTES = 8
"""Named notes of a rank that can still be read: more than there are calls whose outcome a host may not have read."""
TELLS_WHO_IS_MASKED = ("change/", "loss/")
"""Names of notes that begin so are never deleted once a rank is masked, which may come late to read them."""
NO_NOTE = "no note"
"""A value that no note has: it is no JSON."""


class StoreNotes:
    """The notes of one communicator. They are deleted when all of its ranks that are not gone have left.

    Args:
        store: of the process group of the ranks; None: nobody reads or writes a note.
        rank, num_ranks: this rank, and the size of the group.
        joins: the communicator is one that the others have already; :meth:`move` says where its notes are.
        left: it is of the ranks that are left of another one. They are numbered by themselves: no meeting makes
            numbers alike there, and of the others some ranks may have made more, which failed.

    Attributes:
        step: number of the last collective that this rank has started.
        gone: ranks whose notes nobody waits for.
        by_pairs: its collectives are transfers between two ranks each.
        number: of the communicator, as its rank counts those of the group; 0 where the store cannot count.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int, joins: bool = False, left: bool = False) -> None:
        self.rank, self.num_ranks, self.step = rank, num_ranks, 0
        self.gone: frozenset[int] = frozenset()
        self.by_pairs = False
        self._store = store
        self._process = os.getpid()
        self._posted: dict[str, str] = {}
        self._names: set[tuple[str, bool]] = set()
        self._others_keys: set[str] = set()
        self._left = joins
        self._named: Counter[str] = Counter()
        self._series = 0
        # Counted in the store and not in the process: ranks that were in other groups before still count alike.
        kind, place = ("left", "tokenloom/left") if left else ("made", "tokenloom")
        self.number: int = 0 if joins else self.call("add", f"tokenloom/{kind}/{rank}", 1) or 0
        self._prefix = "" if joins else f"{place}/{self.number}"

    @property
    def store(self) -> Any:
        """The store, for what finds its peers there by itself; None where there is none."""
        return self._store

    @property
    def has_left(self) -> bool:
        """Whether this rank writes and reads no notes any more, or none yet."""
        return self._left

    @property
    def name(self) -> str:
        """The communicator's name, the same on all ranks."""
        return self._prefix

    def renumber(self, number: int) -> None:
        """Go on with the notes of a communicator with this number, since other ranks have counted further."""
        if number != self.number:
            self.call("add", f"tokenloom/made/{self.rank}", number - self.number)
            self.number = number
            self.move(f"tokenloom/{number}", self.step)

    def move(self, prefix: str, step: int) -> None:
        """Leave these notes, and go on with empty ones at another place, where collectives are counted from ``step``.

        Ranks that do not move can neither disturb those that do nor be heard by them.
        """
        self.leave()
        self._prefix, self.step, self._left = prefix, step, False
        self._posted, self._names, self._named, self._series = {}, set(), Counter(), 0
        self._others_keys = set()

    def skip_to(self, step: int) -> None:
        """Count collectives, and things with names, from a step on that no rank has come to: ranks that differ in
        what they have begun mean the same again.
        """
        self._say_named()
        self.step = self._series = step
        self._named = Counter()

    def _say_named(self) -> None:
        self.say(f"named/{self._series}", self._named)

    def key(self, name: str, rank: int | None = None) -> str:
        """The store's key for something of this communicator, or of one of its ranks."""
        return f"{self._prefix}/{name}" if rank is None else f"{self._prefix}/{name}/{rank}"

    def new_name(self, kind: str) -> str:
        """A name for the next thing of its kind: the same on all ranks, which make such things in the same order."""
        self._named[kind] += 1
        return f"{kind}/{self._series}/{self._named[kind]}"

    def has_skipped(self, key: str, rank: int) -> bool:
        """Whether a rank has skipped a thing that others have named, or has left, and never had it.

        Args:
            key: of :meth:`new_name`, as :meth:`key` gave it when the thing was named.
        """
        prefix, kind, series, number = key.rsplit("/", 3)
        named = self.hear_at(f"{prefix}/named/{series}/{rank}")
        return named is not None and named.get(kind, 0) < int(number)

    def call(self, method: str, *args: Any) -> Any:
        """Call the store; None where there is none, or its host is gone.

        A forked child has its parent's connection and would answer in its parent's place, so it has no store.
        """
        if self._store is None or os.getpid() != self._process:
            return None
        try:
            return getattr(self._store, method)(*args)
        except RuntimeError as error:
            raise_if_of_handler(error)
            return None

    def say(self, name: str, value: Any, everybody: bool = False) -> None:
        """Leave a value that JSON knows, under this rank's name or for everybody."""
        self._names.add((name, everybody))
        self.say_at(self.key(name, None if everybody else self.rank), value)

    def hear(self, name: str, rank: int | None = None) -> Any:
        """The value that a rank left, or that was left for everybody; None if there is none."""
        self._names.add((name, rank is None))
        return None if self._left else self.hear_at(self.key(name, rank))

    def decide(self, name: str, value: Any) -> Any:
        """Settle something for everybody: the value of the rank that came first; None if the store is gone."""
        self._names.add((name, True))
        return self.decide_at(self.key(name), value)

    def count(self, name: str) -> int | None:
        """Give the next number of a count that all ranks share, or None if the store is gone.

        No two ranks get the same number. :meth:`hear` gives the latest one.
        """
        self._names.add((name, True))
        number: int | None = self.call("add", self.key(name), 1)
        return number

    def say_at(self, key: str, value: Any) -> None:
        """Leave a value under a key of the store."""
        self.call("set", key, json.dumps(value).encode())

    def hear_at(self, key: str) -> Any:
        """The value under a key of the store, None if there is none."""
        # ``get`` would wait for a key that nobody sets, or that somebody deletes meanwhile. This swaps nothing.
        value = self.call("compare_set", key, NO_NOTE, NO_NOTE)
        return None if value is None or value == NO_NOTE.encode() else json.loads(value)

    def decide_at(self, key: str, value: Any) -> Any:
        """The value that came first under a key of the store; None if the store is gone."""
        decided = self.call("compare_set", key, "", json.dumps(value))
        return None if decided is None else json.loads(decided)

    def post(self, name: str, text: str) -> None:
        """Leave a text under this rank's name. The latest KEPT_NOTES can be read."""
        if self._left:
            return
        self._posted.pop(name, None)
        self._posted[name] = text
        while len(self._posted) > KEPT_NOTES:
            self._posted.pop(next(iter(self._posted)))
        self.say("notes", self._posted)

    def read(self, name: str, rank: int) -> str | None:
        """The text that a rank left, or None."""
        return (self.hear("notes", rank) or {}).get(name)

    def sign_in(self, step: int) -> None:
        """Say that this rank waits in a step."""
        self.say("waits", step)

    def waits_in(self, step: int, rank: int) -> bool | None:
        """Whether a rank has come to wait in a step, or in a later one; None: the store cannot say."""
        signed = self.call("check", [self.key("waits", rank)])
        return (self.hear("waits", rank) or 0) >= step if signed else signed

    def give_up(self, why: str, missing: Sequence[int] = ()) -> None:
        """Tell ranks that wait that this one will not answer any more.

        Args:
            missing: whom it has missed, as far as it knows.
        """
        self._say_end("gave up", why, missing)

    def missed_by(self, rank: int) -> list[int] | None:
        """Whom a rank has missed that has given up, empty if it does not know yet; None if it has not given up."""
        end = self.hear("gave up", rank)
        return None if end is None else list(end[1])

    def who_gave_up(self) -> tuple[int, str] | None:
        """A rank that gave up and is not gone, the latest if it is one, and where."""
        return self._who_ended("gave up")

    def fail(self, why: str) -> None:
        """Tell ranks that wait in the middle of a call that this one failed in it."""
        self._say_end("failed", why)

    def who_failed(self) -> tuple[int, str] | None:
        """A rank that failed in the middle of a call and is not gone, the latest if it is one, and its error."""
        return self._who_ended("failed")

    def _say_end(self, how: str, why: str, missing: Sequence[int] = ()) -> None:
        self.say(how, [why, list(missing)])
        self.say(how, self.rank, everybody=True)

    def _who_ended(self, how: str) -> tuple[int, str] | None:
        latest = self.hear(how)
        if latest is None:
            return None
        # Behind a rank that ends, one that is gone may say the same. It does not hide the other.
        for rank in (latest, *range(self.num_ranks)):
            end = None if rank in self.gone else self.hear(how, rank)
            if end is not None:
                return rank, end[0]
        return None

    def leave(self) -> None:
        """Write no more notes and read none. The last rank to leave deletes them."""
        if self._left:
            return
        self._say_named()  # for things that others have begun, and still wait with
        self.say("left", True, everybody=True)
        self.say("left", self.step)
        self._left = True
        # Not their number: ranks that are gone may have left too.
        present = [rank for rank in range(self.num_ranks) if rank not in self.gone]
        if all(self.hear_at(self.key("left", rank)) is not None for rank in present):
            names = {("notes", False), ("waits", False)}
            names |= {(how, everybody) for how in ("gave up", "failed") for everybody in (False, True)}
            for name, everybody in sorted(names | self._names):
                if not (self.gone and name.startswith(TELLS_WHO_IS_MASKED)):
                    self.delete([self.key(name, rank) for rank in ([None] if everybody else range(self.num_ranks))])
            self.delete(sorted(self._others_keys))

    def who_left_before(self, step: int) -> list[int]:
        """Ranks that have left and never started this step: nobody needs to wait for them."""
        if self.hear("left") is None:
            return []
        last = {rank: self.hear("left", rank) for rank in range(self.num_ranks)}
        return [rank for rank, value in last.items() if value is not None and value < step]

    def delete_with_notes(self, keys: Sequence[str]) -> None:
        """Delete these keys of somebody else's too when the last rank leaves. All ranks know them."""
        self._others_keys.update(keys)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove keys, which may not be there."""
        for key in keys:
            self.call("delete_key", key)


def poll(look: Callable[[], Answer], limit_s: float, pause_s: float = POLL_S) -> Answer:
    """Look, again and again, until the answer is true or the time is over: the last answer.

    Args:
        look: may raise to end the wait.
        limit_s: longest wait, in seconds; it looks once at least.
        pause_s: between two looks.
    """
    deadline = time.monotonic() + limit_s
    while not (answer := look()) and time.monotonic() < deadline:
        time.sleep(pause_s)
    return answer
