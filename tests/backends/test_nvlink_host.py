"""The host side of backend "nvlink" without a GPU: which buffers ranks mean, which calls a rank with a fault opens.

Ranks that differ in either wait for each other, so this is checked here for every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.support.stand_ins import Memory, StandIns, record_word
from tokenloom.backends.peers import backend as backend_module
from tokenloom.backends.peers import buffers as module
from tokenloom.backends.peers import opening as opening_module
from tokenloom.backends.peers import outcomes
from tokenloom.backends.peers.buffers import Buffers, control_layout
from tokenloom.backends.peers.opening import Half, Launcher
from tokenloom.backends.peers.outcomes import CALLS_IN_FLIGHT, CAPTURED_SLOT, FAULT, FOLLOWS_A_FAULT, InFlight
from tokenloom.backends.seam import CombineOptions, DispatchOptions, Strategy, Upcoming
from tokenloom.errors import CapacityOverflow, PeerError, PlanMismatch
from tokenloom.kernels.barrier.launch import BarrierVariant
from tokenloom.plan import Plan
from tokenloom.runtime.kernel_reports import CallOutcome
from tokenloom.runtime.openings import CallKind, NeedsRoom
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.symmetric_memory import BufferLayout
from tokenloom.training.pieces import RunOptions, forward_calls

PLAN = Plan(4, 8, 128, 2, 1024)
BF16 = torch.bfloat16


class FakeBuffer:
    """Memory that only this process has."""

    def __init__(self, layout: BufferLayout, ranks: object, fill: int = 0) -> None:
        self.layout, self.peers = layout, torch.zeros(PLAN.num_ranks, dtype=torch.int64, device="cpu")

    def view(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")


class FakeLauncher:
    """Agrees, unless another rank has a fault."""

    ranks = None

    def __init__(self) -> None:
        self.faulty, self.agreed = False, 0
        self.retired: list[object] = []

    def add_arrivals(self, first: torch.Tensor, turn_bytes: int) -> None:
        pass

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


def test_combines_that_make_a_buffer(made: tuple[Buffers, FakeLauncher]) -> None:
    """Where others stop before a combine, to make where its rows come home, so must a rank with a fault."""
    buffers, others = made
    buffers.receive(BF16, 0, 0, {})
    plain = CombineOptions(True, BF16, BF16, False)
    for split, options in (
        (False, plain),
        (False, replace(plain, weights_from_home=True)),
        (True, plain),
        (False, replace(plain, strategy="all_to_all")),
        (True, replace(plain, strategy="all_to_all")),
        (False, replace(plain, wire_dtype=torch.float32)),
    ):
        has, before = buffers.has_for_combine(options, split), others.agreed
        buffers.combine_recv(options, split, {})
        assert (others.agreed == before) == has
        assert buffers.has_for_combine(options, split)
    assert others.agreed == 5, "the cases make no buffers"


BAD_CALLS: dict[str, Callable[[tl.Communicator, tl.Routed], object]] = {
    "weights": lambda comm, routed: comm.combine(routed.tokens, routed, topk_weights=torch.zeros(1, 1)),
    "per route": lambda comm, routed: comm.combine(routed.tokens[1:], routed, mode="per_route"),
    "wire": lambda comm, routed: comm.combine(routed.tokens[1:], routed, wire_dtype=torch.float32),
    "halves": lambda comm, routed: comm.send_combine(routed.tokens[1:], routed),
    "float32": lambda comm, routed: comm.dispatch(torch.zeros(2, 128), None, layout="slots"),  # type: ignore[arg-type]
    "first reweighted": lambda comm, routed: comm.reweighted(routed, torch.zeros(1, 1)),
    "first wide rows again": lambda comm, routed: comm.dispatch_again(torch.zeros(1, 128), routed),
    "has all": lambda comm, routed: comm.combine(routed.tokens[1:], routed),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_behind_an_unread_overflow(name: str) -> None:
    """The others raise the overflow before they make a buffer, and open no call: this rank would be one ahead."""
    with StandIns(PLAN.num_ranks) as calls, torch.no_grad():
        sizes = {"num_experts": 8, "hidden": 128, "top_k": 2, "max_tokens_per_rank": 1024}
        comm = tl.Communicator(None, backend="nvlink", device="cpu", **sizes)
        calls.keeps = True
        (launcher,) = calls.launchers
        launcher.ranks.notes.post = lambda name, text: None  # type: ignore[method-assign]
        routed = comm.dispatch(
            torch.zeros(2, 128, dtype=BF16), torch.zeros(2, 2, dtype=torch.int64), capacity=8, sizes="bounded"
        )
        leave(calls, launcher._num_launches - 1, OVERFLOW)
        before = launcher.num_calls
        with pytest.raises(CapacityOverflow):
            BAD_CALLS[name](comm, routed)
        assert launcher.num_calls == before + (name == "has all")


def test_a_first_reweighting_has_a_buffer_of_its_own(made: tuple[Buffers, FakeLauncher]) -> None:
    """Rows of another width arrive elsewhere than those of tokens, which are as wide in bytes."""
    buffers, _ = made
    options = DispatchOptions("token", 1, "bounded", PLAN.worst_case_rows("token"))
    buffers.receive(torch.float32, 0, 0, {})
    assert buffers.has_for_dispatch(options, 4)
    assert not buffers.has_for_dispatch(options, 4, 8)
    buffers.receive(torch.float32, 0, 0, {}, 8)
    assert buffers.has_for_dispatch(options, 4, 8)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A launcher whose calls are over when the host waits for them; no rank has posted anything."""
    monkeypatch.setattr(outcomes, "NOTE_S", 0.0)
    with StandIns(PLAN.num_ranks) as stand_ins:
        ranks: Any = RankGroup(None, device="cpu")
        monkeypatch.setattr(ranks.notes, "read", lambda name, rank: None)
        control: Any = Memory(control_layout(PLAN), ranks)
        stand_ins.launchers.append(Launcher(PLAN, ranks, control, 1))
        stand_ins.keeps = True
        yield stand_ins


