"""Collectives of NCCL that hosts wait for, with stand-ins for torch's handles."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tokenloom.runtime import collectives, deferred_release
from tokenloom.runtime.collectives import Collective, CollectiveOnStream, all_have_ended

SUCCESS, TIMEOUT, COMM_ERROR = 0, 1, 2
"""Of torch's WorkResult."""
GROUP: Any = object()


class Work:
    """A collective of NCCL, as torch shows it.

    Args:
        result: what torch has settled, if anything.
        is_over: whether its kernel has ended.
    """

    def __init__(self, result: int | None = None, is_over: bool = True) -> None:
        self.result: torch.futures.Future[Any] = torch.futures.Future()
        self.is_over = is_over
        if result is not None:
            self.result.set_result(result)

    def is_completed(self) -> bool:
        return self.is_over or (self.result.done() and self.result.value() != SUCCESS)

    def get_future_result(self) -> torch.futures.Future[Any]:
        return self.result

    def wait(self) -> None:
        raise AssertionError("where a rank is lost, this aborts the communicator, whose kernels answer for that rank")


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, list[int]]]:
    """Those that torch has. No collective is left open for other tests."""
    registered = {GROUP: [0, 1]}
    monkeypatch.setattr(dist, "get_process_group_ranks", registered.__getitem__)
    yield registered
    collectives._open.clear()
    collectives._unended.clear()


def start(work: Work) -> CollectiveOnStream:
    made: Any = work
    return CollectiveOnStream(lambda: made, GROUP)


def test_gloo_keeps_what_has_not_ended() -> None:
    """Its thread would let go of it last, maybe while Python ends. The next one lets go of what has ended."""
    lost: Any = Work(is_over=False)
    ended: Any = Work()
    for work in (lost, ended):
        Collective(lambda work=work: work, GROUP)  # type: ignore[misc]
    assert {each._work for each in collectives._unended} == {lost, ended}
    Collective(lambda: ended, GROUP)
    assert [each._work for each in collectives._unended].count(ended) == 1
    assert lost in {each._work for each in collectives._unended}
    lost.is_over = True
    last = Collective(lambda: ended, GROUP)
    assert collectives._unended == {last}


def test_the_end_of_python_keeps_what_has_not_ended() -> None:
    """With its group, whose own end would wait for it. Else a process would not end before the group's timeout."""
    works: list[Any] = [Work(is_over=False), Work()]
    groups: list[Any] = [object(), object()]
    for work, group in zip(works, groups, strict=True):
        Collective(lambda work=work: work, group)  # type: ignore[misc]
    things = [*works, *groups]
    before = list(map(sys.getrefcount, things))
    collectives._leave_threads_nothing()
    after = list(map(sys.getrefcount, things))
    assert [now - count for now, count in zip(after, before, strict=True)] == [1, 0, 1, 0]


def test_an_end_waits_for_threads_that_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of gloo that runs, or has run since it was last looked at, may be about to let go of tensors."""
    states = [("R", "1", "0"), ("S", "2", "0"), ("S", "3", "0"), ("S", "3", "0")]
    looked = iter(states)
    monkeypatch.setattr(collectives, "_gloo_threads", lambda: {"7": next(looked)})
    collectives._leave_threads_nothing()
    assert not list(looked), "it has slept from one look to the next"


@pytest.mark.parametrize("result", [None, SUCCESS])
def test_a_collective_that_has_ended(result: int | None) -> None:
    """No stream has to wait for it."""
    work = Work(result)
    collective = start(work)
    assert collective.wait(1.0)
    assert not collective.broken
    assert all_have_ended()


@pytest.mark.parametrize("result", [TIMEOUT, COMM_ERROR])
def test_an_error_aborts_nothing(result: int, groups: dict[Any, list[int]]) -> None:
    """Its kernel goes on until somebody aborts the group. Nobody waits for the device before that."""
    work = Work(result, is_over=False)
    collective = start(work)
    assert not collective.wait(1.0)
    assert "NCCL reports an error" in collective.broken[-1]
    assert not all_have_ended()
    groups.clear()
    assert all_have_ended()


def test_a_collective_that_ends_late() -> None:
    """Its memory is kept as long."""
    work = Work(is_over=False)
    memory = torch.zeros(1)
    made: Any = work
    collective = CollectiveOnStream(lambda: (memory, made)[1], GROUP)
    assert not collective.wait(0.01)
    del collective
    assert not all_have_ended()
    (kept,) = collectives._open
    assert kept._start.__closure__ is not None
    assert memory in [each.cell_contents for each in kept._start.__closure__ if each.cell_contents is memory]
    work.is_over = True
    assert all_have_ended()
    assert not collectives._open


def test_a_collective_that_does_not_start() -> None:
    def fail() -> Any:
        raise RuntimeError("no connection")

    collective = CollectiveOnStream(fail, GROUP)
    assert not collective.has_started
    assert not collective.wait(1.0)
    assert collective.broken == {-1: "no connection"}
    assert all_have_ended()


def test_a_device_with_a_collective_that_may_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever would wait for the whole device waits for the current stream, and hears that not all is done."""
    waited = []

    class Stream:
        def synchronize(self) -> None:
            waited.append("stream")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append("device"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    device, work = torch.device("cuda", 0), Work(is_over=False)
    start(work)
    assert not deferred_release.synchronize(device)
    work.is_over = True
    assert deferred_release.synchronize(device)
    assert waited == ["stream", "device"]
