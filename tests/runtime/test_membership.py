"""What ranks say to each other about who is there, where any of them may be held up at any moment."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import torch.distributed as dist

from tokenloom.runtime.membership import Membership
from tokenloom.runtime.store_notes import POLL_S, StoreNotes


class HeldUp:
    """A store as a rank sees it whose first roll call is held up between its decision and its effect.

    Args:
        store: the store.
        after: when it may take effect.
        called: set when it has.
    """

    def __init__(self, store: dist.Store, after: Event, called: Event) -> None:
        self._store, self._after, self._called = store, after, called

    def __getattr__(self, name: str) -> Any:
        def call(key: Any, *args: Any) -> Any:
            calls = name in ("set", "add") and key.endswith("roll call")
            if calls:
                assert self._after.wait(60)
            result = getattr(self._store, name)(key, *args)
            if calls:
                self._called.set()
            return result

        return call


def test_roll_calls_at_the_same_time() -> None:
    """Ranks that wait for a late one call the roll together. One that began first is overtaken by the others' calls:
    each of the three hears from both others all the same.
    """
    store, heard_all = dist.HashStore(), [Event() for _ in range(3)]
    at_once, first, second, third = (Event() for _ in range(4))
    at_once.set()
    stores = [HeldUp(store, second, third), HeldUp(store, at_once, first), HeldUp(store, first, second)]

    def serve(rank: int) -> set[int]:
        members = Membership(StoreNotes(stores[rank], rank, 3))
        there = members.roll_call(members.others)
        heard_all[rank].set()
        while not all(each.is_set() for each in heard_all):
            members.look()  # as a rank does that waits
            time.sleep(POLL_S)
        return there

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(serve, range(3))) == [{1, 2}, {0, 2}, {0, 1}]