def statuses(calls: StandIns) -> list[int]:
    """Those of all calls that were launched."""
    return [args.call.status for _, args in calls.launched]


def leave(calls: StandIns, launch: int, outcome: CallOutcome) -> None:
    """What the kernel of a launch has found."""
    words = calls.launchers[0].outcomes._records._words
    ranks = (outcome.faulty_rank, outcome.differing_rank)
    faulty, differing = (0 if rank is None else rank + 1 for rank in ranks)
    found = (outcome.needed_rows, outcome.capacity, faulty, outcome.status, differing)
    for word, value in enumerate(found):
        words[record_word(launch, word)] = value


OVERFLOW = CallOutcome(needed_rows=9, capacity=8, faulty_rank=None, status=0, differing_rank=None)


@pytest.mark.parametrize("num_names", [1, 2, 3, 6])
def test_calls_behind_an_unread_outcome(calls: Any, num_names: int) -> None:
    """An overflow that nobody has read ends the calls of a rank with a fault where it ends those of the others: when
    it is CALLS_IN_FLIGHT calls old, and no earlier. Its own fault is no news to the rank afterwards."""
    (launcher,) = calls.launchers
    launcher._open({"call": "dispatch"})
    leave(calls, 0, OVERFLOW)
    with pytest.raises(CapacityOverflow):
        launcher.report_fault(ValueError("bad"), [f"call {i}" for i in range(num_names)])
    opened = min(num_names, CALLS_IN_FLIGHT)
    assert statuses(calls) == [0, FAULT, *[FOLLOWS_A_FAULT] * (opened - 1)]
    for launch in range(1, 1 + opened):
        leave(calls, launch, CallOutcome(0, 0, faulty_rank=0, status=FAULT, differing_rank=1))
    launcher.settle(0)


def test_calls_after_a_fault(calls: Any) -> None:
    """As many as the others open before they read what the first found."""
    calls.launchers[0].report_fault(ValueError("bad"), [f"call {i}" for i in range(6)])
    assert statuses(calls) == [FAULT, *[FOLLOWS_A_FAULT] * CALLS_IN_FLIGHT]


def test_others_that_wait_open_nothing(calls: Any) -> None:
    """They read everything before they open the call, raise, and do not open it: nor does the rank with a fault."""
    (launcher,) = calls.launchers
    launcher._open({"call": "dispatch"})
    leave(calls, 0, OVERFLOW)
    with pytest.raises(CapacityOverflow):
        launcher.report_fault(ValueError("bad"), ["dispatch"], others_wait=True)
    assert statuses(calls) == [0]


def test_what_follows_a_fault_is_no_news(calls: Any) -> None:
    """It belongs to the fault of the call before, which all have read; a fault of its own has a number of its own."""
    (launcher,) = calls.launchers
    for status in (FOLLOWS_A_FAULT, FAULT):
        launcher._open({"call": "dispatch"})
        leave(calls, launcher._num_launches - 1, CallOutcome(0, 0, faulty_rank=1, status=status, differing_rank=None))
        with nullcontext() if status == FOLLOWS_A_FAULT else pytest.raises(PeerError, match="rank 1 failed"):
            launcher.settle(0)


