"""What all buffers have: a group, communicators, a stream, an end."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist

from tokenloom.comm.growing import Communicators
from tokenloom.compat.deep_ep.events import EventHandle, EventOverlap
from tokenloom.compat.deep_ep.faults import NotServed, require
from tokenloom.compat.deep_ep.streams import CommStream
from tokenloom.errors import a_type


class BufferBase:
    """The part that all buffers share.

    Attributes:
        group: the process group.
    """

    _ranks_per_node: ClassVar[int | None] = None

    @staticmethod
    def set_ranks_per_node(ranks_per_node: int | None) -> None:
        """Let buffers of any kind that are made from now on take ranks for nodes, as ``Communicator`` does.

        Args:
            ranks_per_node: the same on all ranks; None finds the nodes, as by default.
        """
        BufferBase._ranks_per_node = ranks_per_node

    def __init__(self, group: dist.ProcessGroup | None, explicitly_destroy: bool, options: dict[str, Any]) -> None:
        """Nothing is sent or allocated yet.

        Args:
            group: over gloo for CPU tensors; over NCCL or gloo for CUDA tensors.
            explicitly_destroy: ``destroy`` will be called.
            options: of every Communicator.
        """
        if not isinstance(group, dist.ProcessGroup):
            raise NotServed(f"group is {a_type(group)}, expected a torch.distributed process group")
        self.group = group
        self.explicitly_destroy = explicitly_destroy
        self._stream = CommStream()
        self._options = options | {"ranks_per_node": BufferBase._ranks_per_node}
        self._communicators: Communicators | None = Communicators(group, lambda: self._options)

    @property
    def runtime(self) -> Any:
        """What makes the calls; None after ``destroy``."""
        return self._communicators

    @property
    def _calls(self) -> Communicators:
        require(self._communicators is not None, "this buffer was destroyed; make a new one")
        assert self._communicators is not None
        return self._communicators

    def destroy(self) -> None:
        """Release everything. Later calls fail.

        Raises:
            BadCall: the buffer was not made with ``explicitly_destroy=True``.
        """
        require(self.explicitly_destroy, "destroy: the buffer was made without explicitly_destroy=True")
        if self._communicators is not None:
            self._communicators.close()
            self._communicators = None

    def get_comm_stream(self) -> Any:
        """The stream that calls run on; None without CUDA."""
        return self._stream.get()


def captured() -> EventOverlap:
    """The current stream's work so far."""
    return EventOverlap(EventHandle())
