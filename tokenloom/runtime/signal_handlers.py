"""Errors of torch, and those of signal handlers, which Python may run between any two steps of a call to torch."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any


def raise_if_of_handler(error: BaseException) -> None:
    """Raise an error that a signal handler has raised: whoever awaited one of torch would take it for that.

    Python gives a handler the frame that it interrupts. Nothing else is called with the frame of its caller.
    """
    # The first frame is who caught the error. It is no handler, and its f_locals would keep the error, which keeps it.
    trace = error.__traceback__ and error.__traceback__.tb_next
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_back is not None and any(given is frame.f_back for given in _frames_in(frame.f_locals.values())):
            raise error
        trace = trace.tb_next


def _frames_in(values: Any) -> Iterator[FrameType]:
    """Yield frames among the values of local variables, of which one may hold all arguments."""
    for value in values:
        if isinstance(value, FrameType):
            yield value
        elif type(value) is tuple:
            yield from (each for each in value if isinstance(each, FrameType))
