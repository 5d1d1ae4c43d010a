"""Events for clients of deep_ep. Without CUDA, work is done when a call returns, and events do nothing."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from tokenloom.compat.deep_ep.faults import BadCall
from tokenloom.errors import a_type


class EventHandle:
    """Record of the current stream's work so far.

    Attributes:
        recorded: the torch.cuda.Event, or None where this process has not used CUDA.
    """

    def __init__(self) -> None:
        self.recorded: torch.cuda.Event | None = None
        if torch.cuda.is_initialized():
            self.recorded = torch.cuda.current_stream().record_event()

    @classmethod
    def of(cls, recorded: torch.cuda.Event | None) -> EventHandle:
        """Hold an event that was recorded elsewhere."""
        made = cls.__new__(cls)
        made.recorded = recorded
        return made

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the work."""
        if self.recorded is not None:
            torch.cuda.current_stream().wait_event(self.recorded)


class EventOverlap:
    """Event, or none, with the tensors that must live until a stream has waited for it.

    Args:
        event: the event, or None if the current stream waits already.
        extra_tensors: kept alive with this object.

    Attributes:
        event, extra_tensors: the arguments.
        hook_after_wait: called once after the first wait, or None.
    """

    hook_after_wait: Any = None
    _release = False

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Make the current stream wait for the work.

        Args:
            release_handle: let go of the event and of the tensors afterwards.

        Raises:
            BadCall: there is no event.
        """
        if self.event is None:
            raise BadCall("EventOverlap.current_stream_wait: there is no event to wait for")
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event, self.extra_tensors = None, None

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Say what the end of a ``with`` block does: see :meth:`current_stream_wait`."""
        self._release = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.event is not None:
            self.current_stream_wait(self._release)


def recorded_in(event: object) -> torch.cuda.Event | None:
    """Find the CUDA event in an EventOverlap or an EventHandle. None stays None.

    Raises:
        BadCall: the value is none of these.
    """
    if event is None:
        return None
    if not isinstance(event, EventHandle | EventOverlap):
        raise BadCall(f"the event to wait for is {a_type(event)}, expected an EventOverlap, an EventHandle or None")
    handle = event.event if isinstance(event, EventOverlap) else event
    return handle.recorded if isinstance(handle, EventHandle) else None


def is_event(event: object) -> bool:
    """Tell whether a value is an event of these classes, recorded or not."""
    return isinstance(event, EventHandle) or (isinstance(event, EventOverlap) and event.event is not None)
