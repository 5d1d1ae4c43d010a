"""Counts the functions of the package that a call passes, and their files: the way that a reader has to walk."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import tokenloom
from tokenloom.runtime import deferred_release

PACKAGE = str(Path(tokenloom.__file__).parent)
INLINED = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
"""Frames of their own in some versions of Python only."""


@dataclass
class Way:
    """What a call passed.

    Attributes:
        calls: calls of functions of the package.
        files: its files, in the order in which they were met.
    """

    calls: int = 0
    files: list[str] = field(default_factory=list)

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        """Take an event of ``sys.setprofile``."""
        code = frame.f_code
        if event != "call" or code.co_name in INLINED or not code.co_filename.startswith(PACKAGE):
            return
        self.calls += 1
        file = str(Path(code.co_filename).relative_to(PACKAGE))
        if file not in self.files:
            self.files.append(file)


def way_of(call: Callable[[], Any]) -> Way:
    """The way of one call, on this thread."""
    gc.collect()
    deferred_release.release_dropped()  # a call would release what tests before have dropped,
    undone = list(deferred_release._waiting)  # or try to
    deferred_release._waiting.clear()
    way = Way()
    before = sys.getprofile()
    sys.setprofile(way.note)
    try:
        call()
    finally:
        sys.setprofile(before)
        deferred_release._waiting.extend(undone)
    return way
