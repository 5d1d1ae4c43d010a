"""The host side of backend "nvlink" without a GPU: which buffers ranks mean, which calls a rank with a fault opens.

Ranks that differ in either wait for each other, so this is checked here for every machine.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenloom.backends.base import DispatchOptions
from tokenloom.backends.nvlink import buffers as module
from tokenloom.backends.nvlink import launcher
from tokenloom.backends.nvlink.buffers import Buffers
from tokenloom.backends.nvlink.launcher import CALLS_IN_FLIGHT, FAULT, FOLLOWS_A_FAULT, Half, Launcher
from tokenloom.comm.strategy import Strategy
from tokenloom.errors import CapacityOverflow, PeerError, PlanMismatch
from tokenloom.kernels.barrier.launch import BarrierArgs, BarrierVariant
from tokenloom.plan import Plan
from tokenloom.runtime.kernel_reports import CallOutcome
from tokenloom.runtime.symmetric_memory import BufferLayout
from tokenloom.training.pieces import RunOptions, forward_calls

PLAN = Plan(4, 8, 128, 2, 1024)
BF16 = torch.bfloat16


class FakeBuffer:
    """Memory that only this process has."""

    def __init__(self, layout: BufferLayout, ranks: object) -> None:
        self.layout, self.peers = layout, torch.zeros(PLAN.num_ranks, dtype=torch.int64, device="cpu")

    def view(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")


class FakeLauncher:
    """Agrees, unless another rank has a fault."""

    ranks = None

    def __init__(self) -> None:
        self.faulty, self.agreed = False, 0
        self.retired: list[object] = []

    def agree_before_memory(self, fields: object) -> None:
        if self.faulty:
            raise PeerError(1, "bad input")
        self.agreed += 1

    def retire(self, buffer: object) -> None:
        self.retired.append(buffer)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[Buffers, FakeLauncher]:
    monkeypatch.setattr(module, "SymmetricBuffer", FakeBuffer)
    fake: Any = FakeLauncher()
    return Buffers(PLAN, fake), fake


def bounded(rows: int) -> DispatchOptions:
    return DispatchOptions("expert", 1, "bounded", rows)


@pytest.mark.parametrize("exists", [False, True])
def test_a_fault_before_a_larger_buffer(made: tuple[Buffers, FakeLauncher], exists: bool) -> None:
    """The rank with the fault never hears of the capacity: the others must go on to mean the old size, as it does, or
    the next call's buffers would differ."""
    buffers, others = made
    least = buffers.rows_for(BF16)
    if exists:
        buffers.receive(BF16, 0, 0, {})
    others.faulty = True
    with pytest.raises(PeerError):
        buffers.receive(BF16, 0, least + 1, {})
    assert buffers.rows_for(BF16) == least
    assert not others.retired
    others.faulty = False
    assert len(buffers.receive(BF16, 0, least + 1, {}).rows) == buffers.rows_for(BF16) == least + 1
    assert len(others.retired) == exists
    assert len(buffers.receive(BF16, 1, 0, {}).rows) == least + 1, "the other half has grown too"


def test_growth_is_a_buffer_to_wait_for(made: tuple[Buffers, FakeLauncher]) -> None:
    """Where a dispatch replaces its buffer, the others stop before it, so a rank with a fault must stop there too."""
    buffers, _ = made
    least = buffers.rows_for(BF16)
    buffers.receive(BF16, 0, 0, {})
    assert buffers.has_for_dispatch(bounded(least), 2)
    assert not buffers.has_for_dispatch(bounded(least + 1), 2)
    assert not buffers.has_for_dispatch(bounded(least), 4), "no buffer for float32 yet"
    pool = RunOptions(Strategy(), pool_rows=least + 1)
    dispatch = forward_calls(pool, 1, BF16, needs_grad=True)[0]
    assert isinstance(dispatch.options, DispatchOptions)
    assert not buffers.has_for_dispatch(dispatch.options, dispatch.value_bytes)


class FakeRanks:
    rank, device = 0, torch.device("cpu")

    def post_note(self, name: str, text: str) -> None:
        pass

    def read_note(self, name: str, rank: int) -> None:
        return None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A launcher whose kernels are over at once; ``statuses`` are those it has launched."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(launcher, "NOTE_S", 0.0)
    made: Any = object.__new__(Launcher)
    made.plan, made.ranks, made.num_sms, made.num_calls, made._num_launches = PLAN, FakeRanks(), 1, 0, 0
    made.outcomes, made.statuses = {}, []
    made._records = SimpleNamespace(
        address=lambda slot: 0,
        take=lambda slot: made.outcomes.pop(slot, None),
        is_over=lambda slot, sequence: True,
    )
    made._captured_slot, made._launched = 2 * (CALLS_IN_FLIGHT + 2), deque()
    made._fault = SimpleNamespace(error=lambda: None)
    made._opened = torch.zeros(1, dtype=torch.int32, device="cpu")
    made._last = None
    args = BarrierArgs()

    def launch(blocks: int, stream: int) -> None:
        made.statuses.append(args.call.status)

    made._kernels = {BarrierVariant(plan=PLAN): SimpleNamespace(args=args, launch=launch)}
    return made


