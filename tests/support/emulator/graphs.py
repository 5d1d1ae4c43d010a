"""CUDA graphs of kernels on the emulator: launches that are kept, and made again with the same arguments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Capturing(threading.local):
    """The graph that this thread captures."""

    graph: Graph | None = None


_here = _Capturing()


class Graph:
    """What one rank has launched while it captured; operations of torch are not among it."""

    def __init__(self) -> None:
        self._launches: list[Callable[[], None]] = []

    def replay(self) -> None:
        """Make all launches."""
        for launch in self._launches:
            launch()


@contextmanager
def capture() -> Iterator[Graph]:
    """Capture what this rank launches, and launch none of it."""
    graph = _here.graph = Graph()
    try:
        yield graph
    finally:
        _here.graph = None


def is_capturing() -> bool:
    """Whether this rank captures."""
    return _here.graph is not None


def launch_or_keep(launch: Callable[[], None]) -> None:
    """Launch, or keep that for the graph that this rank captures."""
    if _here.graph is None:
        launch()
    else:
        _here.graph._launches.append(launch)


class FakeReferences:
    """Stands for GraphReferences: every graph stays."""

    def __init__(self) -> None:
        self._held: list[object] = []

    def hold(self, stream: int, *owners: object) -> None:
        self._held += owners

    def are_gone(self) -> bool:
        return not self._held
