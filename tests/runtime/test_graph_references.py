"""What CUDA graphs keep alive, with a driver that only counts: graphs themselves are in tests/comm/test_graphs.py."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tokenloom.runtime import graph_references
from tokenloom.runtime.deferred_release import release_dropped
from tokenloom.runtime.graph_references import GraphReferences


class Driver:
    """Graphs of streams: the destructor of what a graph retains runs when the graph is destroyed."""

    CUhostFn = int
    CUuserObject_flags = SimpleNamespace(CU_USER_OBJECT_NO_DESTRUCTOR_SYNC=SimpleNamespace(value=1))
    CUuserObjectRetain_flags = SimpleNamespace(CU_GRAPH_USER_OBJECT_MOVE=SimpleNamespace(value=1))

    def __init__(self) -> None:
        self.captures: dict[int, int] = {}
        self.retained: dict[int, list[Callable[[], Any]]] = {}

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
        return 0, 1, self.captures[stream], self.captures[stream], None, None, 0

    def cuUserObjectCreate(self, pointer: int, destroy: int, count: int, flags: int) -> tuple[Any, ...]:
        function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(destroy)
        return 0, lambda: function(pointer)

    def cuGraphRetainUserObject(self, graph: int, user_object: Any, count: int, flags: int) -> tuple[int]:
        self.retained.setdefault(graph, []).append(user_object)
        return (0,)

    def destroy(self, graph: int) -> None:
        for each in self.retained.pop(graph):
            each()


class Owner:
    """Something that a captured kernel uses."""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    fake = Driver()
    monkeypatch.setattr(graph_references, "load_driver", lambda: fake)
    yield fake
    for graph in list(fake.retained):
        fake.destroy(graph)
    release_dropped()


def test_owners_live_as_long_as_the_graph(driver: Driver) -> None:
    references, owner = GraphReferences(), Owner()
    alive = weakref.ref(owner)
    driver.captures[7] = 100
    references.hold(7, owner)
    assert not references.are_gone()
    del owner, references
    gc.collect()
    release_dropped()
    assert alive() is not None
    driver.destroy(100)
    release_dropped()
    gc.collect()
    assert alive() is None


def test_a_graph_with_many_calls_counts_once(driver: Driver) -> None:
    """Or the communicator would wait for as many graphs as there were calls."""
    references, owner = GraphReferences(), Owner()
    driver.captures[7] = 100
    for _ in range(3):
        references.hold(7, owner)
    assert len(driver.retained[100]) == 1
    driver.destroy(100)
    assert references.are_gone()


def test_the_last_of_several_graphs_counts(driver: Driver) -> None:
    references, owner = GraphReferences(), Owner()
    driver.captures |= {7: 100, 8: 200}
    references.hold(7, owner)
    references.hold(8, owner)
    driver.destroy(200)
    assert not references.are_gone()
    driver.destroy(100)
    assert references.are_gone()


def test_it_counts_again_after_all_were_gone(driver: Driver) -> None:
    """A server captures anew when its batch sizes change."""
    references, owner = GraphReferences(), Owner()
    driver.captures[7] = 100
    references.hold(7, owner)
    driver.destroy(100)
    release_dropped()
    driver.captures[7] = 101
    references.hold(7, owner)
    assert not references.are_gone()
    driver.destroy(101)
    assert references.are_gone()


def test_without_graphs_nothing_is_held() -> None:
    assert GraphReferences().are_gone()
