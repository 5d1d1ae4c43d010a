"""Base of all buffers: a group, communicators, a stream, ``destroy``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from tokenloom.comm.communicators_by_shape import UNKNOWN, CommShape, Communicators
from tokenloom.compat.deep_ep.checks import Payload
from tokenloom.compat.deep_ep.events import EventHandle, EventOverlap
from tokenloom.compat.deep_ep.faults import BadCall, NotServed, require
from tokenloom.compat.deep_ep.streams import CommStream
from tokenloom.errors import a_type

if TYPE_CHECKING:
    from tokenloom.comm.communicator import Communicator


class BufferBase:
    """Base of all buffers.

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
        """Make a buffer. It sends and allocates nothing yet.

        Args:
            group: over gloo for CPU tensors; over NCCL or gloo for CUDA tensors.
            explicitly_destroy: ``destroy`` will be called.
            options: options of every Communicator.
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
        """Communicators that make the calls; None after ``destroy``."""
        return self._communicators

    @property
    def _calls(self) -> Communicators:
        if self._communicators is None:
            raise BadCall("this buffer was destroyed; make a new one")
        return self._communicators

    def _by_row(
        self,
        payload: Payload,
        device: torch.device,
        comm: Communicator | None = None,
        shape: CommShape = UNKNOWN,
    ) -> Payload:
        """Make the scales of a payload contiguous. This may copy, so the current stream must be that of the call.

        Args:
            comm, shape: of the call, as ``Communicators.report_faults_of`` takes them.
        """
        if isinstance(payload, torch.Tensor) or payload[1].is_contiguous():
            return payload
        with self._calls.report_faults_of(device, comm, shape=shape):
            return payload[0], payload[1].contiguous()

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
        """Return the stream that asynchronous calls run on; None without CUDA."""
        return self._stream.get()


def captured() -> EventOverlap:
    """Record the current stream's work so far."""
    return EventOverlap(EventHandle())
