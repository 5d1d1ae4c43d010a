"""A forked process has the groups of its parent, without the threads that serve their connections."""

from __future__ import annotations

import ctypes
import os
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

_all: WeakSet[Any] = WeakSet()
"""Each :class:`RankGroup <tokenloom.runtime.rank_group.RankGroup>` of this process."""
_of_parent: list[Any] = []
"""In a forked process: groups of the parent, and their process groups. To drop one would disturb the parent's."""


def leave_to_parent_when_forked(ranks: Any) -> None:
    """Keep this group whole for its own process, whenever that is forked."""
    _all.add(ranks)


def is_of_parent(thing: object) -> bool:
    """Whether a group of ranks, or a process group, belongs to the process from which this one was forked."""
    return any(thing is each for each in _of_parent)


def _leave_to_parent() -> None:
    """Leave the parent's groups alone. A rank alone on a CPU has no connections, and works on in both processes."""
    if dist.is_available() and dist.is_initialized():
        _of_parent.extend(dist.distributed_c10d._world.pg_map)  # all that there are; no public way (torch 2.13)
    # Also as Python ends: a destructor in gloo would wait for threads that this process never had.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_of_parent))
    for ranks in list(_all):
        if ranks.process_group is not None or ranks.device.type == "cuda":
            _of_parent.extend((ranks, ranks.process_group))
            ranks._watch.broken = (
                f"this communicator is of the process from which process {os.getpid()} was forked, whose connections "
                "it cannot use: start processes by spawn, or call init_process_group() here"
            )


os.register_at_fork(after_in_child=_leave_to_parent)
