"""Weights that travel in narrow rows beside calls whose rows are tokens: ranks that mix them up are told."""

from __future__ import annotations

import pytest
import torch

import tokenloom as tl
from tests.support.cases import FP32, Case, each_backend, make_comm, make_problem
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.processes import RankContext

EMULATED = True
CASE = Case("narrow", "", tokens=(6, 3, 5, 4), top_k=2, hidden=256, dtype=FP32)


@each_backend
@on_ranks
@pytest.mark.parametrize("call", ["rows again", "combine"])
def test_ranks_that_mean_different_rows(context: RankContext, backend: str, call: str) -> None:
    """The last rank sends weights by a dispatch, and the others rows. Nobody is handed the other's."""
    problem = make_problem(CASE, context.num_ranks)
    if context.num_ranks == 1:  # which differs from nobody
        return
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        x, ids, weights = problem.arguments(context)
        assert isinstance(x, torch.Tensor)
        assert weights is not None
        routed = comm.dispatch(x, ids, weights, layout="token", copy=True)
        odd = context.rank == context.num_ranks - 1

        def mixed() -> None:
            if call == "combine":
                comm.combine_weights(routed.topk_weights, routed) if odd else comm.combine(routed.tokens, routed)
            else:
                comm.reweighted(routed, weights) if odd else comm.dispatch_again(x, routed)
            comm.check()

        with pytest.raises(tl.PlanMismatch, match=r"width|call"):
            mixed()
        assert comm.reweighted(routed, weights).topk_weights is not None
