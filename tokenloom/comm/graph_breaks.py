"""Calls that ``torch.compile`` leaves as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def breaks_graph(function: F) -> F:
    """Let the compiler end its graph before the call and begin another behind it, or it would trace host code."""

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():  # torch.compiler.disable imports the compiler, which takes a second
            return torch.compiler.disable(function)(*given, **named)
        return function(*given, **named)

    return cast(F, call)