@pytest.mark.parametrize("theirs", ["ValueError: bad", "NeedsRoom: too small", None])
def test_a_fault_of_another_beside_growth(calls: Any, monkeypatch: pytest.MonkeyPatch, theirs: str | None) -> None:
    """The rank that has it does not come to make a larger communicator, so this one, which needs one, raises too."""
    (launcher,) = calls.launchers
    posted: list[tuple[str, str]] = []
    monkeypatch.setattr(launcher.ranks.notes, "read", lambda name, rank: theirs if rank == 1 else None)
    monkeypatch.setattr(launcher.ranks.notes, "post", lambda name, text: posted.append((name, text)))
    launcher.ranks.num_ranks = PLAN.num_ranks
    is_final = theirs == "ValueError: bad"
    with pytest.raises(PeerError, match=r"rank 1 failed.*bad") if is_final else nullcontext():
        launcher.report_fault(NeedsRoom("for 9 tokens"), ["dispatch"])
    launcher.report_fault(ValueError("mine"), ["dispatch"])
    assert posted == [("fault/0", "NeedsRoom: for 9 tokens"), ("fault/1", "ValueError: mine")]
    assert statuses(calls) == [FAULT, FAULT]


ONE, TWO = [FAULT], [FAULT, FOLLOWS_A_FAULT]
NO_BUFFER = CombineOptions(True, torch.float32, torch.float32, False)
UPCOMING: dict[str, tuple[list[Upcoming], list[int]]] = {
    "two": ([Upcoming("dispatch"), Upcoming("combine")], TWO),
    "one": ([Upcoming("dispatch")], ONE),
    "awaited": ([Upcoming("dispatch", awaited=True), Upcoming("combine")], ONE),
    "the second is awaited": ([Upcoming("dispatch"), Upcoming("combine", awaited=True)], TWO),
    "before a buffer": ([Upcoming("dispatch"), Upcoming("combine", NO_BUFFER)], ONE),
    "behind a buffer": ([Upcoming("combine", NO_BUFFER), Upcoming("dispatch")], ONE),
    "checked": ([Upcoming("dispatch"), Upcoming("combine")], ONE),
    "late ranks are masked": ([Upcoming("dispatch"), Upcoming("combine")], ONE),
    "late ranks of a layer": ([Upcoming("dispatch"), Upcoming("MegaMoE")], TWO),
    "a layer without memory": ([Upcoming("dispatch"), Upcoming("MegaMoE")], ONE),
}


@pytest.mark.parametrize("name", UPCOMING)
def test_calls_that_follow_a_fault(name: str) -> None:
    """As many as the others open before they wait for an outcome, or for each other to make a buffer."""
    upcoming, wanted = UPCOMING[name]
    with StandIns(PLAN.num_ranks) as stand_ins:
        sizes = {"num_experts": 8, "hidden": 128, "top_k": 2, "max_tokens_per_rank": 1024}
        comm = tl.Communicator(None, backend="nvlink", device="cpu", checked=name == "checked", **sizes)
        (launcher,) = stand_ins.launchers
        launcher.ranks.notes.post = lambda name, text: None  # type: ignore[method-assign]
        backend: Any = comm.engine._backend
        if "late ranks" in name:
            backend._late = SimpleNamespace(call=lambda make: make())
        if "a layer" in name:
            comm.engine.fused_layer(0, "block")
            backend._buffers.has_for_fused_layer = lambda: "late" in name
        stand_ins.keeps = True
        with pytest.raises(ValueError, match="bad"), comm.engine.sequence(*upcoming):
            raise ValueError("bad")
        assert statuses(stand_ins) == wanted


