"""The engine under layers: faults that are told, once and in order, and calls in halves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tokenloom as tl
from tokenloom.backends.seam import Upcoming
from tokenloom.comm import engine as engine_module
from tokenloom.comm.engine import Engine
from tokenloom.errors import is_known_to_all
from tokenloom.plan import Plan
from tokenloom.runtime.rank_group import RankGroup

DISPATCH, COMBINE, GRADIENT = Upcoming("dispatch"), Upcoming("combine"), Upcoming("gradient of dispatch")


class FakeBackend:
    """Notes what is asked of it.

    Attributes:
        log: in order: "send 1", "receive 1", and for each report a list with the names of the calls.
        reported: the faults.
        failing: errors by what is to raise them: "send 1", "receive 2", "report".
    """

    name = "fake"

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.reported: list[Exception] = []
        self.failing: dict[str, Exception] = {}
        self.sent = 0

    def prepare_dispatch(self, kind: Any) -> Any:
        return self

    def send(self, tokens: Any) -> FakePending:
        self.sent += 1
        self.do(f"send {self.sent}")
        return FakePending(self, self.sent)

    def report_fault(self, fault: Exception, upcoming: Sequence[Upcoming]) -> None:
        self.reported.append(fault)
        self.do("report", [call.name for call in upcoming])

    def do(self, what: str, noted: object = None) -> None:
        self.log.append(noted or what)
        if what in self.failing:
            raise self.failing[what]


class FakePending:
    def __init__(self, backend: FakeBackend, number: int) -> None:
        self.backend, self.number = backend, number

    def receive(self) -> int:
        self.backend.do(f"receive {self.number}")
        return self.number


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def engine(backend: FakeBackend) -> Engine:
    return Engine(Plan(1, 1, 8, 1, 1), RankGroup(device="cpu"), backend)  # type: ignore[arg-type]


def send(engine: Engine) -> Any:
    nothing: Any = None
    return engine.send_dispatch(engine.prepare_dispatch(nothing), nothing)


def fail(engine: Engine, *upcoming: Upcoming, after: Callable[[], object] = lambda: None) -> None:
    """A sequence of calls that ends in a fault of this rank, which is raised as it is, and marked."""
    error = RuntimeError("no memory")

    def run() -> None:
        with engine.sequence(*upcoming):
            after()
            raise error

    with pytest.raises(RuntimeError) as raised:
        run()
    assert raised.value is error, "this rank raises its own"
    assert is_known_to_all(error)


def told(backend: FakeBackend) -> list[list[str]]:
    """The calls of each report."""
    return [each for each in backend.log if isinstance(each, list)]


@pytest.mark.parametrize("opened", range(4))
def test_what_is_open_is_not_opened_again(engine: Engine, backend: FakeBackend, opened: int) -> None:
    """The others hear of a fault by the call that they open next, which the rest follows."""
    fail(engine, DISPATCH, COMBINE, GRADIENT, after=lambda: [send(engine).receive() for _ in range(opened)])
    names = ["dispatch", "combine", "gradient of dispatch"][opened:]
    assert told(backend) == [names] * bool(names)


def test_a_call_that_cannot_be_sent(engine: Engine, backend: FakeBackend) -> None:
    """It is not open, so it is the first that is told."""
    error = backend.failing["send 2"] = RuntimeError("no kernel")

    def run() -> None:
        with engine.sequence(DISPATCH, COMBINE):
            send(engine).receive()
            send(engine)

    with pytest.raises(RuntimeError, match="no kernel"):
        run()
    assert backend.log == ["send 1", "receive 1", "send 2", ["combine"]]
    assert backend.reported == [error]


def test_open_calls_are_received_first(engine: Engine, backend: FakeBackend) -> None:
    """In the order in which they were opened: what they leave for the host has to be taken before another opens."""
    calls = (DISPATCH, DISPATCH, COMBINE, COMBINE)
    fail(engine, *calls, after=lambda: [send(engine), send(engine), send(engine).receive()])
    assert backend.log == ["send 1", "send 2", "send 3", "receive 3", "receive 1", "receive 2", ["combine"]]


def test_open_calls_that_fail_too(engine: Engine, backend: FakeBackend) -> None:
    """The first fault of this rank is the one that is told and raised."""
    backend.failing["receive 1"] = RuntimeError("no memory either")
    fail(engine, DISPATCH, DISPATCH, COMBINE, after=lambda: [send(engine), send(engine)])
    assert backend.log[2:] == ["receive 1", "receive 2", ["combine"]]
    assert [str(each) for each in backend.reported] == ["no memory"]


@pytest.mark.parametrize(
    "known",
    [tl.PeerError(1, "no memory"), tl.PlanMismatch(1, "layout", "token", "rank")],
    ids=lambda error: type(error).__name__,
)
def test_what_all_ranks_know_is_not_told(engine: Engine, backend: FakeBackend, known: tl.TokenloomError) -> None:
    """They raise it, or its counterpart, in the same call, and open none after it."""
    backend.failing["send 1"] = known
    with pytest.raises(type(known)), engine.sequence(DISPATCH, COMBINE):
        send(engine)
    assert backend.log == ["send 1"]


def test_another_rank_failed_too(engine: Engine, backend: FakeBackend) -> None:
    """An open call brings the news: nobody opens the rest, so nobody can be told, by a sequence around neither."""
    backend.failing["receive 1"] = tl.PeerError(1, "no memory")
    error = RuntimeError("no kernel")

    def run() -> None:
        with engine.sequence(DISPATCH), engine.sequence(DISPATCH, COMBINE):
            send(engine)
            raise error

    with pytest.raises(RuntimeError, match="no kernel"):
        run()
    assert backend.log == ["send 1", "receive 1"]


@pytest.mark.parametrize(
    "gone",
    [tl.PeerTimeout(0, [1], "x", 1, "y"), tl.CommunicatorBroken("closed")],
    ids=lambda error: type(error).__name__,
)
def test_nobody_is_there_to_be_told(engine: Engine, backend: FakeBackend, gone: tl.TokenloomError) -> None:
    """This rank's own error is what its user can do something about; later calls say that the communicator broke."""
    backend.failing["report"] = gone
    fail(engine, DISPATCH)
    assert backend.log == [["dispatch"]]


