"""Memory that ranks share: what happens where there is none left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.cases import Case, make_comm, make_problem
from tokenloom.runtime import symmetric_memory
from tokenloom.runtime.processes import RankContext

CASE = Case("no room", "", tokens=(8, 5, 0, 6), spare=2000, hidden=4096, experts_per_rank=2, top_k=4, pick="repeats")
"""Few tokens in buffers for many, so that what is lost would be seen."""


def no_room(context: RankContext) -> str:
    problem = make_problem(CASE, context.num_ranks)
    x, ids, weights = problem.arguments(context)

    def refuse(num_bytes: int) -> int:
        raise torch.OutOfMemoryError(f"no room for {num_bytes} bytes")

    real = symmetric_memory._allocate
    with make_comm(context, "nvlink", problem.plan, checked=False) as comm, torch.no_grad():
        torch.cuda.synchronize()
        free_bytes = torch.cuda.mem_get_info()[0]
        for _ in range(2):
            with (
                mock.patch.object(symmetric_memory, "_allocate", refuse if context.rank == 0 else real),
                pytest.raises(torch.OutOfMemoryError if context.rank == 0 else tl.PeerError) as caught,
            ):
                comm.dispatch(x, ids, weights)
        assert free_bytes - torch.cuda.mem_get_info()[0] < 40e6, "what the others have taken is not given back"
        routed = comm.dispatch(x, ids, weights)
        assert free_bytes - torch.cuda.mem_get_info()[0] > 80e6, "too small to be seen"
        comm.combine(routed.tokens, routed)
        comm.check()
    return type(caught.value).__name__


@pytest.mark.alone  # it counts the free memory of the GPU
def test_no_room_on_one_rank(hoppers: Ranks) -> None:
    """The first call of a kind makes a buffer on every rank, or on none; then it can be tried again."""
    found = hoppers.run(no_room)
    assert found == ["OutOfMemoryError"] + ["PeerError"] * (hoppers.num_ranks - 1)


def test_memory_that_torch_keeps_is_asked_for() -> None:
    """torch does not give back to the driver what its tensors no longer use, unless it is told to."""
    results = SimpleNamespace(CUDA_ERROR_OUT_OF_MEMORY=2)
    answers: list[tuple[int, Any]] = [(2, None), (0, 4096)]
    driver = SimpleNamespace(cuMemAlloc=lambda num_bytes: answers.pop(0), CUresult=results)
    with (
        mock.patch.object(symmetric_memory, "load_driver", return_value=driver),
        mock.patch.object(torch.cuda, "empty_cache") as emptied,
    ):
        assert symmetric_memory._allocate(10**9) == 4096
    emptied.assert_called_once()
