"""The communicators of one process group on this rank.

They share the order of the group's collectives, whichever of them starts one. So when ranks have begun different
things, all of them have to mean the same again.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

from tokenloom.runtime.noteboard import Noteboard


class Siblings:
    """The communicators of one group, by their noteboards."""

    def __init__(self) -> None:
        self._notes: WeakSet[Noteboard] = WeakSet()

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
