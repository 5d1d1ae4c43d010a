"""Later calls of a known kind on backend "nvlink", without a GPU: which are right at a glance, and which are checked.

A call that is wrong but passes the glance would launch a kernel on wrong tensors, or where it must not be.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.support.stand_ins import StandIns, record_word
from tokenloom.backends.peers import buffers
from tokenloom.backends.peers.dispatch import DirectDispatch
from tokenloom.backends.peers.handle import WORDS_TOGETHER
from tokenloom.backends.peers.outcomes import CALLS_IN_FLIGHT, FAULT
from tokenloom.comm.calls import CombineCall, DispatchCall
from tokenloom.errors import CapacityOverflow, CommunicatorBroken, InvalidArgument

HIDDEN, TOP_K, NUM_EXPERTS = 256, 2, 8
SMALL, LARGE = 64, 1024
"""Tokens of a rank: plans of few rows have staged dispatches."""
BF16, FP8, INT32, INT64 = torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.int64


class Calls:
    """A communicator with stand-ins around it, and how many of its calls were checked whole."""

    def __init__(self, stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch, max_tokens: int) -> None:
        sizes = {"num_experts": NUM_EXPERTS, "hidden": HIDDEN, "top_k": TOP_K, "max_tokens_per_rank": max_tokens}
        self.comm = tl.Communicator(None, backend="nvlink", device="cpu", **sizes)
        self.stand_ins, self.checked = stand_ins, 0
        for kind in (DispatchCall, CombineCall):
            monkeypatch.setattr(kind, "check", self._counted(kind.check))
        self.x, self.ids = torch.randn(5, HIDDEN, dtype=BF16), torch.zeros(5, TOP_K, dtype=INT64)
        self.weights = torch.rand(5, TOP_K)

    def _counted(self, check: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def counted(call: Any) -> Any:
            self.checked += 1
            return check(call)

        return counted

    def dispatch(self, **changes: Any) -> Any:
        given: dict[str, Any] = {"x": self.x, "topk_ids": self.ids, "topk_weights": self.weights, "layout": "token"}
        return self.comm.dispatch(**{**given, "sizes": "bounded", **changes})


@pytest.fixture(params=[SMALL, LARGE])
def calls(request: pytest.FixtureRequest, stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(stand_ins, monkeypatch, request.param)


def fp8_tokens(calls: Calls) -> tuple[torch.Tensor, torch.Tensor]:
    return calls.x.to(FP8), torch.ones(5, HIDDEN // 128)


KINDS: dict[str, Callable[[Calls], dict[str, Any]]] = {
    "token": lambda calls: {},
    "rank": lambda calls: {"layout": "rank"},
    "expert": lambda calls: {"layout": "expert", "capacity": 300},
    "slots": lambda calls: {"layout": "slots", "sizes": None},
    "to fp8": lambda calls: {"to_fp8": True},
    "fp8": lambda calls: {"x": fp8_tokens(calls)},
    "no weights": lambda calls: {"topk_weights": None},
    "int32 ids": lambda calls: {"topk_ids": calls.ids.to(INT32)},
    "no tokens": lambda calls: {"x": calls.x[:0], "topk_ids": calls.ids[:0], "topk_weights": calls.weights[:0]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_call_of_a_kind_is_right_at_a_glance(calls: Calls, kind: str) -> None:
    """Its combine, too. Both give what the first calls give."""
    changes = KINDS[kind](calls)
    first, second = calls.dispatch(**changes), calls.dispatch(**changes)
    assert calls.checked == 1
    assert second.tokens.shape == first.tokens.shape
    assert (second.tokens.dtype, second.layout) == (first.tokens.dtype, first.layout)
    assert (second.topk_weights is None) == (first.topk_weights is None)
    assert (second.topk_ids is None) == (first.topk_ids is None)
    if second.topk_ids is not None:
        assert second.topk_ids.dtype == changes.get("topk_ids", calls.ids).dtype
    options = {"weighted": False} if kind == "no weights" and first.layout == "expert" else {}
    y = torch.zeros(second.tokens.shape, dtype=BF16)
    out = torch.empty(first._handle.num_tokens, HIDDEN, dtype=BF16)
    assert calls.comm.combine(y, first, **options).shape == out.shape
    assert calls.checked == 2
    assert calls.comm.combine(y, second, **options).dtype == BF16
    assert calls.comm.combine(y, second, out=out, **options) is out
    assert calls.checked == 2


@pytest.mark.parametrize("layout", ["token", "expert"])
def test_ranks_agree_on_rows_that_nobody_gave(
    stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """Where the caller gives no capacity, it follows from memory. Senders rely on that of the rank they send to."""

    def no_wait(*_: Any) -> Any:
        raise InvalidArgument("no counts come")

    monkeypatch.setattr(DirectDispatch, "finish", no_wait)

    def meaning() -> int:
        with pytest.raises(InvalidArgument, match="no counts come"):
            Calls(stand_ins, monkeypatch, LARGE).dispatch(layout=layout, sizes="exact")
        return int(stand_ins.launched[-1][1].call.options_hash)

    before = meaning()
    assert meaning() == before
    monkeypatch.setattr(buffers, "EXPERT_ROOM", 2 * buffers.EXPERT_ROOM)
    assert (meaning() != before) == (layout == "expert")


@pytest.mark.parametrize("max_tokens", [SMALL, LARGE])
def test_tensors_of_the_caller(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch, max_tokens: int) -> None:
    """Staged kernels write to them, and to none of them in the next call. From receive buffers they are copied."""
    calls = Calls(stand_ins, monkeypatch, max_tokens)
    out = tl.DispatchOut(tokens=torch.empty(300, HIDDEN, dtype=BF16), num_rows=torch.empty((), dtype=INT32))
    how = {"layout": "expert", "capacity": 300}
    calls.dispatch(**how)
    given, other = calls.dispatch(out=out, **how), calls.dispatch(**how)
    assert calls.checked == 1
    assert given.tokens is out.tokens
    assert given.num_rows is given._handle.counts.num_rows is out.num_rows or max_tokens == LARGE
    args = stand_ins.launched[-2][1], stand_ins.launched[-1][1]
    if max_tokens == SMALL:
        assert (args[0].out_rows, args[0].num_rows) == (out.tokens.data_ptr(), out.num_rows.data_ptr())
    assert (args[1].out_rows, args[1].num_rows) == (
        other.tokens.data_ptr() if max_tokens == SMALL else 0,
        other.num_rows.data_ptr(),
    )


UNUSUAL: dict[str, tuple[Callable[[Calls], dict[str, Any]], type[Exception] | None]] = {
    "a row too short": (lambda calls: {"x": calls.x[:, :-8].contiguous()}, tl.ShapeMismatch),
    "one dimension": (lambda calls: {"x": calls.x[0]}, tl.ShapeMismatch),
    "other dtype": (lambda calls: {"x": calls.x.to(torch.float64)}, tl.DtypeMismatch),
    "float ids": (lambda calls: {"topk_ids": calls.ids.to(BF16)}, tl.DtypeMismatch),
    "double weights": (lambda calls: {"topk_weights": calls.weights.double()}, tl.DtypeMismatch),
    "a list of weights": (lambda calls: {"topk_weights": calls.weights.tolist()}, InvalidArgument),
    "scales of bfloat16": (lambda calls: {"x": (calls.x, torch.ones(5, 2))}, tl.DtypeMismatch),
    "a number that is a truth": (lambda calls: {"alignment": True}, InvalidArgument),
    "a truth that is a number": (lambda calls: {"to_fp8": 0}, InvalidArgument),
    "a list of layouts": (lambda calls: {"layout": ["token"]}, InvalidArgument),
    "copies": (lambda calls: {"copy": True}, None),
    "another capacity": (lambda calls: {"sizes": "bounded", "capacity": 9}, None),
    "a count of 64 bits": (
        lambda calls: {"out": tl.DispatchOut(num_rows=torch.empty((), dtype=INT64))},
        tl.DtypeMismatch,
    ),
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_what_is_unusual_is_checked(calls: Calls, what: str) -> None:
    """It raises what it does in a first call, and the next call of the known kind is right at a glance."""
    make_changes, error = UNUSUAL[what]
    calls.dispatch()
    changes = make_changes(calls)
    if error is None:
        calls.dispatch(**changes)
    else:
        with pytest.raises(error):
            calls.dispatch(**changes)
    assert calls.checked == 2
    calls.stand_ins.settle()
    clear_records(calls.stand_ins)
    calls.dispatch()
    assert calls.checked == 2


def clear_records(stand_ins: StandIns) -> None:
    """No call has found anything."""
    for launcher in stand_ins.launchers:
        for number in range(launcher._num_launches):
            for word in range(5):
                launcher.outcomes._records._words[record_word(number, word)] = 0


BAD_ROWS: dict[str, Callable[[torch.Tensor], dict[str, Any]]] = {
    "fewer rows": lambda y: {"y": y[:-1]},
    "a list": lambda y: {"y": y.tolist()},
    "a short result": lambda y: {"out": torch.empty(4, HIDDEN, dtype=BF16)},
    "another mode": lambda y: {"mode": "per_route"},
    "weights": lambda y: {"weighted": True},
    "no dispatch": lambda y: {"routed": None},
}


@pytest.mark.parametrize("what", BAD_ROWS)
def test_bad_rows_are_checked(calls: Calls, what: str) -> None:
    """A combine of them raises."""
    routed = calls.dispatch()
    y = torch.zeros(routed.tokens.shape, dtype=BF16)
    calls.comm.combine(y, routed)
    with pytest.raises(tl.TokenloomError):
        calls.comm.combine(**{"y": y, "routed": routed, **BAD_ROWS[what](y)})
    assert calls.checked == 3


def test_a_number_that_weighs(calls: Calls) -> None:
    """1 says no more whether rows are weighted once True has said it."""
    routed = calls.dispatch(layout="expert", capacity=300)
    y = torch.zeros(routed.tokens.shape, dtype=BF16)
    calls.comm.combine(y, routed, weighted=True)
    with pytest.raises(InvalidArgument, match="weighted is 1, expected True"):
        calls.comm.combine(y, routed, weighted=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("leaf", ["y", "weights"])
def test_gradients_of_a_known_combine(calls: Calls, leaf: str) -> None:
    """A combine that wants gradients is of another kind than those before, and those behind want none again."""
    routed = calls.dispatch(layout="expert", capacity=300)
    y = torch.zeros(routed.tokens.shape, dtype=BF16)
    calls.comm.combine(y, routed)
    with torch.enable_grad():
        weights = calls.weights.clone().requires_grad_(leaf == "weights")
        wanted = calls.dispatch(layout="expert", capacity=300, topk_weights=weights)
        for _ in range(2):
            assert calls.comm.combine(y.clone().requires_grad_(leaf == "y"), wanted).requires_grad
        assert not calls.comm.combine(y, routed).requires_grad
    assert calls.checked == 4


def test_a_combine_of_another_communicator(calls: Calls) -> None:
    """Its dispatch is not known here, though all else is alike."""
    other = tl.Communicator(
        None, backend="nvlink", device="cpu", num_experts=NUM_EXPERTS, hidden=HIDDEN, top_k=TOP_K,
        max_tokens_per_rank=calls.comm.plan.max_tokens_per_rank,
    )  # fmt: skip
    routed = calls.dispatch()
    y = torch.zeros(routed.tokens.shape, dtype=BF16)
    calls.comm.combine(y, routed)
    theirs = other.dispatch(calls.x, calls.ids, calls.weights, layout="token", sizes="bounded")
    with pytest.raises(InvalidArgument, match="another Communicator"):
        calls.comm.combine(y, theirs)


def test_rows_that_were_overwritten(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later calls, too, know how old a dispatch is."""
    calls = Calls(stand_ins, monkeypatch, LARGE)
    old = calls.dispatch()
    y = torch.zeros(old.tokens.shape, dtype=BF16)
    calls.comm.combine(y, old)
    for _ in range(2):
        calls.dispatch()
    assert calls.checked == 2
    with pytest.raises(InvalidArgument, match="its buffer was reused"):
        calls.comm.combine(y, old)


