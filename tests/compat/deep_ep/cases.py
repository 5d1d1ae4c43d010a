"""Problems as a client of deep_ep meets them, and what the reference says to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conftest import Ranks
from tests.support import emulator
from tests.support.cases import BF16, FP32, Case, Problem, make_problem
from tokenloom.compat import deep_ep
from tokenloom.errors import PeerError
from tokenloom.plan import align_up
from tokenloom.runtime.processes import RankContext

CASE = Case("deep_ep", "", tokens=(6, 0, 3, 5), top_k=3, experts_per_rank=4, unused=0.2, hidden=128)
CASES = [
    CASE,
    replace(CASE, name="float32", dtype=FP32),
    replace(CASE, name="narrow rows", hidden=8, top_k=1),
    replace(CASE, name="no routes", pick="none"),
    replace(CASE, name="no tokens", tokens=(0,)),
    replace(CASE, name="one rank has all", tokens=(0, 0, 0, 9), top_k=8, experts_per_rank=8),
    replace(CASE, name="to one rank", pick="one rank", tokens=(7, 2)),
]
each_case = pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])


def finite(problem: Problem) -> Problem:
    """The same, without infinities and NaN."""
    return replace(problem, xs=[x.nan_to_num(1, 2, 3) if x.is_floating_point() else x for x in problem.xs])


def problem_of(case: Case, context: RankContext) -> Problem:
    return make_problem(case, context.num_ranks)


def laid_out(buffer: deep_ep.Buffer, problem: Problem, context: RankContext) -> dict[str, Any]:
    """Arguments of ``Buffer.dispatch`` as clients make them."""
    x, ids, weights = problem.arguments(context)
    per_rank, per_rdma_rank, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, problem.plan.num_experts)
    return {
        "x": x,
        "topk_idx": ids,
        "topk_weights": weights,
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_rdma_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
    }


def aligned(counts: list[int], alignment: int) -> list[int]:
    return [align_up(count, alignment) for count in counts]


def rows_to_combine(tokens: torch.Tensor, rank: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Rows of many magnitudes, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(100 + rank)
    values = torch.randn(tokens.shape, generator=generator) * 2.0 ** torch.randint(
        -5, 6, tokens.shape, generator=generator
    )
    return values.to(dtype)


def skip_where_kernels_tell(ranks: Ranks) -> None:
    """Where the host does not wait for a call, its kernels tell of a fault, and the other ranks raise it later."""
    if emulator.ON or ranks.device == "cuda":
        pytest.skip("the other ranks hear of it at a later call")


def fails(context: RankContext, culprit: int, error: type[Exception], text: str, call: Callable[[], object]) -> None:
    """One rank raises its own error, the others PeerError; both begin with the client's name for the call."""
    name = text.split(":")[0]
    if context.rank == culprit:
        with pytest.raises(error, match=text):
            call()
        return
    with pytest.raises(PeerError, match=f"{name}: rank {culprit} failed") as raised:
        call()
    assert raised.value.rank == culprit
