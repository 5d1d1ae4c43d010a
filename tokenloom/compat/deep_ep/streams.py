"""Streams of calls: which one a call runs on, and what waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tokenloom.compat.deep_ep.events import EventHandle, EventOverlap, is_event, recorded_in
from tokenloom.compat.deep_ep.faults import require
from tokenloom.runtime.streams import on_stream, tensors_in

T = TypeVar("T")


class CommStream:
    """Stream of a buffer's asynchronous calls, one after another.

    Other calls run on the current stream, behind those. On the CPU calls just run.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def of(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream, made at first use."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device, priority=-1)
        return self._stream

    def get(self) -> torch.cuda.Stream | None:
        """Return the stream for the current GPU, or None if this process has not used CUDA."""
        if not torch.cuda.is_initialized():
            return None
        return self.of(torch.device("cuda", torch.cuda.current_device()))

    @staticmethod
    def check(previous_event: object, async_finish: bool, allocate_on_comm_stream: bool) -> None:
        """Raise BadCall for options that do not go together, and for a value that is no event."""
        recorded_in(previous_event)
        both = not allocate_on_comm_stream or (is_event(previous_event) and async_finish)
        require(both, "allocate_on_comm_stream needs previous_event and async_finish")

    def run(
        self,
        call: Callable[..., T],
        inputs: tuple[object, ...],
        owner: Any,
        previous_event: object,
        async_finish: bool,
        allocate_on_comm_stream: bool,
        *arguments: Any,
    ) -> tuple[T, EventOverlap]:
        """Run a call after an event, or after the current stream's work.

        A call that the current stream would wait for runs on that one itself, which costs no events.

        Args:
            inputs: everything that the call reads.
            owner: tensor or communicator, whose ``device`` is that of its tensors.
            previous_event: EventOverlap or EventHandle to start after; None is the current stream's work so far.
            async_finish: leave it to the caller to wait for the event that is returned.
            allocate_on_comm_stream: checked by :meth:`check`. Results are always allocated where the call runs.
            *arguments: of the call.

        Returns:
            The result of the call, and its event: ``EventOverlap(None)`` if the current stream waits already.
        """
        before = None if previous_event is None else recorded_in(previous_event)
        if not async_finish or owner.device.type != "cuda":
            if before is not None and owner.device.type == "cuda":
                torch.cuda.current_stream(owner.device).wait_event(before)
            elif before is not None:
                before.synchronize()
            if self._stream is not None:
                self.order_behind(owner.device)
            if torch.is_grad_enabled():
                with torch.no_grad():
                    result = call(*arguments)
            else:  # a block around the call would cost the host more
                result = call(*arguments)
            return result, EventOverlap(EventHandle() if async_finish else None)
        stream, current = self.of(owner.device), torch.cuda.current_stream(owner.device)
        if before is None:
            stream.wait_stream(current)
        else:
            stream.wait_event(before)
        with on_stream(stream), torch.no_grad():
            result = call(*arguments)
        results = _cuda_tensors(result)
        for tensor in results:
            tensor.record_stream(current)
        read = _cuda_tensors(inputs)
        for tensor in read:
            tensor.record_stream(stream)
        return result, EventOverlap(EventHandle.of(stream.record_event()), (*read, *results))

    def order_behind(self, device: torch.device) -> None:
        """Make the current stream wait for calls on this one, before a call that runs there."""
        if self._stream is not None and device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(device).wait_stream(self._stream)


def _cuda_tensors(value: object) -> list[torch.Tensor]:
    values = value if isinstance(value, tuple) else (value,)
    whole = tuple(tuple(each) if isinstance(each, list) else each for each in values)
    return [tensor for tensor in tensors_in(whole) if tensor.is_cuda]
