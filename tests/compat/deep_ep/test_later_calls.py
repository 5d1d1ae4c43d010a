"""Later calls of ``Buffer`` of a kind that is known: what is wrong or unusual about one still shows.

Without a GPU: kernels do nothing, and say what a test lets them say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.support.stand_ins import StandIns
from tokenloom.compat import deep_ep
from tokenloom.compat.deep_ep.faults import BadCall
from tokenloom.errors import PeerError, TokenloomError

RANKS, EXPERTS, TOP_K, HIDDEN, TOKENS = 4, 16, 2, 256, 1024
LOCAL, FEW = EXPERTS // RANKS, 20


@pytest.fixture
def stand_ins() -> Iterator[StandIns]:
    with StandIns(RANKS) as made:
        made.counts = [40, *[10] * RANKS, *[10] * LOCAL, *range(0, 50, 10)]
        made.keeps = True
        yield made


class Calls:
    """A buffer with a call of each kind behind it."""

    def __init__(self, stand_ins: StandIns) -> None:
        self.stand_ins = stand_ins
        self.x, self.ids = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16), torch.zeros(TOKENS, TOP_K).long()
        self.ids[:, 1] = 5
        self.weights = torch.rand(TOKENS, TOP_K)
        self.buffer = deep_ep.Buffer(stand_ins.group())
        per_rank, _, per_expert, mask, _ = self.buffer.get_dispatch_layout(self.ids, EXPERTS)
        self.given: dict[str, Any] = {
            "x": self.x, "topk_idx": self.ids, "topk_weights": self.weights, "num_tokens_per_rank": per_rank,
            "num_tokens_per_expert": per_expert, "is_token_in_rank": mask,
        }  # fmt: skip
        self.handle = self.dispatch()[4]
        self.y = torch.zeros(40, HIDDEN, dtype=torch.bfloat16)
        self.buffer.combine(self.y, self.handle)

    def dispatch(self, **changes: Any) -> Any:
        return self.buffer.dispatch(**{**self.given, **changes})

    def launched(self) -> Any:
        """Arguments of the last launch."""
        return self.stand_ins.launched[-1][1]


@pytest.fixture
def calls(stand_ins: StandIns) -> Calls:
    return Calls(stand_ins)


@pytest.mark.parametrize("enabled", [False, True])
def test_later_calls(calls: Calls, enabled: bool) -> None:
    """With gradients enabled as well, since these calls have none: results are without a graph."""
    x = calls.x.clone().requires_grad_()
    with torch.set_grad_enabled(enabled):
        rows, ids, weights, counts, handle, event = calls.dispatch(x=x, expert_alignment=16)
        out, nothing, _ = calls.buffer.combine(calls.y.clone().requires_grad_(), handle)
    assert (rows.shape, ids.dtype, weights.dtype) == ((40, HIDDEN), torch.int64, torch.float32)
    assert ids.shape == weights.shape == (40, TOP_K)
    assert (counts, len(handle), event.event, nothing) == ([16] * LOCAL, 6, None, None)
    assert not any(each.requires_grad for each in (rows, weights, out))


def test_ids_may_change(calls: Calls) -> None:
    """The handle has a copy."""
    handle = calls.dispatch()[4]
    calls.ids.fill_(3)
    calls.buffer.combine(calls.y, handle)
    assert calls.launched().topk_ids not in (0, calls.ids.data_ptr())
    assert handle.dispatched.ids[0].tolist() == [0, 5]


def said_by(call: Callable[[], Any], glance: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The error of a call, which is the one that it has where no glance lets it go unchecked."""
    said = []
    for sees in (True, False):
        if not sees:
            monkeypatch.setattr(deep_ep.Buffer, glance, lambda *arguments: None)
        with pytest.raises(TokenloomError) as raised:
            call()
        said.append((type(raised.value), str(raised.value)))
    monkeypatch.undo()
    assert said[0] == said[1]
    return said[0][1]


