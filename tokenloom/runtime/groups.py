"""Which process group a caller means."""

from __future__ import annotations

import warnings

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tokenloom.errors import InvalidArgument


def process_group_of(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """The process group that was given, or that of a mesh; for None the default group, or None if there is none.

    Raises:
        InvalidArgument: a mesh has several dimensions, or this process is not a rank of the group.
    """
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
