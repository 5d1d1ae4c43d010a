"""Backend "nvlink": kernels take as many SMs as their rows need, where the user has given no number."""

from __future__ import annotations

import pytest

from tests.backends.large_plans import no_plan_is_small
from tests.support.cases import Case, make_comm, make_problem
from tests.support.nvlink_cases import round_trip
from tests.support.on_ranks import on_ranks
from tokenloom.backends.peers.backend import objections
from tokenloom.backends.registration import Availability
from tokenloom.runtime.processes import RankContext

EMULATED = True
"""These tests can run without a GPU, behind tests/support/emulator/plugin.py."""
CASE = Case("chosen", "", tokens=(60, 3, 0, 31), spare=2, experts_per_rank=2, hidden=64, top_k=3, unused=0.1)


@on_ranks("hoppers")
@pytest.mark.parametrize("layout", ["token", "expert", "rank"])
def test_rows_go_there_and_back(context: RankContext, layout: str) -> None:
    """A dispatch and its combine have different numbers of blocks, the same on all ranks."""
    problem = make_problem(CASE, context.num_ranks)
    with no_plan_is_small(), make_comm(context, "nvlink", problem.plan, num_sms=None) as comm:
        round_trip(context, comm, problem, layout)


@on_ranks("hoppers")
def test_describe_has_the_numbers(context: RankContext) -> None:
    problem = make_problem(CASE, context.num_ranks)
    with make_comm(context, "nvlink", problem.plan, num_sms=None) as comm:
        assert "SMs of a kernel: by token " in comm.describe()
        assert "by expert 32 of a dispatch (32 of FP8) and 32 of a combine" in comm.describe(), "few tokens"
    with make_comm(context, "nvlink", problem.plan, num_sms=3) as comm:
        assert "SMs of a kernel: 3, as num_sms says" in comm.describe()


def test_ranks_that_may_take_different_numbers() -> None:
    """They would launch kernels with different numbers of blocks, and wait for each other's."""
    facts = {"host": "here", "sms": 32}
    found = [Availability("nvlink", True, "", facts | {"gpu": gpu, "sms": sms}) for gpu, sms in (("a", 32), ("b", 20))]
    assert objections(found) == [(1, "kernels may take 20 SMs, on rank 0 32: pass num_sms")]
