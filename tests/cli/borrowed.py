"""Commands that run on ranks which are there already: starting their own takes seconds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

from tokenloom.runtime.processes import RankContext, RankPool

CACHE_FOLDER = "TOKENLOOM_CACHE_DIR"


def as_here(context: RankContext, cache_folder: str | None, function: Any, *arguments: Any, **options: Any) -> Any:
    """Call the function with this process's cache folder, as ranks do that are started from here."""
    chosen = {} if cache_folder is None else {CACHE_FOLDER: cache_folder}
    with mock.patch.dict(os.environ, chosen):
        return function(context, *arguments, **options)


@contextmanager
def borrowed(module: ModuleType, pools: Callable[[str], RankPool], function: Any = None) -> Iterator[None]:
    """Let the command whose ``RankPool`` is in ``module`` use the ranks of the fixture ``pools``.

    Args:
        function: what the ranks run instead of what the command asks for.
    """

    class Borrowed:
        def __init__(self, num_ranks: int, device: str) -> None:
            self.num_ranks, self.device = num_ranks, device

        def __enter__(self) -> Borrowed:
            return self

        def __exit__(self, *exception: object) -> None:
            pass

        def run(self, asked: Any, *arguments: Any, ranks: int | None = None, **options: Any) -> list[Any]:
            folder = os.environ.get(CACHE_FOLDER)
            pool, ranks = pools(self.device), ranks or self.num_ranks
            return pool.run(as_here, folder, function or asked, *arguments, ranks=ranks, **options)

    with mock.patch.object(module, "RankPool", Borrowed):
        yield