def test_sequences_within_sequences(engine: Engine, backend: FakeBackend) -> None:
    """Each knows its own calls, and afterwards the outer one goes on."""

    def steps() -> None:
        fail(engine, GRADIENT, COMBINE, after=lambda: send(engine).receive())
        assert told(backend) == [["combine"]]
        with engine.sequence(GRADIENT):
            send(engine).receive()
        send(engine).receive()

    fail(engine, DISPATCH, COMBINE, after=steps)
    assert told(backend) == [["combine"], ["combine"]]


def test_a_fault_is_told_by_the_innermost_alone(engine: Engine, backend: FakeBackend) -> None:
    """Telling it again would open calls that the others do not open."""
    with pytest.raises(RuntimeError), engine.sequence(DISPATCH), engine.sequence(COMBINE):
        raise RuntimeError("no memory")
    assert backend.log == [["combine"]]


def test_a_fault_in_a_capture(engine: Engine, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs then, on no rank, so nobody waits. To wait for the other stream would end the capture."""

    def join() -> None:
        raise RuntimeError("operation would make the capture depend on uncaptured work")

    monkeypatch.setattr(engine_module, "on_device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(engine.ranks, "device", torch.device("cuda", 0))
    monkeypatch.setattr(engine.side_stream, "join", join)
    fail(engine, DISPATCH)
    assert backend.log == []


def test_calls_outside_of_a_sequence(engine: Engine, backend: FakeBackend) -> None:
    """Nothing is declared there, and nothing is told."""
    assert send(engine).receive() == 1
    with engine.sequence():
        assert send(engine).receive() == 2
    fail(engine, DISPATCH)
    assert backend.log == ["send 1", "receive 1", "send 2", "receive 2", ["dispatch"]]


@pytest.mark.parametrize("layout", ["token", "rank"])
def test_places_without_a_row_have_no_gradient(engine: Engine, backend: Any, layout: str) -> None:
    """What a backend leaves in them would count in the gradients of experts that compute all places."""
    place = {"token": 1, "rank": 2}[layout]
    handle: Any = SimpleNamespace(
        options=SimpleNamespace(layout=layout, sizes="exact"),
        num_places=place + 1,
        positions=lambda: torch.tensor([[0], [place], [-1]]),
    )
    again = torch.full((place + 1, 8), torch.nan)
    again[[0, place]] = torch.tensor([[1.0], [2.0]])
    received = torch.tensor([[1.0], [2.0], [torch.nan]]).expand(3, 8)
    values = {"places": again, "rows": received}
    backend.resend = lambda handle, grad, to, *_: SimpleNamespace(receive=lambda: values[to])
    grad_rows, _ = engine.combine_gradient(handle, torch.empty(2, 8), None, None, torch.float32, "dedup")
    assert grad_rows[:, 0].tolist() == ([1, 2] if layout == "token" else [1, 0, 2])


def test_interrupts_are_not_told(engine: Engine, backend: FakeBackend) -> None:
    """Ctrl-C ends the process; waiting for the others to open a call would keep it."""
    with pytest.raises(KeyboardInterrupt), engine.sequence(DISPATCH):
        raise KeyboardInterrupt
    assert backend.log == []
