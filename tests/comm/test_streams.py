"""Work on a stream of its own: which tensors torch is told of, and that nothing changes where there are no streams."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from tokenloom.backends.peers.handle import PeerHandle, ResultsLayout
from tokenloom.backends.seam import DispatchOptions
from tokenloom.plan import Plan
from tokenloom.runtime.streams import SideStream, tensors_in


def found(value: object) -> list[int]:
    return [id(tensor) for tensor in tensors_in(value)]


def tensors(count: int) -> list[torch.Tensor]:
    return [torch.zeros(1) for _ in range(count)]


@dataclass(frozen=True)
class Inner:
    a: torch.Tensor
    b: int | torch.Tensor


@dataclass(frozen=True)
class Outer:
    inner: Inner
    many: tuple[torch.Tensor | None, ...]
    name: str = "outer"


def test_tensors_are_found_wherever_they_are() -> None:
    """In tuples and dataclasses, and within those; what else there is does not matter."""
    a, b, c, d = tensors(4)
    assert found(a) == [id(a)]
    assert found((a, None, 3, "x", (b, ()))) == [id(a), id(b)]
    assert found(Outer(Inner(a, b), (c, None, d))) == [id(each) for each in (a, b, c, d)]
    assert found((Inner(a, 7), None)) == [id(a)]
    for nothing in (None, 3, "text", (), object(), torch.float32):
        assert found(nothing) == []


def test_all_of_a_handle_is_found() -> None:
    """A combine on the other stream reads all that its dispatch left behind: none of it may be reused before. Views of
    it may not have been made yet, so it is the memory that counts."""
    ids, words, *own = tensors(2 + 4)
    plan, options = Plan(1, 4, 128, 2, 3), DispatchOptions("expert", 1, "bounded", 3)
    launcher: Any = SimpleNamespace(ranks=SimpleNamespace(rank=0), masked=frozenset())
    results = ResultsLayout(
        plan, launcher, options, 3, {"row_places": 0, "row_tokens": 0}, with_weights=True, with_scales=False
    )
    handle = PeerHandle(results, (words, 0, words.data_ptr()), 1, 2, ids)
    assert sorted(found(handle)) == sorted([id(ids), id(words)])
    handle.weights, handle.local_ids, handle.row_places, handle.row_tokens = own
    assert sorted(found(handle)) == sorted(id(tensor) for tensor in (ids, words, *own))


def test_a_side_stream_on_the_cpu() -> None:
    """Runs its block, takes anything as input, and its events are done."""
    side = SideStream(torch.device("cpu"))
    with side.run((torch.zeros(2), None, Inner(torch.zeros(1), 2))):
        event = side.event((torch.zeros(1), None))
    event.wait()
    assert event.query()