def by_column(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with other strides."""
    return tensor.transpose(-2, -1).contiguous().transpose(-2, -1)


WRONG: dict[str, Callable[[Calls], dict[str, Any]]] = {
    "x": lambda calls: {"x": calls.x[:, :-1]},
    "rows": lambda calls: {"x": calls.x[None]},
    "rows by column": lambda calls: {"x": by_column(calls.x)},
    "short rows": lambda calls: {"x": calls.x[:, :4].contiguous()},
    "bytes": lambda calls: {"x": calls.x.to(torch.int8)},
    "a list of rows": lambda calls: {"x": [calls.x, calls.x]},
    "scales of bfloat16": lambda calls: {"x": (calls.x, torch.ones(TOKENS, 2))},
    "fewer scales": lambda calls: {"x": (calls.x.to(torch.float8_e4m3fn), torch.ones(TOKENS - 1, 2))},
    "ids": lambda calls: {"topk_idx": calls.ids.int()},
    "fewer ids": lambda calls: {"topk_idx": calls.ids[:-1]},
    "ids by column": lambda calls: {"topk_idx": by_column(calls.ids)},
    "ids elsewhere": lambda calls: {"topk_idx": calls.ids.to("meta")},
    "no ids": lambda calls: {"topk_idx": None},
    "more columns": lambda calls: {"topk_weights": torch.cat([calls.weights] * 2, 1)},
    "weights by column": lambda calls: {"topk_weights": by_column(calls.weights)},
    "weights elsewhere": lambda calls: {"topk_weights": calls.weights.to("meta")},
    "weights": lambda calls: {"topk_weights": calls.weights.double()},
    "no weights": lambda calls: {"topk_weights": None},
    "counts by rank": lambda calls: {"num_tokens_per_rank": torch.zeros(RANKS + 1, dtype=torch.int32)},
    "counts by expert": lambda calls: {"num_tokens_per_expert": torch.zeros(EXPERTS)},
    "counts by node": lambda calls: {"num_tokens_per_rdma_rank": torch.zeros(2, dtype=torch.int32)},
    "no counts": lambda calls: {"num_tokens_per_expert": None},
    "experts that ranks do not divide": lambda calls: {"num_tokens_per_expert": torch.zeros(EXPERTS + 1).int()},
    "mask": lambda calls: {"is_token_in_rank": calls.given["is_token_in_rank"].int()},
    "another mask": lambda calls: {"is_token_in_rank": ~calls.given["is_token_in_rank"]},
    "alignment": lambda calls: {"expert_alignment": 0},
    "true alignment": lambda calls: {"expert_alignment": True},
    "config": lambda calls: {"config": 1},
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_shows(calls: Calls, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does in a first call, in the client's words; the next call is right again."""
    text = said_by(lambda: calls.dispatch(**WRONG[what](calls)), "_sizes_at_a_glance", monkeypatch)
    assert text.startswith("Buffer.dispatch: ")
    calls.stand_ins.settle()
    calls.dispatch()


WRONG_ROWS: dict[str, tuple[Callable[[Calls], dict[str, Any]], str]] = {
    "fewer": (lambda calls: {"x": calls.y[:-1]}, "x is [39, 256], expected [40, 256], as was received"),
    "in three dimensions": (lambda calls: {"x": calls.y[None]}, "x is [1, 40, 256], expected [tokens, hidden]"),
    "a list": (lambda calls: {"x": calls.y.tolist()}, "x is a list, expected a tensor, or (fp8 tensor, scales)"),
    "by column": (lambda calls: {"x": by_column(calls.y)}, "x has strides (1, 40), expected contiguous"),
    "fewer weights": (lambda calls: {"topk_weights": calls.weights[:39]}, "topk_weights is [39, 2], expected [40, 2]"),
    "config": (lambda calls: {"config": 1}, "config is an int, expected a Config or None"),
    "handle": (lambda calls: {"handle": (1, 2)}, "handle is a tuple, expected what Buffer.dispatch returned"),
}


@pytest.mark.parametrize("what", WRONG_ROWS)
def test_wrong_rows_show(calls: Calls, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that a client hands to combine."""
    make, said = WRONG_ROWS[what]
    given = {"x": calls.y, "handle": calls.handle, **make(calls)}
    text = said_by(lambda: calls.buffer.combine(**given), "_fits_combine", monkeypatch)
    assert text.startswith(f"Buffer.combine: {said}")


def test_a_destroyed_buffer(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, and launches nothing."""
    calls = Calls(stand_ins)
    monkeypatch.setattr(tl.Communicator, "close", lambda comm: None)
    calls.buffer.explicitly_destroy = True
    calls.buffer.destroy()
    for call in (calls.dispatch, lambda: calls.buffer.combine(calls.y, calls.handle)):
        with pytest.raises(BadCall, match="was destroyed"):
            call()


def test_another_rank_needs_more_room(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later call hears of it, makes the communicator with the others, and is made again there."""
    (before,) = calls.buffer._calls.all()
    dispatch_of = tl.Communicator.dispatch
    grown = [PeerError(1, "NeedsRoom: it needs another communicator")]

    def dispatch(*arguments: Any, **options: Any) -> Any:
        if grown:
            raise grown.pop()
        return dispatch_of(*arguments, **options)

    monkeypatch.setattr(tl.Communicator, "dispatch", dispatch)
    handle = calls.dispatch()[4]
    assert not grown
    assert handle.dispatched.comm is not before
    assert calls.buffer._calls.all() == [handle.dispatched.comm]


def test_other_faults_of_peers(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are raised."""

    def dispatch(*arguments: Any, **options: Any) -> Any:
        raise PeerError(1, "ShapeMismatch: x")

    monkeypatch.setattr(tl.Communicator, "dispatch", dispatch)
    with pytest.raises(PeerError, match="ShapeMismatch"):
        calls.dispatch()


def test_more_tokens_than_room(calls: Calls) -> None:
    """They need another communicator, which all ranks make."""
    (before,) = calls.buffer._calls.all()
    more = {name: torch.cat([calls.given[name]] * 2) for name in ("x", "topk_idx", "topk_weights", "is_token_in_rank")}
    assert calls.dispatch(**more)[4].dispatched.comm is not before


WRONG_AGAIN: dict[str, Callable[[Calls], dict[str, Any]]] = {
    "x": lambda calls: {"x": calls.x[:, :-1]},
    "rows": lambda calls: {"x": calls.x[:-1]},
    "a list": lambda calls: {"x": [calls.x, calls.x]},
    "in three dimensions": lambda calls: {"x": calls.x[None]},
    "by column": lambda calls: {"x": by_column(calls.x)},
    "bytes": lambda calls: {"x": calls.x.to(torch.int8)},
    "ids": lambda calls: {"topk_idx": calls.ids},
    "config": lambda calls: {"config": 1},
    "handle": lambda calls: {"handle": (1, 2)},
}


@pytest.mark.parametrize("enabled", [False, True])
def test_rows_again(calls: Calls, enabled: bool) -> None:
    """Other rows by a handle have no graph."""
    with torch.set_grad_enabled(enabled):
        for _ in range(2):
            rows, *others, event = calls.buffer.dispatch(calls.x.clone().requires_grad_(), calls.handle)
            assert rows.shape == (40, HIDDEN)
            assert not rows.requires_grad
            assert (others, event.event) == ([None] * 4, None)


@pytest.mark.parametrize("what", WRONG_AGAIN)
def test_what_is_wrong_again_shows(calls: Calls, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does the first time."""
    calls.buffer.dispatch(calls.x, calls.handle)
    given = {"x": calls.x, "handle": calls.handle, **WRONG_AGAIN[what](calls)}
    text = said_by(lambda: calls.buffer.dispatch(**given), "_fits_again", monkeypatch)
    assert text.startswith("Buffer.dispatch: ")


class LowLatencyCalls(Calls):
    """The same of a buffer in low-latency mode."""

    def __init__(self, stand_ins: StandIns) -> None:
        super().__init__(stand_ins)
        self.buffer = deep_ep.Buffer(stand_ins.group(), low_latency_mode=True)
        self.given = {
            "x": self.x[:FEW], "topk_idx": self.ids[:FEW], "num_max_dispatch_tokens_per_rank": FEW,
            "num_experts": EXPERTS,
        }  # fmt: skip
        self.y = torch.zeros(LOCAL, RANKS * FEW, HIDDEN, dtype=torch.bfloat16)
        self.home = {"topk_idx": self.ids[:FEW], "topk_weights": self.weights[:FEW]}
        self.handle = self.sent()[2]
        self.brought()

    def sent(self, **changes: Any) -> Any:
        return self.buffer.low_latency_dispatch(**{**self.given, **changes})

    def brought(self, **changes: Any) -> Any:
        return self.buffer.low_latency_combine(**{"x": self.y, "handle": self.handle, **self.home, **changes})


@pytest.fixture
def few(stand_ins: StandIns) -> LowLatencyCalls:
    return LowLatencyCalls(stand_ins)


@pytest.mark.parametrize("enabled", [False, True])
def test_later_calls_of_low_latency(few: LowLatencyCalls, enabled: bool) -> None:
    """Also of fewer tokens than before, and with gradients enabled."""
    changes = {"x": few.x[:5].clone().requires_grad_(), "topk_idx": few.ids[:5]}
    home = {name: tensor[:5] for name, tensor in few.home.items()}
    with torch.set_grad_enabled(enabled):
        (rows, scales), counts, handle, event, hook = few.sent(**changes)
        args = few.launched()
        out, _, _ = few.brought(x=few.y.clone().requires_grad_(), handle=handle, **home)
    assert args.num_tokens == 5
    assert [args.out_rows, args.out_scales, args.expert_counts] == [each.data_ptr() for each in (rows, scales, counts)]
    assert (len(handle), handle[2:], event.event, hook) == (5, (FEW, HIDDEN, EXPERTS), None, None)
    assert out.shape == (5, HIDDEN)
    assert not any(each.requires_grad for each in (rows, scales, out))


WRONG_OF_FEW: dict[str, Callable[[LowLatencyCalls], dict[str, Any]]] = {
    "x": lambda few: {"x": few.x[:FEW, :-1]},
    "rows": lambda few: {"x": few.x[None]},
    "ids": lambda few: {"topk_idx": few.ids[:FEW].int()},
    "fewer ids": lambda few: {"topk_idx": few.ids[: FEW - 1]},
    "rows by column": lambda few: {"x": by_column(few.x[:FEW])},
    "ids by column": lambda few: {"topk_idx": by_column(few.ids[:FEW])},
    "ids elsewhere": lambda few: {"topk_idx": few.ids[:FEW].to("meta")},
    "no tensor": lambda few: {"x": None},
    "experts in float": lambda few: {"num_experts": float(EXPERTS)},
    "a number for a flag": lambda few: {"round_scale": 0},
    "a list for a flag": lambda few: {"round_scale": [], "use_ue8m0": True},
    "ids in one dimension": lambda few: {"topk_idx": few.ids[0]},
    "more tokens than the client says": lambda few: {"num_max_dispatch_tokens_per_rank": FEW - 1},
    "more tokens, for which there is room": lambda few: {"x": few.x[:25], "topk_idx": few.ids[:25]},
    "experts": lambda few: {"num_experts": EXPERTS + 1},
    "statistics of costs": lambda few: {"dispatch_wait_recv_cost_stats": few.x},
}


@pytest.mark.parametrize("what", WRONG_OF_FEW)
def test_what_is_wrong_in_low_latency_shows(few: LowLatencyCalls, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a first call; the next one is right again."""
    text = said_by(lambda: few.sent(**WRONG_OF_FEW[what](few)), "_form_at_a_glance", monkeypatch)
    assert text.startswith("Buffer.low_latency_dispatch: ")
    few.stand_ins.settle()
    few.sent()


WRONG_HOME: dict[str, tuple[Callable[[LowLatencyCalls], dict[str, Any]], str]] = {
    "rows": (lambda few: {"x": few.y[:, :-1]}, "x is [4, 79, 256], expected [4, 80, 256]"),
    "rows by column": (lambda few: {"x": by_column(few.y)}, "x has strides (20480, 1, 80), expected contiguous"),
    "ids": (lambda few: {"topk_idx": few.ids}, "topk_idx is [1024, 2], expected [20, 2]"),
    "ids elsewhere": (lambda few: {"topk_idx": few.ids[:FEW].to("meta")}, "topk_idx is on meta, x is on cpu"),
    "weights": (lambda few: {"topk_weights": few.weights}, "topk_weights is [1024, 2], expected [20, 2]"),
    "weights in float64": (
        lambda few: {"topk_weights": few.weights[:FEW].double()}, "topk_weights is torch.float64, expected"
    ),
    "weights by column": (
        lambda few: {"topk_weights": by_column(few.weights[:FEW])},
        "topk_weights has strides (1, 20), expected contiguous; pass topk_weights.contiguous()",
    ),
    "weights elsewhere": (
        lambda few: {"topk_weights": few.weights[:FEW].to("meta")}, "topk_weights is on meta, x is on cpu"
    ),
    "no weights": (lambda few: {"topk_weights": None}, "topk_weights is a NoneType, expected a tensor"),
    "result": (lambda few: {"out": few.x}, "out is [1024, 256], expected [20, 256]"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_HOME)
def test_what_is_wrong_at_home_shows(few: LowLatencyCalls, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a combine in low-latency mode is given."""
    make, said = WRONG_HOME[what]
    text = said_by(lambda: few.brought(**make(few)), "_fits_low_latency_combine", monkeypatch)
    assert text.startswith(f"Buffer.low_latency_combine: {said}")
