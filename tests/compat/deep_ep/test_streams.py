"""Calls read and write tensors on the stream where they run, and say what they read.

What were made before a call, its stream would not wait for. What were made after it, its event would not cover.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.compat.deep_ep.test_host_cost import EXPERTS, HIDDEN, LOCAL, RANKS, TOKENS, TOP_K, VIEWS, tokens_of
from tests.support.stand_ins import StandIns
from tokenloom.compat import deep_ep
from tokenloom.compat.deep_ep.streams import CommStream
from tokenloom.runtime.streams import tensors_in

RECEIVED = 40
"""Rows that the stand-in says have come."""


class Watched(CommStream):
    """Notes what calls say that they read, and when they run."""

    runs = False
    inputs: tuple[object, ...] = ()

    def run(self, call: Callable[[], Any], inputs: tuple[object, ...], *streams: Any) -> Any:
        self.runs, self.inputs = True, inputs
        try:
            return super().run(call, inputs, *streams)
        finally:
            self.runs = False


class Outside(TorchDispatchMode):
    """Collects operations that are no views, outside of calls on a stream."""

    def __init__(self, stream: Watched) -> None:
        super().__init__()
        self._stream, self.found = stream, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if not self._stream.runs and name not in (*VIEWS, "t"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def watched(buffer: Any, *reads: torch.Tensor) -> Iterator[None]:
    """Inside, one call of the buffer reads these tensors, and does nothing outside of its stream."""
    buffer._stream = stream = Watched()
    with Outside(stream) as outside:
        yield
    assert outside.found == []
    said = {each.untyped_storage().data_ptr() for each in tensors_in(stream.inputs)}
    missing = [list(each.shape) for each in reads if each.untyped_storage().data_ptr() not in said]
    assert missing == [], "their memory could be used anew while the call reads it"


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIns]:
    monkeypatch.setattr(deep_ep.Buffer, "_is_mask", lambda *arguments: True)  # on CPUs alone
    monkeypatch.setattr(deep_ep.Buffer, "_local_counts", lambda *arguments: [1] * LOCAL)
    with StandIns(RANKS) as made, torch.no_grad():
        made.counts = [RECEIVED, *[10] * RANKS, *[10] * LOCAL, *range(0, 50, 10)]
        yield made


def asynchronous() -> dict[str, Any]:
    return {"previous_event": deep_ep.EventOverlap(deep_ep.EventHandle()), "async_finish": True}


def by_column(scales: torch.Tensor) -> torch.Tensor:
    return scales.t().contiguous().t()


def laid_out(buffer: deep_ep.Buffer, ids: torch.Tensor) -> dict[str, Any]:
    per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    return {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": mask}


def test_normal_dispatch(stand_ins: StandIns) -> None:
    """Scales by column are copied, by the call itself; the same with a handle."""
    _, (x, scales), ids, weights = tokens_of(TOKENS)
    buffer = deep_ep.Buffer(stand_ins.group())
    given = (x, by_column(scales))
    routes: dict[str, Any] = laid_out(buffer, ids) | {"topk_idx": ids, "topk_weights": weights}
    with watched(buffer, *given, ids, weights):
        handle = buffer.dispatch(given, **routes, **asynchronous())[4]
    with watched(buffer, *given):
        buffer.dispatch(given, handle=handle, **asynchronous())


def test_ranks_without_ids(stand_ins: StandIns) -> None:
    """Ids are made from the mask, by the call itself."""
    x, _, ids, _ = tokens_of(TOKENS)
    buffer = deep_ep.Buffer(stand_ins.group())
    layout = laid_out(buffer, ids)
    with watched(buffer, x, layout["is_token_in_rank"]):
        buffer.dispatch(x, **layout, **asynchronous())


def test_normal_combine(stand_ins: StandIns) -> None:
    """Rows that the client cut off are put back, by the call itself."""
    x, _, ids, weights = tokens_of(TOKENS)
    buffer = deep_ep.Buffer(stand_ins.group())
    routes: dict[str, Any] = laid_out(buffer, ids) | {"topk_idx": ids, "topk_weights": weights}
    y, _, row_weights, _, handle, _ = buffer.dispatch(x, **routes, num_worst_tokens=RANKS * TOKENS)
    assert isinstance(y, torch.Tensor)
    assert row_weights is not None
    reads = (y[:RECEIVED], row_weights[:RECEIVED], torch.zeros_like(x))
    with watched(buffer, *reads):
        buffer.combine(reads[0], handle, reads[1], bias=reads[2], **asynchronous())


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("sync", [False, True])
def test_elastic(stand_ins: StandIns, sync: bool, expanded: bool) -> None:
    """Scales are laid out, and counts are added, by the call itself; also with a handle, and in combine."""
    _, (x, scales), ids, weights = tokens_of(TOKENS)
    buffer = deep_ep.ElasticBuffer(stand_ins.group(), num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOP_K)
    given, stats = (x, by_column(scales)), torch.zeros(LOCAL, dtype=torch.int32)
    streams: dict[str, Any] = {
        "previous_event": deep_ep.EventOverlap(deep_ep.EventHandle()), "async_with_compute_stream": True
    }  # fmt: skip
    options: dict[str, Any] = streams | {
        "cumulative_local_expert_recv_stats": stats, "do_expand": expanded, "use_tma_aligned_col_major_sf": True
    }  # fmt: skip
    with watched(buffer, *given, ids, weights, stats):
        received, _, _, handle, _ = buffer.dispatch(
            given, ids, weights, num_experts=EXPERTS, do_cpu_sync=sync, **options
        )
    assert isinstance(received, tuple)
    assert received[1].stride(0) == 1
    with watched(buffer, *given, stats):
        again = buffer.dispatch(given, handle=handle, **options)[0]
    assert isinstance(again, tuple)
    assert again[1].stride(0) == 1
    reads: Sequence[torch.Tensor] = (
        torch.zeros(received[0].shape, dtype=torch.bfloat16), torch.zeros(len(received[0]), *[TOP_K][: not expanded])
    )  # fmt: skip
    if not sync:
        reads = [each[:RECEIVED] for each in reads]
    with watched(buffer, *reads):
        buffer.combine(reads[0], handle, reads[1], **streams)
