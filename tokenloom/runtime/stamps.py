"""Stamps tell what ranks say in this collective of NCCL from what they have said in earlier ones.

A rank that ends while others wait aborts NCCL's communicator, if its program destroys the process group. Its kernels,
which wait for a lost rank, then send what is in their buffers. Elsewhere the collective ends as if all had answered,
with words of earlier collectives. So the ranks of a group number what opens their calls, and each puts the number
into its words.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch.distributed as dist

UNSTAMPED = 0
"""In the stamp's place where words cannot be stale."""

_numbers: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Collectives that have opened calls, by process group: its communicators share NCCL's buffers."""


def next_stamp(group: dist.ProcessGroup) -> int:
    """The stamp of the next collective that opens a call on the group: the same on all of its ranks.

    NCCL matches collectives by their order, so words with different stamps are not of the same one.
    """
    return _numbers.get(group, UNSTAMPED) + 1


def count(group: dist.ProcessGroup) -> None:
    """Say that this rank has started such a collective."""
    _numbers[group] = next_stamp(group)
