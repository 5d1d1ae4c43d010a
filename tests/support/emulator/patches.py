"""Patches that ranks make of modules and classes, each for itself, where ranks are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def in_any_order() -> Iterator[None]:
    """Let patches of one attribute that are made in this block end in any order.

    A patch of mock puts back what it found. Of two that overlap, the one that begins last finds what the first has put
    there; if it also ends last, that stays for good. Here it puts back what the first one found, and the first one
    puts back nothing.
    """
    lock, patches = threading.RLock(), list[Any]()
    enter, leave = mock._patch.__enter__, mock._patch.__exit__

    def begin(patch: Any) -> Any:
        with lock:
            found = enter(patch)
            patches.append(patch)
            return found

    def end(patch: Any, *raised: Any) -> Any:
        with lock:
            if patch in patches:
                later = [each for each in patches[patches.index(patch) + 1 :] if each.target is patch.target]
                patches.remove(patch)
                over = next((each for each in later if each.attribute == patch.attribute), None)
                if over is not None:
                    over.temp_original, over.is_local = patch.temp_original, patch.is_local
                    patch.temp_original, patch.is_local = vars(patch.target)[patch.attribute], True
            return leave(patch, *raised)

    try:
        for name, method in (("__enter__", begin), ("__exit__", end)):
            setattr(mock._patch, name, method)
        yield
    finally:
        for name, method in (("__enter__", enter), ("__exit__", leave)):
            setattr(mock._patch, name, method)
