"""Process groups of torch: which one a caller means, its store, and whose errors calls of torch end with."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

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


def store_of(group: dist.ProcessGroup | None) -> Any:
    """The key-value store that the group was made with, or None where torch keeps it out of reach."""
    try:
        return group.get_group_store()  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return None


def raise_if_of_handler(error: BaseException) -> None:
    """Raise an error that a signal handler has raised during a call of torch: it is no error of torch.

    Python may run a handler between any two steps of the call, and gives it the frame that it interrupts. Nothing else
    is called with the frame of its caller.
    """
    # The first frame is that of who caught the error. It is no handler, and its f_locals would keep the error alive.
    trace = error.__traceback__ and error.__traceback__.tb_next
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_back is not None and any(each is frame.f_back for each in _frames_in(frame.f_locals.values())):
            raise error
        trace = trace.tb_next


def _frames_in(values: Iterable[object]) -> Iterator[FrameType]:
    """Yield frames among the values of local variables, of which one may hold all arguments."""
    for value in values:
        if isinstance(value, FrameType):
            yield value
        elif type(value) is tuple:
            yield from (each for each in value if isinstance(each, FrameType))
