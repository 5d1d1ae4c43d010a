"""Errors in the words of a client: which of its calls failed, and which of upstream's options are not served."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from tokenloom.errors import InvalidArgument, TokenloomError

P = ParamSpec("P")
R = TypeVar("R")

WORDS = {
    r"\btopk_ids\b": "topk_idx",
    r"\bmax_tokens_per_rank\b": "num_max_tokens_per_rank",
    r"the pending of an earlier (.*) was dropped unreceived; keep .* on it": (
        r"the hook of an earlier \1 was dropped uncalled; call every hook that return_recv_hook=True gives"
    ),
    r"a third pending call: a (\w+) sent (\d+) calls ago is still open; receive it before this call.*": (
        r"the hook of a \1 of \2 calls ago was not called; call it before this call: only that of the call just "
        "before may wait"
    ),
    r"pass capacity=(\d+)(, or pool_rows=\d+ to a layer that has pool_rows)?": r"pass num_worst_tokens=\1",
    r" \(in layout 'slots', places for each expert\)": "",
    r"make the communicator with backend='nvlink', or on a gloo group with device='cpu'": (
        "make the buffer where NVLink reaches all ranks, or on a gloo group with tensors on the CPU"
    ),
    r"Close this communicator\.": "Destroy this buffer.",
    r"\ba communicator on it\b": "a buffer on it",
    r"\b(this|a new) communicator\b": r"\1 buffer",
    r"; a larger timeout_s, or open_timeout_s where a call opens, waits longer": "",
}
"""tokenloom's words -> the client's, as patterns. Patterns of a call (WORDS_OF) come first."""
WORDS_OF = {
    "Buffer.low_latency": {
        r"\bmax_tokens_per_rank\b": "num_max_dispatch_tokens_per_rank",
        r"pass capacity=.*": "name each expert once in a row of topk_idx",
    },
    "ElasticBuffer": {
        r"pass capacity=.*": "pass a larger num_max_tokens_per_rank",
        r"a larger timeout_s, or open_timeout_s where": "larger num_gpu_timeout_secs, or num_cpu_timeout_secs where",
    },
    "HybridEPBuffer": {
        r"\bmax_tokens_per_rank\b": "max_num_of_tokens_per_rank",
        r"pass capacity=(\d+)(, or pool_rows=\d+ to a layer that has pool_rows)?": r"pass num_permuted_tokens=\1",
    },
}
"""Patterns for calls whose names begin with the key."""


class BadCall(InvalidArgument, AssertionError, RuntimeError):
    """Call that upstream refuses by an assertion, in Python or in C++."""


class NotServed(InvalidArgument, RuntimeError):
    """Argument or call that upstream has and tokenloom does not."""


def require(condition: object, text: str) -> None:
    """Raise BadCall unless the condition holds."""
    if not condition:
        raise BadCall(text)


def refuse(**options: object) -> None:
    """Raise NotServed for the first option that is neither None, nor False, nor 0."""
    for name, value in options.items():
        if value is not None and value is not False and not (isinstance(value, int) and value == 0):
            raise NotServed(f"{name} is not served by tokenloom; leave it out")


def naming(call: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make errors of a method begin with the client's name for the call."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @wraps(method)
        def named(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(*args, **kwargs)
            except TokenloomError as error:
                _name(error, call)
                raise

        return named

    return decorate


def _name(error: TokenloomError, call: str) -> None:
    """Give the error's text its call, once, and the client's words."""
    text = str(error)
    if text.startswith(f"{call}: "):
        return
    of_call = next((words for name, words in WORDS_OF.items() if call.startswith(name)), {})
    for ours, theirs in (*of_call.items(), *WORDS.items()):
        text = re.sub(ours, theirs, text)
    error.args = (f"{call}: {text}",)
