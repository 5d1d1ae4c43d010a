"""What one call of backend "nvlink" asks of the driver and of torch, which is most of what it costs the host.

Each question costs 0.3 to 5 us on a machine with GPUs. A call that asks more than it does here has become slower; one
that asks less should be noted here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.support.stand_ins import StandIns, asked, record_word
from tokenloom.backends.peers.dispatch import DirectDispatch
from tokenloom.backends.peers.outcomes import Outcomes
from tokenloom.errors import PeerError
from tokenloom.runtime.kernel_reports import HostCounts

HIDDEN, INTERMEDIATE, TOP_K, NUM_EXPERTS, NUM_RANKS, TOKENS = 256, 256, 2, 8, 4, 5
SMALL, LARGE = 64, 1024
"""Tokens of a rank: plans of few rows have staged dispatches, whose outputs are ordinary tensors."""
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
OPENED = {"raw stream": 1, "is_current_stream_capturing": 1}
"""What any usual call asks: once each."""


@pytest.fixture
def stand_ins() -> Iterator[StandIns]:
    with StandIns(NUM_RANKS) as made, torch.no_grad():
        yield made


def make_comm(max_tokens: int) -> tl.Communicator:
    sizes = {"num_experts": NUM_EXPERTS, "hidden": HIDDEN, "top_k": TOP_K, "max_tokens_per_rank": max_tokens}
    return tl.Communicator(None, backend="nvlink", device="cpu", **sizes)


KINDS: list[Any] = [
    pytest.param(max_tokens, {"layout": layout, **options}, id=f"{max_tokens}-{layout}{'-fp8' if fp8 else ''}")
    for max_tokens in (SMALL, LARGE)
    for fp8 in (False, True)
    for layout, options in (
        ("token", {"to_fp8": fp8}),
        ("rank", {"to_fp8": fp8}),
        ("expert", {"to_fp8": fp8, "capacity": 300}),
        ("slots", {"to_fp8": fp8, "capacity": 300}),
    )
]


@pytest.mark.parametrize(("max_tokens", "options"), KINDS)
def test_dispatch_and_combine(stand_ins: StandIns, max_tokens: int, options: dict[str, Any]) -> None:
    """One launch, and one allocation for rows: those of direct dispatches lie in receive buffers."""
    comm, layout = make_comm(max_tokens), options["layout"]
    staged = layout in ("expert", "slots") and max_tokens == SMALL
    x, ids = torch.randn(TOKENS, HIDDEN, dtype=BF16), torch.zeros(TOKENS, TOP_K, dtype=torch.int64)
    weights, made = torch.rand(TOKENS, TOP_K), {"launches": 1}
    given = {"sizes": "bounded", **options}
    found = asked(stand_ins, lambda: comm.dispatch(x, ids, weights, **given))
    assert found == OPENED | made | ({"new_empty": 1} if staged else {})
    routed = comm.dispatch(x, ids, weights, **given)
    y = torch.zeros(routed.tokens.shape, dtype=BF16)
    out = torch.empty(TOKENS, HIDDEN, dtype=BF16)
    assert asked(stand_ins, lambda: comm.combine(y, routed)) == OPENED | made | {"new_empty": 1}
    assert asked(stand_ins, lambda: comm.combine(y, routed, out=out)) == OPENED | made


@pytest.mark.parametrize("name", ["num_rows", "expert_counts", "expert_offsets", "source_counts"])
def test_counts(stand_ins: StandIns, name: str) -> None:
    """One view for the one that is asked for, with a version of its own: a kernel of the experts takes it."""
    comm = make_comm(LARGE)
    x, ids = torch.randn(TOKENS, HIDDEN, dtype=BF16), torch.zeros(TOKENS, TOP_K, dtype=torch.int64)
    options: dict[str, Any] = {"sizes": "bounded", "capacity": 300}
    found = asked(stand_ins, lambda: getattr(comm.dispatch(x, ids, **options), name))
    assert found == OPENED | {"launches": 1, "detach": 1, "select" if name == "num_rows" else "slice": 1}


@pytest.mark.parametrize("max_tokens", [SMALL, LARGE])
def test_tokens_in_fp8(stand_ins: StandIns, max_tokens: int) -> None:
    """With scales of their own."""
    comm, ids = make_comm(max_tokens), torch.zeros(TOKENS, TOP_K, dtype=torch.int32)
    x = torch.zeros(TOKENS, HIDDEN).to(FP8), torch.ones(TOKENS, HIDDEN // 128)
    found = asked(stand_ins, lambda: comm.dispatch(x, ids, layout="token", sizes="bounded"))
    assert found == OPENED | {"launches": 1}


@pytest.mark.parametrize(("num_tokens", "kernels"), [(TOKENS, 5), (150, 6)])
@pytest.mark.parametrize("fp8", [False, True])
def test_mega_moe(stand_ins: StandIns, fp8: bool, num_tokens: int, kernels: int) -> None:
    """Five kernels and the result; with many tokens, which have to be packed, six."""
    layer = tl.MegaMoE(
        None, num_experts=NUM_EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE, top_k=TOP_K,
        max_tokens_per_rank=max(SMALL, num_tokens), device="cpu",
    )  # fmt: skip
    local = NUM_EXPERTS // NUM_RANKS
    layer.use_weights(
        torch.zeros(local, 2 * INTERMEDIATE, HIDDEN).to(FP8),
        torch.ones(local, 2 * INTERMEDIATE // 128, HIDDEN // 128),
        torch.zeros(local, HIDDEN, INTERMEDIATE).to(FP8),
        torch.ones(local, HIDDEN // 128, INTERMEDIATE // 128),
    )
    tokens = torch.zeros(num_tokens, HIDDEN, dtype=BF16)
    x: Any = (tokens.to(FP8), torch.ones(num_tokens, HIDDEN // 128)) if fp8 else tokens
    ids, weights = torch.zeros(num_tokens, TOP_K, dtype=torch.int64), torch.rand(num_tokens, TOP_K)
    out = torch.empty(num_tokens, HIDDEN, dtype=BF16)
    launches = {"launches": kernels}
    assert asked(stand_ins, lambda: layer(x, ids, weights)) == OPENED | launches | {"new_empty": 1}
    assert asked(stand_ins, lambda: layer(x, ids, weights, out=out)) == OPENED | launches


def test_tensors_of_the_caller(stand_ins: StandIns) -> None:
    """Where a staged dispatch is given all that its user reads, nothing is allocated."""
    comm = make_comm(SMALL)
    x, ids = torch.randn(TOKENS, HIDDEN, dtype=BF16), torch.zeros(TOKENS, TOP_K, dtype=torch.int64)
    out = tl.DispatchOut(
        tokens=torch.empty(2, 50, HIDDEN, dtype=BF16), expert_counts=torch.empty(2, dtype=torch.int32)
    )
    options: dict[str, Any] = {"layout": "slots", "capacity": 50, "out": out}
    wide = tl.DispatchOut(tokens=torch.empty(2, 20_000, HIDDEN).to(FP8), scales=torch.empty(2, 20_000, HIDDEN // 128))
    quantised: dict[str, Any] = {"layout": "slots", "capacity": 20_000, "to_fp8": True}
    found = asked(stand_ins, lambda: comm.dispatch(x, ids, **quantised))
    assert found == OPENED | {"launches": 1, "new_empty": 1, "empty": 1}, "scales are too large to share memory"
    found = asked(stand_ins, lambda: comm.dispatch(x, ids, **quantised, out=wide))
    assert found == OPENED | {"launches": 1}
    found = asked(stand_ins, lambda: comm.dispatch(x, ids, **options).expert_counts)
    assert found == OPENED | {"launches": 1}


def test_rows_that_are_lent(stand_ins: StandIns) -> None:
    """They cost no copy. While they are held, views cannot take turns in two buffers: calls without copy= copy too."""
    comm, ids = make_comm(LARGE), torch.zeros(TOKENS, TOP_K, dtype=torch.int64)
    x, options = torch.randn(TOKENS, HIDDEN, dtype=BF16), {"layout": "token", "sizes": "bounded"}

    def clones(copy: Any) -> int:
        return asked(stand_ins, lambda: comm.dispatch(x, ids, copy=copy, **options)).get("clone", 0)

    beside = 1  # of the rows: ids, places and weights, in one piece
    assert [clones("if_needed"), clones(False), clones(True)] == [beside, 0, beside + 1]
    held = comm.dispatch(x, ids, copy="if_needed", **options)
    assert [clones("if_needed"), clones(False), clones(True)] == [beside + 1] * 3
    again = comm.dispatch(x, ids, copy="if_needed", **options)
    assert held.tokens.data_ptr() != again.tokens.data_ptr()
    part = held.tokens[:1]
    del held, again
    assert clones(False) == beside + 1, "a view holds them as well"
    del part
    assert [clones("if_needed"), clones(False)] == [beside, 0]


def exact_dispatch(comm: tl.Communicator, layout: str) -> tl.Routed:
    x, ids = torch.randn(TOKENS, HIDDEN, dtype=BF16), torch.zeros(TOKENS, TOP_K, dtype=torch.int64)
    return comm.dispatch(x, ids, layout=layout, copy="if_needed")  # type: ignore[arg-type]


def test_no_rows_hold_no_buffer(stand_ins: StandIns) -> None:
    """Rows are lent before their number is known. Who got none holds nothing."""
    comm = make_comm(LARGE)
    exact_dispatch(comm, "token")
    buffers: Any = comm.engine._backend._buffers  # type: ignore[attr-defined]
    stand_ins.counts = [3, 3]
    some = exact_dispatch(comm, "token")
    assert some.tokens.shape == (3, HIDDEN)
    assert buffers.any_lent
    del some
    stand_ins.counts = []
    none = exact_dispatch(comm, "token")
    assert none.tokens.shape == (0, HIDDEN)
    assert not buffers.any_lent


def test_an_error_that_is_kept_keeps_no_rows(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the frames that it came through, and with them what they know."""
    comm = make_comm(LARGE)
    exact_dispatch(comm, "expert")
    monkeypatch.setattr(Outcomes, "await_counts", lambda *arguments: None)
    monkeypatch.setattr(
        DirectDispatch, "_settled", lambda *arguments: (_ for _ in ()).throw(PeerError(1, "bad input"))
    )
    with pytest.raises(PeerError) as kept:
        exact_dispatch(comm, "expert")
    assert not comm.engine._backend._buffers.any_lent  # type: ignore[attr-defined]
    assert kept.value.rank == 1


def test_too_many_rows_for_a_loan(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused dispatch is made again by token, in the same buffer: it must not be lent for the refused rows."""
    comm = make_comm(LARGE)
    exact_dispatch(comm, "expert")
    (launcher,) = stand_ins.launchers

    def overflow(counts: HostCounts, look: object) -> list[int]:
        for word, value in enumerate((9, 8)):
            launcher.outcomes._records._words[record_word(launcher._num_launches - 1, word)] = value
        return [0] * 50

    class MadeAgain(Exception):
        pass

    def receive_by_token(dispatch: DirectDispatch, *arguments: Any) -> Any:
        assert not dispatch._buffers.any_lent
        raise MadeAgain

    monkeypatch.setattr(HostCounts, "wait", overflow)
    monkeypatch.setattr(DirectDispatch, "_receive_by_token", receive_by_token)
    with pytest.raises(MadeAgain):
        exact_dispatch(comm, "expert")
