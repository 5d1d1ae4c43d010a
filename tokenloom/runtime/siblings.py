"""The communicators of one process group on this rank.

They share the order of the group's collectives, whichever of them starts one. So when ranks have begun different
things, all of them have to mean the same again.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

from tokenloom.errors import CommunicatorBroken
from tokenloom.runtime.noteboard import Noteboard


class Siblings:
    """The communicators of one group, by their noteboards."""

    def __init__(self) -> None:
        self._notes: WeakSet[Noteboard] = WeakSet()
        self._apart: str | None = None

    def part(self, why: str) -> None:
        """Say that the ranks have come to different collectives of the group, which will never match again."""
        self._apart = self._apart or why

    def require_together(self) -> None:
        """Raise CommunicatorBroken if they have: gloo would end a process that gets what another collective sends."""
        if self._apart:
            raise CommunicatorBroken(f"{self._apart}; make a new process group, and a communicator on it")

    def add(self, notes: Noteboard) -> None:
        """Add a communicator. One that has left its notes counts no longer."""
        self._notes.add(notes)

    @property
    def all(self) -> list[Noteboard]:
        """Those that calls use."""
        return [notes for notes in self._notes if not notes.has_left]

    @property
    def latest(self) -> int:
        """The largest number of a collective that any has started."""
        return max((notes.step for notes in self.all), default=0)

    def skip_to(self, step: int) -> None:
        """Let all of them count on from a step that no rank has come to in any; see :meth:`Noteboard.skip_to`."""
        for notes in self.all:
            notes.skip_to(step)


_of_groups: WeakKeyDictionary[dist.ProcessGroup, Siblings] = WeakKeyDictionary()


def siblings_of(group: dist.ProcessGroup | None) -> Siblings:
    """The communicators of a process group on this rank; none yet for a rank alone."""
    return Siblings() if group is None else _of_groups.setdefault(group, Siblings())