def with_gradients(calls: Calls) -> Any:
    with torch.enable_grad():
        return calls.dispatch()


def on_another_stream(calls: Calls) -> Any:
    calls.stand_ins.stream += 1
    return calls.dispatch()


def beside_an_open_call(calls: Calls) -> Any:
    pending = calls.comm.send_dispatch(calls.x, calls.ids, calls.weights, layout="token", sizes="bounded")
    routed = calls.dispatch()
    pending.receive()
    return routed


def in_a_sequence(calls: Calls) -> Any:
    with calls.comm.engine.sequence():
        return calls.dispatch()


def under_a_profiler(calls: Calls) -> Any:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        return calls.dispatch()


AROUND = {with_gradients: 2, on_another_stream: 1, beside_an_open_call: 2, in_a_sequence: 1, under_a_profiler: 1}
"""How many calls are checked whole: those with gradients and those in halves are of kinds of their own."""


@pytest.mark.parametrize("around", AROUND, ids=lambda around: around.__name__)
def test_what_is_around_a_call(calls: Calls, monkeypatch: pytest.MonkeyPatch, around: Callable[[Calls], Any]) -> None:
    """Other streams, halves, layers and profilers are looked at before the launch; gradients are not."""
    calls.dispatch()
    (launcher,) = calls.stand_ins.launchers
    looked: list[object] = []
    launch = launcher.launch

    def look(*arguments: Any, **options: Any) -> None:
        looked.append(arguments)
        launch(*arguments, **options)

    monkeypatch.setattr(launcher, "launch", look)
    assert around(calls).num_rows is not None
    assert looked
    assert calls.checked == AROUND[around]


