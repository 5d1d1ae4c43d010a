"""Running counts of routes to experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.on_ranks import on_ranks
from tokenloom.comm import expert_stats
from tokenloom.runtime.processes import RankContext


def ids_of(*rows: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(rows, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts_by_hand(dtype: torch.dtype) -> None:
    """Several batches add up, repeated experts count twice, and an empty batch not at all. Ids of -1 are places
    without a route; ids beyond the experts are an error of the dispatch, and must not end a process on a GPU here."""
    stats = tl.ExpertStats(4)
    for rows in ([[0, 1], [1, -1]], [[3, 3], [4, -7]], []):
        stats.add(torch.tensor(rows, dtype=dtype))
    counts = stats.counts()
    assert counts.dtype == torch.int64
    assert counts.tolist() == [1, 2, 0, 2]
    counts.zero_()
    assert stats.counts().tolist() == [1, 2, 0, 2], "counts() is a copy"
    stats.reset()
    assert stats.counts().tolist() == [0] * 4


def test_decay_by_hand() -> None:
    """Each add keeps half of what was there before it."""
    stats = tl.ExpertStats(3, decay=0.5)
    for row in ([0, 0, 1], [1, -1, 1], [2, 2, 2]):
        stats.add(ids_of(row))
    assert stats.counts().tolist() == [0.5, 1.25, 3.0]
    assert stats.counts().dtype == torch.float64


def test_max_vio_by_hand() -> None:
    """Largest over mean, less 1: even, one expert takes all, nothing counted."""
    for counts, expected in (([2, 2, 2, 2], 0.0), ([0, 8, 0, 0], 3.0), ([0, 0, 0, 0], 0.0), ([1, 3], 0.5)):
        found = expert_stats.max_vio(torch.tensor(counts))
        assert (found.dtype, float(found)) == (torch.float64, expected)
    stats = tl.ExpertStats(4)
    stats.add(ids_of([0, 1, 1, -1]))
    assert float(stats.max_vio()) == pytest.approx(2 / 0.75 - 1)
    assert stats.sum_over_ranks().tolist() == [1, 2, 0, 0], "alone, without torch.distributed"


@on_ranks
def test_sums_are_alike_on_all_ranks(context: RankContext) -> None:
    """Over a communicator and over a group: rank r counted expert r twice, and expert 0 once more."""
    num_ranks = context.num_ranks
    options: dict[str, Any] = {"top_k": 1, "max_tokens_per_rank": 4, "hidden": 16, "device": context.device}
    expected = [2.0] * num_ranks + [0.0]
    expected[0] += num_ranks
    with tl.Communicator(context.group, num_experts=3 * num_ranks, **options) as comm:
        for decay in (None, 0.5):
            stats = tl.ExpertStats(num_ranks + 1, device=context.device, decay=decay)
            stats.add(ids_of([context.rank, context.rank, 0]).to(context.device))
            assert stats.sum_over_ranks(context.group).tolist() == expected
            with pytest.raises(
                tl.ShapeMismatch, match=rf"of {num_ranks + 1} experts, the communicator .*pass num_exp"
            ):
                stats.sum_over_ranks(comm)
        stats = tl.ExpertStats(3 * num_ranks, device=context.device)
        stats.add(ids_of([context.rank, context.rank, 0]).to(context.device))
        with pytest.raises(tl.InvalidArgument, match=r"ranks is a str, expected a tokenloom\.Communicator"):
            stats.sum_over_ranks("all")  # type: ignore[arg-type]
        assert stats.sum_over_ranks(comm).tolist() == expected[:-1] + [0] * (2 * num_ranks)
        assert int(stats.counts().sum()) == 3, "own counts stay own"


def counts_of_replays(context: RankContext, decay: float | None) -> list[float]:
    stats = tl.ExpertStats(3, device=context.device, decay=decay)
    ids = torch.zeros(2, dtype=torch.int32, device=context.device)
    stats.add(ids)
    stats.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stats.add(ids)
    for batch in ([0, -1], [-1, 1], [2, 2]):
        ids.copy_(torch.tensor(batch))
        graph.replay()
    return stats.counts().tolist()


def test_a_graph_counts_at_every_replay(ranks: Ranks) -> None:
    """Captured once, three replays count three batches, of what the ids are then."""
    if ranks.device != "cuda":
        pytest.skip("CUDA graphs are of GPUs")
    for decay, expected in ((None, [1, 1, 2]), (0.5, [0.25, 0.5, 2.0])):
        for found in ranks.run(counts_of_replays, decay):
            assert found == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_experts": 0}, "num_experts is 0, expected a whole number"),
        ({"num_experts": True}, "num_experts is True"),
        ({"num_experts": 4, "decay": 1.0}, "decay is 1.0, expected a number above 0 and below 1"),
        ({"num_experts": 4, "decay": float("nan")}, "decay is nan"),
    ],
)
def test_arguments_that_are_never_right(arguments: dict[str, Any], said: str) -> None:
    """Each says what came and what was expected."""
    with pytest.raises(tl.InvalidArgument, match=said):
        tl.ExpertStats(**arguments)


def test_ids_that_do_not_fit() -> None:
    """Ids of another dtype, or on another device, are refused with a name: the counts would be silently wrong."""
    stats = tl.ExpertStats(4)
    with pytest.raises(tl.DtypeMismatch, match=r"topk_ids is torch.float32, expected a tensor of int32 or int64"):
        stats.add(torch.zeros(2, dtype=torch.float32))
    with pytest.raises(tl.DtypeMismatch, match="topk_ids is list"):
        stats.add([0, 1])  # type: ignore[arg-type]
    with pytest.raises(tl.DeviceMismatch, match=r"on meta, the counts are on cpu; pass device='meta'"):
        stats.add(torch.zeros(2, dtype=torch.int64, device="meta"))
