"""How many SMs kernels take, as clients say or upstream has it. The launches go to stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.stand_ins import StandIns
from tokenloom.comm import communicators_by_shape
from tokenloom.compat import deep_ep
from tokenloom.compat.deep_ep.faults import BadCall
from tokenloom.errors import PeerError, ShapeMismatch

RANKS, EXPERTS, TOP_K, HIDDEN, TOKENS = 4, 16, 2, 256, 32
MOST = 64


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIns]:
    monkeypatch.setattr(deep_ep.Buffer, "num_sms", deep_ep.Buffer.num_sms)  # restored afterwards
    monkeypatch.setattr(deep_ep.Buffer, "_is_mask", lambda *arguments: True)
    with StandIns(RANKS) as made, torch.no_grad():
        made.counts = [40, *[10] * RANKS, *[10] * (EXPERTS // RANKS), *range(0, 50, 10)]
        yield made


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.zeros(TOKENS, TOP_K, dtype=torch.int64)
    ids[:, 1] = 5
    return torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16), ids, torch.rand(TOKENS, TOP_K)


def dispatch(buffer: deep_ep.Buffer) -> None:
    x, ids, weights = tensors()
    per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    layout: dict[str, Any] = {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_expert": per_expert,
        "is_token_in_rank": mask,
    }
    buffer.dispatch(x, **layout, topk_idx=ids, topk_weights=weights)


def sms_of_last(stand_ins: StandIns) -> int:
    return stand_ins.launchers[-1].num_sms


def test_normal_mode_takes_what_the_class_says(stand_ins: StandIns) -> None:
    for bad in (3, 0, -2):
        with pytest.raises(AssertionError, match="set_num_sms"):
            deep_ep.Buffer.set_num_sms(bad)
    dispatch(deep_ep.Buffer(stand_ins.group()))
    assert sms_of_last(stand_ins) == 20
    before = deep_ep.Buffer(stand_ins.group())
    for chosen, taken in ((24, 24), (96, MOST)):
        deep_ep.Buffer.set_num_sms(chosen)
        assert deep_ep.Buffer.num_sms == chosen
        dispatch(deep_ep.Buffer(stand_ins.group()))
        assert sms_of_last(stand_ins) == taken
    dispatch(before)
    assert sms_of_last(stand_ins) == 20, "as it was made"


def test_low_latency_mode_takes_all_beside_normal_mode(stand_ins: StandIns) -> None:
    buffer = deep_ep.Buffer(stand_ins.group(), 0, 1 << 20, low_latency_mode=True)
    x, ids, _ = tensors()
    buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS)
    assert sms_of_last(stand_ins) == MOST
    dispatch(buffer)
    assert sms_of_last(stand_ins) == 20


def test_a_fault_is_told_where_the_others_make_the_call(stand_ins: StandIns) -> None:
    """Of the two communicators of a buffer: that of the mode, whatever was used last."""
    buffer = deep_ep.Buffer(stand_ins.group(), 0, 1 << 20, low_latency_mode=True)
    x, ids, _ = tensors()
    buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS)
    dispatch(buffer)
    few, many = stand_ins.launchers
    assert (few.num_sms, many.num_sms) == (MOST, 20)
    before = few.num_calls, many.num_calls
    with pytest.raises(ShapeMismatch):
        buffer.low_latency_dispatch(x, ids, TOKENS - 1, EXPERTS)
    assert (few.num_calls, many.num_calls) == (before[0] + 1, before[1])
    buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS)
    before = few.num_calls, many.num_calls
    with pytest.raises(BadCall):
        buffer.dispatch(x)
    assert (few.num_calls, many.num_calls) == (before[0], before[1] + 1)


def test_a_call_that_fails_was_the_last(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks make it, and tell later faults where it was made."""
    buffer = deep_ep.Buffer(stand_ins.group(), 0, 1 << 20, low_latency_mode=True)
    x, ids, _ = tensors()
    for _ in range(2):
        buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS)
    other = (x[:, :128].contiguous(), ids, TOKENS, EXPERTS)
    buffer.low_latency_dispatch(*other)
    comm = next(iter(buffer.runtime.all()))

    def fail(*arguments: Any, **options: Any) -> Any:
        raise PeerError(1, "it has a fault")

    monkeypatch.setattr(comm, "dispatch", fail)
    with pytest.raises(PeerError):
        buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS)
    assert buffer.runtime._last.plan.hidden == HIDDEN


def test_what_cannot_be_looked_up_is_named(stand_ins: StandIns) -> None:
    buffer = deep_ep.Buffer(stand_ins.group(), 0, 1 << 20, low_latency_mode=True)
    x, ids, _ = tensors()
    with pytest.raises(BadCall, match="num_experts is"):
        buffer.low_latency_dispatch(x, ids, TOKENS, [EXPERTS])  # type: ignore[arg-type]


def test_fewer_sms_where_a_rank_may_use_no_more(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    """An MPS limit, say. Whoever names a number has it, or an error."""
    monkeypatch.setattr(communicators_by_shape, "_usable_sms", lambda device: 26)
    x, ids, weights = tensors()
    buffer = deep_ep.Buffer(stand_ins.group(), 0, 1 << 20, low_latency_mode=True)
    buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS)
    assert sms_of_last(stand_ins) == 26
    elastic = deep_ep.ElasticBuffer(stand_ins.group(), num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOP_K)
    elastic.dispatch(x, ids, weights, num_experts=EXPERTS, do_cpu_sync=False)
    assert sms_of_last(stand_ins) == 26
    dispatch(buffer)
    assert sms_of_last(stand_ins) == 20


def test_elastic_buffers_take_what_they_tell(stand_ins: StandIns) -> None:
    x, ids, weights = tensors()
    buffer = deep_ep.ElasticBuffer(stand_ins.group(), num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOP_K)
    handle = buffer.dispatch(x, ids, weights, num_experts=EXPERTS, do_cpu_sync=False)[3]
    assert sms_of_last(stand_ins) == handle.num_sms == buffer.get_theoretical_num_sms(EXPERTS, TOP_K) == MOST


@pytest.mark.parametrize(
    ("options", "sms"),
    [
        ({}, 24),
        ({"num_sms_dispatch_api": 8, "num_sms_combine_api": 16}, 16),
        ({"num_sms_dispatch_api": 8}, 8),
        ({"num_sms_combine_api": 96}, MOST),
    ],
)
def test_hybrid_buffers_take_the_most_that_is_named(stand_ins: StandIns, options: dict[str, int], sms: int) -> None:
    x, ids, weights = tensors()
    buffer = deep_ep.HybridEPBuffer(stand_ins.group(), HIDDEN, TOKENS, EXPERTS // RANKS, **options)
    buffer.dispatch_with_permute(hidden=x, topk_idx=ids, topk_weights=weights, num_of_experts=EXPERTS)
    assert sms_of_last(stand_ins) == sms