def test_in_a_capture(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured call has memory of its own, since replays write it long after."""
    calls.dispatch()
    later = calls.dispatch()
    (launcher,) = calls.stand_ins.launchers
    monkeypatch.setattr(launcher._graphs, "hold", lambda *owners: None)
    calls.stand_ins.capturing = True
    captured = calls.dispatch()
    assert calls.checked == 1
    assert captured._handle.memory.numel() < WORDS_TOGETHER == later._handle.memory.numel()
    calls.stand_ins.capturing = False
    calls.dispatch()
    assert calls.checked == 1


def test_a_closed_communicator(calls: Calls) -> None:
    """It says so, and launches nothing."""
    calls.dispatch()
    calls.comm.engine.ranks.close()
    launched = len(calls.stand_ins.launched)
    with pytest.raises(CommunicatorBroken, match="was closed"):
        calls.dispatch()
    assert len(calls.stand_ins.launched) == launched


def test_backward_of_a_closed_communicator(calls: Calls) -> None:
    """Its buffers are gone, so nothing is launched that would write to them."""
    with torch.enable_grad():
        x = calls.x.clone().requires_grad_()
        routed = calls.dispatch(x=x)
        loss = calls.comm.combine(routed.tokens, routed).sum()
    calls.comm.engine.ranks.close()
    launched = len(calls.stand_ins.launched)
    with pytest.raises(CommunicatorBroken, match="was closed"):
        loss.backward()
    assert len(calls.stand_ins.launched) == launched


def test_what_earlier_calls_left(calls: Calls) -> None:
    """A later call raises it at the same point as a first one: all ranks do, and none opens the call."""
    (launcher,) = calls.stand_ins.launchers
    calls.dispatch()
    overflowed = launcher._num_launches
    for _ in range(CALLS_IN_FLIGHT):
        calls.dispatch()
    calls.stand_ins.settle()
    for word, value in enumerate((9, 8)):
        launcher.outcomes._records._words[record_word(overflowed, word)] = value
    calls.dispatch()
    launches = launcher._num_launches
    with pytest.raises(CapacityOverflow):
        calls.dispatch()
    assert launcher._num_launches == launches
    calls.dispatch()
    assert calls.checked == 1


@pytest.mark.parametrize("name", ["dispatch", "combine"])
def test_a_fault_of_a_later_call_is_told(calls: Calls, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The others wait in the call that this rank could not launch."""
    routed = calls.dispatch()
    y = torch.zeros(routed.tokens.shape, dtype=BF16)
    calls.comm.combine(y, routed)
    (launcher,) = calls.stand_ins.launchers
    refused = RuntimeError("the driver refuses")

    def refuse(*arguments: Any, **options: Any) -> None:
        raise refused

    with monkeypatch.context() as patched:
        patched.setattr(launcher, "launch_ready", refuse_once(launcher.launch_ready, refuse))
        with pytest.raises(RuntimeError, match="refuses"):
            calls.dispatch() if name == "dispatch" else calls.comm.combine(y, routed)
    assert calls.checked == 2
    assert calls.stand_ins.launched[-1][1].call.status == FAULT
    calls.dispatch()
    assert calls.comm.engine.open_calls.count == 4, "the call that failed counts"


def refuse_once(launch: Callable[..., None], refuse: Callable[..., None]) -> Callable[..., None]:
    todo = [refuse]

    def launch_ready(*arguments: Any, **options: Any) -> None:
        (todo.pop() if todo else launch)(*arguments, **options)

    return launch_ready


def test_buffers_that_have_grown(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was prepared for the smaller ones is used no more: it would write to memory that is gone."""
    calls = Calls(stand_ins, monkeypatch, LARGE)
    worst = calls.comm.plan.worst_case_rows("expert")
    for _ in range(2):
        calls.dispatch(layout="expert", capacity=9)
    before = stand_ins.launched[-1][1].peers
    backend: Any = calls.comm.engine._backend
    small = list(backend._buffers._buffers.values())  # kept, so that nothing else gets their addresses
    calls.dispatch(layout="expert", capacity=worst)
    assert small[0].peers.data_ptr() == before
    grown = stand_ins.launched[-1][1].peers
    assert grown != before, "the case grows nothing"
    calls.dispatch(layout="expert", capacity=9)
    assert stand_ins.launched[-1][1].peers == grown
    assert calls.checked == 3
    calls.dispatch(layout="expert", capacity=9)
    assert stand_ins.launched[-1][1].peers == grown
    assert calls.checked == 3


def test_a_combine_of_grown_buffers(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come home to the buffer that they were received in, so to the larger one."""
    calls = Calls(stand_ins, monkeypatch, LARGE)

    def combine(capacity: int) -> int:
        routed = calls.dispatch(layout="expert", capacity=capacity)
        calls.comm.combine(torch.zeros(routed.tokens.shape, dtype=BF16), routed)
        peers: int = stand_ins.launched[-1][1].peers
        return peers

    before = combine(9)
    backend: Any = calls.comm.engine._backend
    small = list(backend._buffers._buffers.values())  # kept, so that nothing else gets their addresses
    assert combine(9) == before == small[0].peers.data_ptr()
    assert calls.checked == 2
    assert combine(calls.comm.plan.worst_case_rows("expert")) != before


def test_words_of_calls(calls: Calls) -> None:
    """Memory is shared by calls of one stream. Another stream has its own: what was freed on one may be in use on the
    other."""
    calls.dispatch()
    first, second = calls.dispatch()._handle, calls.dispatch()._handle
    assert first.memory is second.memory
    assert first.words_address == first.memory.data_ptr() + 4 * first.first_word
    assert second.first_word >= first.first_word + first.results.words(first.num_tokens)
    calls.stand_ins.stream += 1
    calls.dispatch()
    other = calls.dispatch()._handle
    assert other.memory is not first.memory
    assert other.memory.numel() == WORDS_TOGETHER


def test_memory_for_words_runs_out(calls: Calls) -> None:
    """Then there is more, and what handles hold stays."""
    calls.dispatch()
    size = calls.dispatch()._handle.results.words(5)
    handles = [calls.dispatch()._handle for _ in range(WORDS_TOGETHER // size + 1)]
    spans: dict[int, list[tuple[int, int]]] = {}
    for handle in handles:
        end = handle.first_word + handle.results.words(handle.num_tokens)
        assert end <= handle.memory.numel()
        spans.setdefault(id(handle.memory), []).append((handle.first_word, end))
    assert len(spans) > 1, "the case does not fill the first"
    for found in spans.values():
        assert all(end <= begin for (_, end), (begin, _) in pairwise(found))


@pytest.mark.parametrize("name", ["num_rows", "expert_counts", "source_counts"])
def test_counts_change_apart(calls: Calls, name: str) -> None:
    """What a user does in place to one call's counts is no change of another's, which autograd may have saved."""
    calls.dispatch()
    first, second = (getattr(calls.dispatch(), name) for _ in range(2))
    before = second._version
    first.add_(1)
    assert second._version == before


def test_words_of_calls_with_gradients(calls: Calls) -> None:
    """Memory that calls of inference mode have made serves later ones, whose backward may save its parts."""
    with torch.inference_mode():
        for _ in range(3):
            calls.dispatch()
    with torch.enable_grad():
        routed = [calls.dispatch(x=calls.x.clone().requires_grad_()) for _ in range(3)]
    assert not any(each.expert_counts.is_inference() for each in routed)


def test_halves_of_a_known_kind_in_a_capture(calls: Calls) -> None:
    """Exact sizes are read by the host, which a CUDA graph cannot do."""
    pending = calls.comm.send_dispatch(calls.x, calls.ids, calls.weights, layout="token")
    calls.stand_ins.capturing = True
    with pytest.raises(InvalidArgument, match="sizes='exact' reads on the host"):
        calls.comm.send_dispatch(calls.x, calls.ids, calls.weights, layout="token")
    assert calls.checked == 1
    del pending


@pytest.mark.parametrize("changes", [{"capacity": 9.0}, {"layout": "expert", "alignment": 1.0, "capacity": 9}])
def test_a_number_that_is_no_int(calls: Calls, changes: dict[str, Any]) -> None:
    """It equals one that is known, and is refused as in a first call."""
    calls.dispatch(**{name: int(value) if isinstance(value, float) else value for name, value in changes.items()})
    with pytest.raises(InvalidArgument, match="expected rows"):
        calls.dispatch(**changes)


def test_what_is_known_keeps_no_buffers(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator that was closed, and is still held, holds no memory that rows were received in."""
    calls = Calls(stand_ins, monkeypatch, LARGE)
    calls.dispatch()
    (known,) = calls.comm.kinds._dispatches.values()
    prepared: Any = known.prepared
    calls.comm.engine._backend._buffers.take_all()  # type: ignore[attr-defined]  # as close() does
    assert prepared.is_stale
    assert prepared._received == [None, None]
