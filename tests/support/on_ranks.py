"""Tests whose body runs on every rank of a group."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from tokenloom.runtime.processes import RankContext

Test = Callable[..., None]


def call_body(context: RankContext, body: Test, *arguments: Any) -> None:
    """Call the body as it is."""
    body(context, *arguments)


def on_ranks(
    group: str | Test = "ranks",
    *,
    through: Callable[..., Any] = call_body,
    gives: int = 1,
    limit_s: float | None = None,
) -> Any:
    """Decorator that runs a test's body on every rank of a group: ``body(context, *parameters)``.

    The body's first parameter is the rank's RankContext. The others are fixtures and parameters of the test, which
    travel to the ranks.

    Args:
        group: name of the fixture that runs the body. Without parentheses it is "ranks".
        through: function that calls the body on a rank, ``through(context, body, *parameters)``. It may give the body
            something else than the context.
        gives: how many of the body's first parameters it gives.
        limit_s: time limit for all ranks, in seconds. None is the group's own.
    """
    if not isinstance(group, str):
        return on_ranks()(group)
    options = {} if limit_s is None else {"limit_s": limit_s}

    def decorate(body: Test) -> Test:
        parameters = list(inspect.signature(body).parameters.values())[gives:]

        @wraps(body)
        def test(**fixtures: Any) -> None:
            fixtures[group].run(_run_body, test, *(fixtures[each.name] for each in parameters), **options)

        # pytest reads here what the test asks for.
        own = inspect.Parameter(group, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([own, *parameters])  # type: ignore[attr-defined]
        test.through = through  # type: ignore[attr-defined]
        return test

    return decorate


def _run_body(context: RankContext, test: Any, *arguments: Any) -> None:
    """Ranks get the test, since pickle finds by name only what the module holds under that name."""
    test.through(context, test.__wrapped__, *arguments)
