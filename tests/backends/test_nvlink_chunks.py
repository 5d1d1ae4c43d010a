"""Backend "nvlink": rows of a combine travel in chunks of several rows and of one, by how many each pair has."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from tests.backends.large_plans import no_plan_is_small
from tests.support.cases import Case, make_comm, make_problem
from tests.support.nvlink_cases import LAYOUTS, new_comm, round_trip
from tests.support.on_ranks import on_ranks
from tokenloom.kernels.combine import launch
from tokenloom.runtime.processes import RankContext

EMULATED = True
"""These tests can run without a GPU, behind tests/support/emulator/plugin.py."""
UNEQUAL = Case("unequal", "", tokens=(50, 3, 0, 31), spare=2, experts_per_rank=2, hidden=64, top_k=3, unused=0.1)


@on_ranks("hoppers")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_of_several_rows(context: RankContext, layout: str) -> None:
    """So few rows are single ones that most pairs of ranks have chunks of both kinds, as thousands of rows have."""
    problem = make_problem(UNEQUAL, context.num_ranks)
    few = mock.patch.object(launch, "LONE_ROWS", 5)
    with no_plan_is_small(), few, new_comm(context, problem.plan, checked=False) as comm:
        round_trip(context, comm, problem, layout)


@on_ranks("hoppers")
@pytest.mark.parametrize("layout", ["token", "expert"])
def test_sums_keep_up_with_what_comes(context: RankContext, layout: str) -> None:
    """One block sends, and one adds: its warps have many tokens each, and ask for rows ahead that are not home yet."""
    problem = make_problem(replace(UNEQUAL, tokens=(400, 300, 0, 350)), context.num_ranks)
    with no_plan_is_small(), make_comm(context, "nvlink", problem.plan, num_sms=2, checked=False) as comm:
        round_trip(context, comm, problem, layout)
