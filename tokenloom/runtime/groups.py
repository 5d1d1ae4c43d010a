"""Which process group a caller means."""

from __future__ import annotations

import warnings

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tokenloom.errors import InvalidArgument


def process_group_of(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """The process group that was given, or that of a mesh; for None the default group, or None if there is none.

    Raises:
        InvalidArgument: it is something else, a mesh has several dimensions, or this process is not a rank of the
            group.
    """
    kinds: tuple[type, ...] = (dist.ProcessGroup, DeviceMesh) if dist.is_available() else (DeviceMesh,)
    # new_group gives a number to processes that are outside of the group.
    outside = isinstance(group, int) and dist.is_available() and group == dist.GroupMember.NON_GROUP_MEMBER
    if group is not None and not outside and not isinstance(group, kinds):
        raise InvalidArgument(
            f"group is {group!r}, expected a torch.distributed ProcessGroup, a DeviceMesh, or None; pass None for the "
            "default group"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InvalidArgument(f"group is a DeviceMesh of {group.ndim} dimensions; pass one of them: mesh['name']")
        group = group.get_group()
    if group is None and dist.is_available():
        if dist.is_initialized():
            group = dist.group.WORLD
        elif dist.is_torchelastic_launched():
            warnings.warn(
                "torchrun started this process, but torch.distributed is not initialised, so it is alone and has all "
                "experts; call torch.distributed.init_process_group() before",
                stacklevel=4,
            )
    if group is not None and dist.get_rank(group) < 0:
        raise InvalidArgument("this process is not a rank of the group; make the communicator on its ranks only")
    return group
