"""What one call through the names of deep_ep asks of the driver and of torch, from its third time on, and its way.

On a GPU each operation that is no view is a kernel besides, of 3 to 10 us. What is behind the launch in a call whose
counts the host reads costs little: the kernel runs meanwhile. A call that asks more than here, or passes more of the
package's functions, has become slower; one that asks or passes less should be noted here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.python_calls import way_of
from tests.support.stand_ins import StandIns, asked
from tokenloom.compat import deep_ep

RANKS, EXPERTS, TOP_K, HIDDEN, TOKENS, FEW = 4, 16, 2, 256, 1024, 32
LOCAL = EXPERTS // RANKS
VIEWS = ("slice", "select", "view", "detach", "transpose", "as_strided")
"""Operations that launch nothing."""
LAUNCHED = {"launches": 1}
READS = {"reads of counts": 1}
KEPT = {"clone": 2}
"""Copies of the ids, which the caller may change, and of what lies beside the rows."""


@pytest.fixture
def stand_ins() -> Iterator[StandIns]:
    with StandIns(RANKS) as made, torch.no_grad():
        made.counts = [40, *[10] * RANKS, *[10] * LOCAL, *range(0, 50, 10)]
        yield made


def cost(stand_ins: StandIns, call: Callable[[], Any]) -> dict[str, int]:
    """What a call asks, but for views and questions about streams."""
    found = asked(stand_ins, call)
    questions = ("raw stream", "is_current_stream_capturing", "current_stream")
    return {name: number for name, number in found.items() if name not in (*VIEWS, *questions)}


def way(stand_ins: StandIns, call: Callable[[], Any]) -> tuple[int, int]:
    """Calls of the package's functions, and their files, that a later call passes, as in test_python_calls.py."""
    for _ in range(3):
        call()
        stand_ins.settle()
    found = way_of(call)
    stand_ins.settle()
    return found.calls, len(found.files)


