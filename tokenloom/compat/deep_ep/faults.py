"""Errors in the words of a client: which of its calls failed, and what of upstream it cannot have here."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from tokenloom.errors import InvalidArgument, TokenloomError

P = ParamSpec("P")
R = TypeVar("R")

WORDS = {"topk_ids": "topk_idx", "max_tokens_per_rank": "num_max_tokens_per_rank"}
"""tokenloom's names -> those of the client."""


class BadCall(InvalidArgument, AssertionError, RuntimeError):
    """What upstream refuses by an assertion, in Python or in C++."""


class NotServed(InvalidArgument, RuntimeError):
    """An argument or a call that upstream has and tokenloom has not."""


def require(condition: object, text: str) -> None:
    """Raise BadCall unless the condition holds."""
    if not condition:
        raise BadCall(text)


def refuse(**options: object) -> None:
    """Raise NotServed for every option that is given: neither None, nor False, nor 0."""
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
    for ours, theirs in WORDS.items():
        text = text.replace(theirs, ours).replace(ours, theirs)
    error.args = (f"{call}: {text}",)
