"""Stamps tell what ranks say in this collective of NCCL from what they have said in earlier ones.

Where a rank is lost, others may abort NCCL's communicator, or torch does as Python ends. Their kernels then send what
is in their buffers. Elsewhere the collective ends as if all had answered, with words of earlier collectives. So the
ranks of a group number the gathers that their hosts wait for, and each puts the number into its words.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch.distributed as dist

UNSTAMPED = 0
"""In the stamp's place where words cannot be stale."""

_numbers: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Gathers that hosts have waited for, by process group: its communicators share NCCL's buffers."""


def next_stamp(group: dist.ProcessGroup) -> int:
    """The stamp of the next gather on the group that hosts wait for: the same on all of its ranks.

    NCCL matches collectives by their order, so words with different stamps are not of the same one.
    """
    return _numbers.get(group, UNSTAMPED) + 1


def count(group: dist.ProcessGroup, more: int = 1) -> None:
    """Say that this rank starts so many more of them."""
    _numbers[group] = _numbers.get(group, UNSTAMPED) + more