def tokens_of(number: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]:
    """BF16 rows, FP8 rows with scales, ids, weights."""
    x, ids = torch.zeros(number, HIDDEN, dtype=torch.bfloat16), torch.zeros(number, TOP_K, dtype=torch.int64)
    ids[:, 1] = 5
    return x, (x.to(torch.float8_e4m3fn), torch.ones(number, HIDDEN // 128)), ids, torch.rand(number, TOP_K)


@pytest.mark.parametrize("fp8", [False, True])
def test_normal_dispatch(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch, fp8: bool) -> None:
    """No copy of rows: they lie where they arrived. With a handle nothing but the launch, and no host read."""
    monkeypatch.setattr(deep_ep.Buffer, "_is_mask", lambda *arguments: True)  # on CPUs alone
    x, quantised, ids, weights = tokens_of(TOKENS)
    given: Any = quantised if fp8 else x
    buffer = deep_ep.Buffer(stand_ins.group())
    per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    layout: dict[str, Any] = {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_expert": per_expert,
        "is_token_in_rank": mask,
    }
    routes: dict[str, Any] = {"topk_idx": ids, "topk_weights": weights}
    found = cost(stand_ins, lambda: buffer.dispatch(given, **layout, **routes))
    assert found == LAUNCHED | READS | KEPT | {"_to_copy": 1}, "received ids are int64 for the client"
    handle = buffer.dispatch(given, **layout, **routes)[4]
    assert cost(stand_ins, lambda: buffer.dispatch(given, handle=handle)) == LAUNCHED
    held = buffer.dispatch(given, **layout, **routes)
    found = cost(stand_ins, lambda: buffer.dispatch(given, **layout, **routes))
    assert found["clone"] == KEPT["clone"] + 1 + fp8, "rows and scales are copied while others are held"
    y = torch.zeros(40, HIDDEN, dtype=torch.bfloat16)
    assert cost(stand_ins, lambda: buffer.combine(y, held[4])) == LAUNCHED | {"new_empty": 1}


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("reads", [False, True])
def test_expanded_dispatch(stand_ins: StandIns, reads: bool, fp8: bool) -> None:
    """A second, small kernel puts weights beside the rows, into zeros."""
    x, quantised, ids, weights = tokens_of(TOKENS)
    buffer = deep_ep.ElasticBuffer(stand_ins.group(), num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOP_K)
    options: dict[str, Any] = {"num_experts": EXPERTS, "do_expand": True, "expert_alignment": 8}
    given: Any = quantised if fp8 else x
    found = cost(stand_ins, lambda: buffer.dispatch(given, ids, weights, do_cpu_sync=reads, **options))
    assert found == KEPT | {"launches": 2, "new_zeros": 1} | (READS if reads else {})
    rows, _, _, handle, _ = buffer.dispatch(x, ids, weights, do_cpu_sync=reads, **options)
    assert cost(stand_ins, lambda: buffer.combine(rows, handle)) == LAUNCHED | {"new_empty": 1}


def test_permuted_dispatch(stand_ins: StandIns) -> None:
    """As the expanded one, with counts for the host."""
    x, _, ids, weights = tokens_of(TOKENS)
    buffer = deep_ep.HybridEPBuffer(stand_ins.group(), HIDDEN, TOKENS, LOCAL)
    routes: dict[str, Any] = {
        "topk_idx": ids, "topk_weights": weights, "num_of_experts": EXPERTS, "pad_multiple": 8
    }  # fmt: skip
    found = cost(stand_ins, lambda: buffer.dispatch_with_permute(hidden=x, **routes))
    assert found == READS | KEPT | {"launches": 2, "new_zeros": 1, "lift_fresh": 1}
    rows, *_, handle = buffer.dispatch_with_permute(hidden=x, **routes)
    found = cost(stand_ins, lambda: buffer.combine_with_unpermute(hidden=rows, handle=handle, pad_multiple=8))
    assert found == LAUNCHED | {"new_empty": 1}


def test_low_latency(stand_ins: StandIns) -> None:
    """Tensors for the client, and one launch each way."""
    x, _, ids, weights = tokens_of(FEW)
    buffer = deep_ep.Buffer(stand_ins.group(), low_latency_mode=True)

    def dispatch(use_fp8: bool = True) -> Any:
        return buffer.low_latency_dispatch(x, ids, FEW, EXPERTS, use_fp8=use_fp8)

    assert cost(stand_ins, dispatch) == LAUNCHED | {"empty": 2, "empty_strided": 1}
    assert cost(stand_ins, lambda: dispatch(False)) == LAUNCHED | {"empty": 2}
    handle, out = dispatch()[2], torch.empty_like(x)
    y = torch.zeros(LOCAL, RANKS * FEW, HIDDEN, dtype=torch.bfloat16)
    found = cost(stand_ins, lambda: buffer.low_latency_combine(y, ids, weights, handle, out=out))
    assert found == LAUNCHED
    found = cost(stand_ins, lambda: buffer.low_latency_combine(y, ids, weights, handle))
    assert found == LAUNCHED | {"new_empty": 1}


def test_way_of_normal_mode(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_ep.Buffer, "_is_mask", lambda *arguments: True)  # on CPUs alone
    x, quantised, ids, weights = tokens_of(TOKENS)
    buffer = deep_ep.Buffer(stand_ins.group())
    per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    given: dict[str, Any] = {
        "num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": mask,
        "topk_idx": ids, "topk_weights": weights,
    }  # fmt: skip
    assert way(stand_ins, lambda: buffer.dispatch(x, **given)) == (125, 30)
    assert way(stand_ins, lambda: buffer.dispatch(quantised, **given)) == (131, 30)
    handle, y = buffer.dispatch(x, **given)[4], torch.zeros(40, HIDDEN, dtype=torch.bfloat16)
    assert way(stand_ins, lambda: buffer.dispatch(x, handle=handle)) == (78, 26)
    assert way(stand_ins, lambda: buffer.combine(y, handle)) == (34, 22)


def test_way_of_low_latency_mode(stand_ins: StandIns) -> None:
    x, _, ids, weights = tokens_of(FEW)
    buffer = deep_ep.Buffer(stand_ins.group(), low_latency_mode=True)
    assert way(stand_ins, lambda: buffer.low_latency_dispatch(x, ids, FEW, EXPERTS)) == (50, 24)
    handle = buffer.low_latency_dispatch(x, ids, FEW, EXPERTS)[2]
    y = torch.zeros(LOCAL, RANKS * FEW, HIDDEN, dtype=torch.bfloat16)
    assert way(stand_ins, lambda: buffer.low_latency_combine(y, ids, weights, handle)) == (43, 22)


def test_way_of_rows_by_expert(stand_ins: StandIns) -> None:
    x, _, ids, weights = tokens_of(TOKENS)
    elastic = deep_ep.ElasticBuffer(stand_ins.group(), num_max_tokens_per_rank=TOKENS)
    options: dict[str, Any] = {"num_experts": EXPERTS, "do_expand": True, "do_cpu_sync": False}
    assert way(stand_ins, lambda: elastic.dispatch(x, ids, weights, **options)) == (145, 31)
    rows, _, _, handle, _ = elastic.dispatch(x, ids, weights, **options)
    assert way(stand_ins, lambda: elastic.combine(rows, handle)) == (35, 22)
    hybrid = deep_ep.HybridEPBuffer(stand_ins.group(), HIDDEN, TOKENS, LOCAL)
    given: dict[str, Any] = {"hidden": x, "topk_idx": ids, "topk_weights": weights}
    assert way(stand_ins, lambda: hybrid.dispatch_with_permute(**given)) == (155, 31)
    rows, *_, permuted = hybrid.dispatch_with_permute(**given)
    assert way(stand_ins, lambda: hybrid.combine_with_unpermute(hidden=rows, handle=permuted)) == (47, 24)
