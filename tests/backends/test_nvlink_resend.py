"""Other rows by the routes of a dispatch, on backend "nvlink" without a GPU: which calls are right at a glance.

One that passes it wrongly would launch a kernel on wrong tensors, or send rows elsewhere than those of the dispatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.support.stand_ins import StandIns
from tokenloom.backends.peers.backend import NvlinkBackend
from tokenloom.backends.peers.handle import PeerHandle
from tokenloom.comm.calls import ResendCall
from tokenloom.errors import InvalidArgument

HIDDEN, TOP_K, NUM_EXPERTS, LARGE, TOKENS = 256, 2, 8, 1024, 5
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


class ByPlaces(Exception):
    """Rows go one per (token, rank), and from there to places that are found by counts."""


class Calls:
    """A communicator, a dispatch, and how many calls were checked whole."""

    def __init__(self, stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.stand_ins, self.checked = stand_ins, 0
        stand_ins.counts = [3, 3]
        monkeypatch.setattr(ResendCall, "check", self._counted(ResendCall.check))
        positions = PeerHandle.positions

        def look(handle: PeerHandle) -> torch.Tensor:
            if self.launcher.masked:  # which no kernel has left here
                raise ByPlaces
            return positions(handle)

        monkeypatch.setattr(PeerHandle, "positions", look)
        self.comm = self.another()
        self.x, self.ids = torch.randn(TOKENS, HIDDEN, dtype=BF16), torch.zeros(TOKENS, TOP_K, dtype=torch.int64)
        self.routed = self.dispatch(**options)

    def _counted(self, check: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def counted(call: Any) -> Any:
            self.checked += 1
            return check(call)

        return counted

    def another(self) -> tl.Communicator:
        sizes = {"num_experts": NUM_EXPERTS, "hidden": HIDDEN, "top_k": TOP_K, "max_tokens_per_rank": LARGE}
        return tl.Communicator(None, backend="nvlink", device="cpu", **sizes)

    def dispatch(self, **options: Any) -> tl.Routed:
        return self.comm.dispatch(self.x, self.ids, **{"layout": "token", "copy": True, **options})

    def again(self, **changes: Any) -> Any:
        return self.comm.dispatch_again(**{"x": self.x, "routed": self.routed, "copy": "if_needed", **changes})

    @property
    def launcher(self) -> Any:
        return self.stand_ins.launchers[0]


@pytest.fixture
def calls(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls(stand_ins, monkeypatch)
    made.again()
    return made


LAYOUTS: list[dict[str, Any]] = [
    {"layout": "token"},
    {"layout": "expert", "alignment": 8},
    {"layout": "rank"},
    {"layout": "token", "sizes": "bounded", "capacity": 300},
]


@pytest.mark.parametrize("options", LAYOUTS)
@pytest.mark.parametrize("copy", [True, "if_needed"])
@pytest.mark.parametrize("fp8", [False, True])
def test_calls(
    stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], copy: Any, fp8: bool
) -> None:
    """Also by other dispatches of the kind. Each gives what the first does, and tells its own tensors."""
    calls = Calls(stand_ins, monkeypatch, **options)
    for number in range(3):
        x = torch.randn(TOKENS, HIDDEN).to(FP8 if fp8 else BF16)
        scales = torch.ones(TOKENS, HIDDEN // 128)
        found = calls.again(x=(x, scales) if fp8 else x, copy=copy)
        args = stand_ins.launched[-1][1]
        rows, found_scales = found if fp8 else (found, None)
        assert (args.x, args.topk_ids) == (x.data_ptr(), calls.ids.data_ptr())
        assert (args.num_tokens, args.topk_weights) == (TOKENS, 0)
        assert (rows.shape, rows.dtype) == (calls.routed.tokens.shape, x.dtype)
        if found_scales is not None:
            assert args.scales == scales.data_ptr()
            assert found_scales.shape == (*rows.shape[:-1], HIDDEN // 128)
        assert rows.data_ptr() != calls.routed.tokens.data_ptr()
        assert stand_ins.launchers[0].outcomes.in_flight[-1][6], "too many rows were told by the dispatch itself"
        if number:
            calls.routed = calls.dispatch(**options)
        assert not calls.checked
    assert calls.comm.engine.open_calls.count == 6


def after(change: Callable[[Calls], object]) -> Callable[[Calls], dict[str, Any]]:
    def make(calls: Calls) -> dict[str, Any]:
        change(calls)
        return {}

    return make


UNUSUAL: dict[str, tuple[Callable[[Calls], dict[str, Any]], type[Exception] | None]] = {
    "fewer rows": (lambda calls: {"x": calls.x[:-1]}, tl.ShapeMismatch),
    "no dispatch": (lambda calls: {"routed": None}, InvalidArgument),
    "a dispatch of another": (
        lambda calls: {"routed": calls.another().dispatch(calls.x, calls.ids, layout="token", copy=True)},
        InvalidArgument,
    ),
    "a copy of any kind": (lambda calls: {"copy": []}, InvalidArgument),
    "1 for True": (lambda calls: {"copy": 1}, None),
    "ids that changed": (after(lambda calls: calls.ids.fill_(1)), InvalidArgument),
    "ranks that were masked": (after(lambda calls: calls.launcher.leave_out([1])), ByPlaces),
    "ranks that came back": (after(lambda calls: setattr(calls.launcher, "known_from", 10)), InvalidArgument),
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_what_is_unusual(calls: Calls, what: str) -> None:
    """It is checked whole, with the errors of that."""
    changes, error = UNUSUAL[what]
    if error is None:
        calls.again(**changes(calls))
        assert calls.checked
    else:
        with pytest.raises(error):
            calls.again(**changes(calls))


def test_with_gradients(calls: Calls) -> None:
    """Gradients that are enabled beside rows that want none change nothing."""
    with torch.enable_grad():
        calls.again()
    assert not calls.checked


def test_after_growth(calls: Calls) -> None:
    """What was prepared for smaller buffers is used no more."""
    backend: Any = calls.comm.engine._backend
    assert isinstance(backend, NvlinkBackend)
    kept = list(backend._buffers._buffers.values())  # or new ones lie there
    peers = calls.stand_ins.launched[-1][1].peers
    calls.comm.dispatch(calls.x, calls.ids, layout="expert", sizes="bounded", capacity=6000)
    calls.again()
    assert kept
    assert calls.stand_ins.launched[-1][1].peers != peers
