"""Backend "nvlink": what a handle remembers of the caller's ids, which routes of backward and of per_route go by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tokenloom as tl
from tokenloom.backends.peers.handle import PeerHandle, ResultsLayout, rows_without_sources
from tokenloom.backends.seam import DispatchOptions
from tokenloom.plan import Plan

PLAN = Plan(1, 4, 128, 2, 3)
LAUNCHER: Any = SimpleNamespace(ranks=SimpleNamespace(rank=0), masked=frozenset())


def handle_of(ids: torch.Tensor) -> PeerHandle:
    """Of a dispatch of these ids; the rest does not matter."""
    options = DispatchOptions("expert", 1, "bounded", 3)
    more = {"row_places": 0, "row_tokens": 0}
    results = ResultsLayout(PLAN, LAUNCHER, options, 3, more, with_weights=False, with_scales=False)
    words = torch.zeros(results.words(len(ids)), dtype=torch.int32)
    return PeerHandle(results, (words, 0, words.data_ptr()), 0, len(ids), ids)


CHANGES = {
    "one place": lambda ids: ids[0].fill_(-1),
    "a view": lambda ids: ids.view(-1)[1:2].zero_(),
    "a copy into it": lambda ids: ids.copy_(ids.clone()),
    "out=": lambda ids: torch.add(ids, 0, out=ids),
}


@pytest.mark.parametrize("change", CHANGES)
def test_ids_changed_in_place(change: str) -> None:
    """Routes would go elsewhere than their rows did, and gradients would be wrong without a word."""
    ids = torch.arange(6, dtype=torch.int64).view(3, 2)
    handle = handle_of(ids)
    assert handle.ids() is ids
    CHANGES[change](ids)
    with pytest.raises(
        tl.InvalidArgument, match=r"topk_ids was changed in place after its dispatch.*dispatch a clone"
    ):
        handle.ids()


def test_ids_that_were_changed_before() -> None:
    """What counts is the time of the dispatch."""
    ids = torch.zeros(3, 2, dtype=torch.int32)
    ids.fill_(1)
    handle = handle_of(ids)
    _ = ids + 1
    assert handle.ids() is ids


def test_ids_of_inference_mode() -> None:
    """torch counts no changes there, and nothing has a backward: they are taken as they are."""
    with torch.inference_mode():
        ids = torch.zeros(3, 2, dtype=torch.int32)
        handle = handle_of(ids)
        ids.fill_(1)
        assert handle.ids() is ids


@pytest.mark.parametrize("first", [0, 1])
def test_ids_that_were_replaced(first: int) -> None:
    """Changes before that do not count, also where kernels cannot read the new ones in place. Those behind it do."""
    handle = handle_of(torch.zeros(3, 2, dtype=torch.int32))
    ids = torch.zeros(7, dtype=torch.int32)[first : first + 6].view(3, 2).add_(1)
    handle.use_ids(ids)
    found = handle.ids()
    assert torch.equal(found, ids)
    found.add_(1)
    with pytest.raises(tl.InvalidArgument, match="topk_ids was changed in place after its dispatch"):
        handle.ids()


def test_rows_of_ranks_that_are_gone() -> None:
    """Where rows came from three ranks, and now from two, those of the third keep their places, as zeros."""
    received, max_tokens = torch.tensor([2, 1, 2]), 3
    rows = torch.arange(1.0, 10.0)[:, None]  # [W * M, 1], whatever lies where no row came
    found = rows_without_sources(rows, received, max_tokens, {1})
    assert found[:, 0].tolist() == [1, 2, 0, 7, 8, 0, 0, 0, 0]
