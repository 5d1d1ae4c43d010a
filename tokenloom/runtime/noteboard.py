"""Texts that the ranks of one communicator leave for each other in the key-value store of their process group.

Nothing here waits for another rank, and nothing raises: without a store, or once its host is gone, no note is seen.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

KEPT_NOTES = 8
"""Named notes of a rank that can still be read: more than there are calls whose outcome a host may not have read."""


class Noteboard:
    """The notes of one communicator. They are deleted when all of its ranks have left.

    Args:
        group: of the ranks, or None for a rank alone.
        rank, num_ranks: within it.

    Attributes:
        step: number of the last collective that this rank has started.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks, self.step = rank, num_ranks, 0
        self._store = store_of(group)
        self._process = os.getpid()
        self._posted: dict[str, str] = {}
        self._left = False
        self._named: Counter[str] = Counter()
        # Counted in the store and not in the process: ranks that were in other groups before still count alike.
        self._prefix = f"tokenloom/{self.call('add', f'tokenloom/made/{rank}', 1)}"

    def key(self, name: str, rank: int | None = None) -> str:
        """The store's key for something of this communicator, or of one of its ranks."""
        return f"{self._prefix}/{name}" if rank is None else f"{self._prefix}/{name}/{rank}"

    def new_name(self, kind: str) -> str:
        """A name for the next thing of its kind: the same on all ranks, which make such things in the same order."""
        self._named[kind] += 1
        return f"{kind}/{self._named[kind]}"

    def call(self, method: str, *args: Any) -> Any:
        """Call the store; None where there is none, or its host is gone.

        A forked child has its parent's connection and would answer in its parent's place, so it has no store.
        """
        if self._store is None or os.getpid() != self._process:
            return None
        try:
            return getattr(self._store, method)(*args)
        except RuntimeError:
            return None

    def post(self, name: str, text: str) -> None:
        """Leave a text under this rank's name. The latest KEPT_NOTES can be read."""
        if self._left:
            return
        self._posted.pop(name, None)
        self._posted[name] = text
        while len(self._posted) > KEPT_NOTES:
            self._posted.pop(next(iter(self._posted)))
        self.call("set", self.key("notes", self.rank), json.dumps(self._posted).encode())

    def read(self, name: str, rank: int) -> str | None:
        """The text that a rank left, or None."""
        notes = self._get(self.key("notes", rank))
        return None if notes is None else json.loads(notes).get(name)

    def sign_in(self, step: int) -> None:
        """Say that this rank waits in a step."""
        self.call("set", self.key("waits", self.rank), str(step).encode())

    def waits_in(self, step: int, rank: int) -> bool | None:
        """Whether a rank has come to wait in a step, or in a later one; None: the store cannot say."""
        key = self.key("waits", rank)
        signed = self.call("check", [key])
        return int(self.call("get", key) or 0) >= step if signed else signed

    def give_up(self, why: str) -> None:
        """Tell ranks that wait that this one will not answer any more."""
        self.call("set", self.key("gave up"), json.dumps([self.rank, why]).encode())

    def who_gave_up(self) -> tuple[int, str] | None:
        """The rank that gave up, the latest if several did, and where."""
        return self._said("gave up")

    def fail(self, why: str) -> None:
        """Tell ranks that wait in the middle of a call that this one failed in it."""
        self.call("set", self.key("failed"), json.dumps([self.rank, why]).encode())

    def who_failed(self) -> tuple[int, str] | None:
        """The rank that failed in the middle of a call, and its error."""
        return self._said("failed")

    def leave(self) -> None:
        """Write no more notes and read none. The last rank to leave deletes all of them."""
        if self._left:
            return
        self._left = True
        self.call("set", self.key("left", self.rank), str(self.step).encode())
        if self.call("add", self.key("num left"), 1) == self.num_ranks:
            names = [(name, rank) for name in ("notes", "waits", "left") for rank in range(self.num_ranks)]
            self.delete([self.key(*each) for each in names])
            self.delete([self.key(name) for name in ("gave up", "failed", "num left")])

    def who_left_before(self, step: int) -> list[int]:
        """Ranks that have left and never started this step: nobody needs to wait for them."""
        if not self.call("check", [self.key("num left")]):
            return []
        last = {rank: self._get(self.key("left", rank)) for rank in range(self.num_ranks)}
        return [rank for rank, value in last.items() if value is not None and int(value) < step]

    def delete(self, keys: Sequence[str]) -> None:
        """Remove keys, which may not be there."""
        for key in keys:
            self.call("delete_key", key)

    def _said(self, name: str) -> tuple[int, str] | None:
        said = self._get(self.key(name))
        if said is None:
            return None
        rank, why = json.loads(said)
        return rank, why

    def _get(self, key: str) -> str | None:
        """The value of a key that may not be there: ``get`` alone would wait for it.

        Nobody deletes a key between the two, since this rank has not left.
        """
        if self._left or not self.call("check", [key]):
            return None
        value = self.call("get", key)
        return None if value is None else value.decode()


def store_of(group: dist.ProcessGroup | None) -> Any:
    """The key-value store that the group was made with, or None where torch keeps it out of reach."""
    try:
        return group.get_group_store()  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return None