def test_no_memory_for_ranks_that_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks have begun to make memory for them, and wait there for this one."""
    with StandIns(PLAN.num_ranks):
        sizes = {"num_experts": 8, "hidden": 128, "top_k": 2, "max_tokens_per_rank": 1024}
        comm = tl.Communicator(None, backend="nvlink", device="cpu", **sizes)
        ranks, told, fault = comm.engine.ranks, [], torch.OutOfMemoryError("no room")
        monkeypatch.setattr(ranks, "unmask", lambda given: setattr(ranks, "met_at", 1))
        monkeypatch.setattr(ranks, "abort", told.append)
        monkeypatch.setattr(opening_module, "close_together", lambda buffers: None)
        monkeypatch.setattr(backend_module, "SymmetricBuffer", mock.Mock(side_effect=fault))
        with pytest.raises(torch.OutOfMemoryError):
            comm.unmask_ranks([1])
        assert told == [fault]


def test_options_that_nobody_posted(calls: Any) -> None:
    """Of a captured call the options are not kept, and without a store no rank reads another's: the error is still
    that the ranks differ."""
    (launcher,) = calls.launchers
    launcher._open({"call": "dispatch"})
    leave(calls, 0, CallOutcome(0, 0, faulty_rank=None, status=0, differing_rank=1))
    with pytest.raises(PlanMismatch, match="rank 1 has options of this call"):
        launcher.settle(0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_halves_are_read_by_their_calls(calls: Any, order: tuple[int, int]) -> None:
    """Ranks may receive two open calls in either order. What one of them found ends a later call of all ranks,
    the same one whatever the order."""
    (launcher,) = calls.launchers
    kernel, epoch = launcher.kernel(BarrierVariant(plan=PLAN)), torch.zeros(1, dtype=torch.int32)
    halves = [Half(epoch, epoch.data_ptr(), kernel) for _ in range(2)]
    for number, half in enumerate(halves):
        launcher.launch(kernel, CallKind({"call": str(number)}), -1, begins=half)
    for number in order:
        launcher.finish(halves[number])
    assert [half.number for half in halves] == [0, 1]
    leave(calls, 2 + order.index(0), OVERFLOW)  # of call 0
    for _ in range(CALLS_IN_FLIGHT - 1):
        launcher._open({"call": "dispatch"})
    with pytest.raises(CapacityOverflow):
        launcher._open({"call": "dispatch"})
    assert launcher.num_calls == 2 + CALLS_IN_FLIGHT - 1


def test_a_slot_is_free_when_it_is_used_again(calls: Any) -> None:
    """Each launch has a slot of its own until its outcome was read, and tells of its end by a number of its own. Those
    of a capture share one, and tell nothing: nobody waits for a replay."""
    (launcher,) = calls.launchers
    for number in range(3 * CAPTURED_SLOT):
        launcher._open({"call": "dispatch"})
        unread = [InFlight(*call) for call in launcher.outcomes.in_flight]
        assert len({call.slot for call in unread}) == len(unread) <= CALLS_IN_FLIGHT + 1
        args = calls.launched[-1][1]
        assert args.call.record == launcher.outcomes.addresses[unread[-1].slot]
        assert args.call.sequence == unread[-1].sequence == number + 1
    assert CAPTURED_SLOT not in {call.slot for call in unread}
    calls.capturing = True
    launcher._graphs = SimpleNamespace(hold=lambda *owners: None)
    launcher._open({"call": "dispatch"})
    args = calls.launched[-1][1]
    assert (args.call.record, args.call.sequence) == (launcher.outcomes.addresses[CAPTURED_SLOT], 0)


LOOK_AROUND = outcomes.Outcomes._look_around


def running(calls: Any, monkeypatch: pytest.MonkeyPatch, query: Any, capturing: bool = False) -> list[list[int]]:
    """A call that is not over, on a stream that answers ``query``; the host looks around at once. The list is empty
    when it has looked at the other ranks, and then the call is over."""
    (launcher,) = calls.launchers
    launcher._open({"call": "dispatch"})
    looks: list[list[int]] = [[]]
    outcome = launcher.outcomes
    monkeypatch.setattr(outcome._records, "is_well", lambda slot, sequence: False)
    monkeypatch.setattr(outcome._records, "is_over", lambda slot, sequence: not looks)
    monkeypatch.setattr(outcomes.Outcomes, "_look_around", LOOK_AROUND)
    monkeypatch.setattr(outcomes, "on_stream", lambda stream: nullcontext())
    InFlight(*outcome.in_flight[0]).stream.query = query
    outcome._control = SimpleNamespace(ended_ranks=looks.pop)
    calls.capturing = capturing
    return looks


def test_a_gpu_that_has_failed_leaves_no_word(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that reads a wrong address ends all of them, and no last block leaves: only the driver says so."""

    def failed() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    running(calls, monkeypatch, failed)
    with pytest.raises(RuntimeError, match="illegal"):
        calls.launchers[0].settle(0)


def test_a_stream_in_a_capture_is_not_asked(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of an eager call may be captured by the time the host reads its outcome; a query ends the capture."""

    def asked() -> bool:
        raise AssertionError("asked")

    looks = running(calls, monkeypatch, asked, capturing=True)
    calls.launchers[0].settle(0)
    assert not looks, "the other ranks were looked at all the same"