OVERFLOW = CallOutcome(needed_rows=9, capacity=8, faulty_rank=None, status=0, differing_rank=None)


@pytest.mark.parametrize("num_names", [1, 2, 3, 6])
def test_calls_behind_an_unread_outcome(calls: Any, num_names: int) -> None:
    """An overflow that nobody has read ends the calls of a rank with a fault where it ends those of the others: when
    it is CALLS_IN_FLIGHT calls old, and no earlier. Its own fault is no news to the rank afterwards."""
    calls._open({"call": "dispatch"})
    calls.outcomes[0] = OVERFLOW
    with pytest.raises(CapacityOverflow):
        calls.report_fault(ValueError("bad"), [f"call {i}" for i in range(num_names)])
    opened = min(num_names, CALLS_IN_FLIGHT)
    assert calls.statuses == [0, FAULT, *[FOLLOWS_A_FAULT] * (opened - 1)]
    for slot in range(1, 1 + opened):
        calls.outcomes[slot] = CallOutcome(0, 0, faulty_rank=0, status=FAULT, differing_rank=1)
    calls.settle(0)


def test_calls_after_a_fault(calls: Any) -> None:
    """As many as the others open before they read what the first found."""
    calls.report_fault(ValueError("bad"), [f"call {i}" for i in range(6)])
    assert calls.statuses == [FAULT, *[FOLLOWS_A_FAULT] * CALLS_IN_FLIGHT]


def test_others_that_wait_open_nothing(calls: Any) -> None:
    """They read everything before they open the call, raise, and do not open it: nor does the rank with a fault."""
    calls._open({"call": "dispatch"})
    calls.outcomes[0] = OVERFLOW
    with pytest.raises(CapacityOverflow):
        calls.report_fault(ValueError("bad"), ["dispatch"], others_wait=True)
    assert calls.statuses == [0]


def test_options_that_nobody_posted(calls: Any) -> None:
    """Of a captured call the options are not kept, and without a store no rank reads another's: the error is still
    that the ranks differ."""
    calls._open({"call": "dispatch"})
    calls.outcomes[0] = CallOutcome(0, 0, faulty_rank=None, status=0, differing_rank=1)
    with pytest.raises(PlanMismatch, match="rank 1 has options of this call"):
        calls.settle(0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_halves_are_read_by_their_calls(calls: Any, order: tuple[int, int]) -> None:
    """Ranks may receive two open calls in either order. What one of them found ends a later call of all ranks,
    the same one whatever the order."""
    kernel = calls.kernel(BarrierVariant(plan=PLAN))
    halves = [Half(torch.zeros(1, dtype=torch.int32), {"call": str(i)}) for i in range(2)]
    for half in halves:
        calls.launch(kernel, half.fields, begins=half)
    for i in order:
        calls.launch(kernel, halves[i].fields, finishes=halves[i])
    assert [half.number for half in halves] == [0, 1]
    calls.outcomes[2 + order.index(0)] = OVERFLOW  # of call 0
    for _ in range(CALLS_IN_FLIGHT - 1):
        calls._open({"call": "dispatch"})
    with pytest.raises(CapacityOverflow):
        calls._open({"call": "dispatch"})
    assert calls.num_calls == 2 + CALLS_IN_FLIGHT - 1


def running(calls: Any, monkeypatch: pytest.MonkeyPatch, query: Any, capturing: bool = False) -> None:
    """A call that is not over, on a stream that answers ``query``; the host looks around at once."""
    calls._open({"call": "dispatch"})
    calls._records.is_over = lambda slot, sequence: not calls.looks
    calls.looks = [None]
    monkeypatch.setattr(launcher, "LOOK_EVERY_S", -1.0)
    monkeypatch.setattr(launcher, "on_stream", lambda stream: nullcontext())
    calls._launched[0].stream.query = query
    calls.control = SimpleNamespace(ended_ranks=calls.looks.pop)
    calls.ranks.notes = SimpleNamespace(who_gave_up=lambda: None)
    calls._heard = None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)


def test_a_gpu_that_has_failed_leaves_no_word(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that reads a wrong address ends all of them, and no last block leaves: only the driver says so."""

    def failed() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    running(calls, monkeypatch, failed)
    with pytest.raises(RuntimeError, match="illegal"):
        calls.settle(0)


def test_a_stream_in_a_capture_is_not_asked(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of an eager call may be captured by the time the host reads its outcome; a query ends the capture."""

    def asked() -> bool:
        raise AssertionError("asked")

    running(calls, monkeypatch, asked, capturing=True)
    calls.settle(0)
    assert not calls.looks, "the other ranks were looked at all the same"
