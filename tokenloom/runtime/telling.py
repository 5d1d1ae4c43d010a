"""Blocks that other ranks wait for, and the one rule by which they hear what fails there.

The innermost block around a fault tells it, in a way that suits what the others wait in, and marks the error
``known_to_all``. Blocks around it let it pass. So a fault is told once, wherever it comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tokenloom.errors import is_known_to_all
from tokenloom.runtime.torch_modes import is_eager, untransformed


@dataclass(eq=False)
class Telling(AbstractContextManager[Any]):
    """A block that other ranks wait for. A class, since a generator costs every call more.

    Attributes:
        tell: tells the others of an Exception. An error that it raises comes instead: all ranks raise that one.
        end: ends the group behind what is no Exception, such as KeyboardInterrupt. It may end the program, which shall
            not wait for the others.
    """

    tell: Callable[[Exception], object]
    end: Callable[[BaseException], object]

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if fault is None or is_known_to_all(fault):
            return
        if not isinstance(fault, Exception):
            self.end(fault)
        elif is_eager():
            self.tell(fault)
        else:
            told: Exception = fault
            untransformed(lambda: self.tell(told))
        fault.known_to_all = True  # type: ignore[attr-defined]  # for the blocks around
