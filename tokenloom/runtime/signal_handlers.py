"""Errors of torch, and those of signal handlers, which Python may run between any two steps of a call to torch."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any


def raise_if_of_handler(error: BaseException) -> None:
    """Raise an error that a signal handler has raised: whoever awaited one of torch would take it for that."""
    handlers = {code for number in signal.valid_signals() for code in _code_of(signal.getsignal(number))}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            raise error
        trace = trace.tb_next


def _code_of(handler: Any) -> Iterator[Any]:
    """Yield the code of a handler that is written in Python."""
    function = getattr(handler, "func", handler)  # of functools.partial
    code = getattr(function if hasattr(function, "__code__") else type(function).__call__, "__code__", None)
    if code is not None:
        yield code
