"""Weights that come home beside their dispatch, without a GPU: what a later call checks, and launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.support.stand_ins import StandIns, record_word
from tokenloom.backends.peers.outcomes import CALLS_IN_FLIGHT
from tokenloom.comm.calls import ValuesHomeCall
from tokenloom.errors import CapacityOverflow, InvalidArgument

HIDDEN, NUM_EXPERTS, LARGE, TOKENS, ROWS = 256, 8, 1024, 5, 3


class Calls:
    """A communicator, a dispatch whose weights came home once, and how many calls were checked whole since."""

    def __init__(self, stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch, top_k: int) -> None:
        self.stand_ins, self.checked, self.top_k = stand_ins, 0, top_k
        stand_ins.counts = [ROWS, ROWS]
        monkeypatch.setattr(ValuesHomeCall, "check", self._counted(ValuesHomeCall.check))
        sizes = {"num_experts": NUM_EXPERTS, "hidden": HIDDEN, "top_k": top_k, "max_tokens_per_rank": LARGE}
        self.comm = tl.Communicator(None, backend="nvlink", device="cpu", **sizes)
        self.x, self.ids = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16), torch.zeros(TOKENS, top_k).long()
        self.values, self.routed = torch.rand(ROWS, top_k), self.dispatch()
        self.home()
        self.checked = 0

    def _counted(self, check: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def counted(call: Any) -> Any:
            self.checked += 1
            return check(call)

        return counted

    def dispatch(self) -> tl.Routed:
        return self.comm.dispatch(self.x, self.ids, layout="token", copy=True)

    def home(self, **changes: Any) -> torch.Tensor:
        return self.comm.combine_weights(**{"values": self.values, "routed": self.routed, **changes})


@pytest.fixture(params=[2, 8])
def calls(request: pytest.FixtureRequest, stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Rows of 8 values, as wide as 8 weights."""
    return Calls(stand_ins, monkeypatch, request.param)


def test_later_weights(calls: Calls) -> None:
    """Of the same dispatch, and of another one: one launch each."""
    launched = len(calls.stand_ins.launched)
    for number in (1, 3):
        home = calls.home()
        args = calls.stand_ins.launched[-1][1]
        assert home.shape == (TOKENS, calls.top_k)
        assert home.is_contiguous()
        assert (args.y == calls.values.data_ptr()) is (calls.top_k == 8)
        assert args.num_tokens == TOKENS
        assert len(calls.stand_ins.launched) == launched + number
        calls.routed = calls.dispatch()
    assert not calls.checked


def test_views_outlive_weights(calls: Calls) -> None:
    """Weights that travel by themselves have receive buffers of their own: rows of a dispatch stay where they are."""
    routed = calls.comm.dispatch(calls.x, calls.ids, layout="token", sizes="bounded")
    for _ in range(3):
        calls.comm.reweighted(routed, torch.rand(TOKENS, calls.top_k))
    assert calls.comm.combine(routed.tokens, routed).shape == calls.x.shape


WRONG: dict[str, Callable[[Calls], dict[str, Any]]] = {
    "fewer values": lambda calls: {"values": calls.values[:-1]},
    "narrow values": lambda calls: {"values": calls.values[:, :1].contiguous()},
    "values by column": lambda calls: {"values": calls.values.T.contiguous().T},
    "wide values": lambda calls: {"values": calls.values.double()},
    "a list": lambda calls: {"values": calls.values.tolist()},
    "no dispatch": lambda calls: {"routed": None},
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong(calls: Calls, what: str) -> None:
    """It raises what it does the first time; the next call is right at a glance."""
    with pytest.raises(tl.TokenloomError):
        calls.home(**WRONG[what](calls))
    calls.stand_ins.settle()
    checked = calls.checked
    calls.home()
    assert calls.checked == checked == 1


def test_where_no_weights_travel_apart(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused though all is right with them."""
    backend: Any = calls.comm.engine._backend
    monkeypatch.setattr(backend, "capabilities", replace(backend.capabilities, weights_apart=False))
    with pytest.raises(InvalidArgument, match="weights travel with rows only"):
        calls.home()


def test_with_gradients(calls: Calls) -> None:
    """Values that want one raise, and others have none."""
    with torch.enable_grad():
        assert not calls.home().requires_grad
        with pytest.raises(tl.NotDifferentiable):
            calls.home(values=calls.values.requires_grad_())


def test_what_earlier_calls_left(calls: Calls) -> None:
    """All ranks raise it at the same point, whichever way they take: before the weights are sent."""
    launcher = calls.stand_ins.launchers[0]
    overflowed = launcher._num_launches
    bounded: dict[str, Any] = {"layout": "token", "sizes": "bounded"}
    for _ in range(CALLS_IN_FLIGHT + 1):
        calls.comm.dispatch(calls.x, calls.ids, **bounded)
    calls.stand_ins.settle()
    for word, value in enumerate((9, 8)):
        launcher.outcomes._records._words[record_word(overflowed, word)] = value
    launched = len(calls.stand_ins.launched)
    with pytest.raises(CapacityOverflow):
        calls.home()
    assert len(calls.stand_ins.launched) == launched
