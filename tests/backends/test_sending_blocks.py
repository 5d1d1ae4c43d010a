"""Backend "nvlink": any number of a call's blocks may send, while the others place, fill and add rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.backends.large_plans import no_plan_is_small
from tests.support.cases import BF16, Case, make_comm, make_problem, same_routed
from tests.support.nvlink_cases import round_trip
from tests.support.on_ranks import on_ranks
from tokenloom.kernels.common import Work
from tokenloom.runtime.processes import RankContext

EMULATED = True
"""These tests can run without a GPU, behind tests/support/emulator/plugin.py."""
BLOCKS = 4
UNEQUAL = Case("unequal", "", tokens=(150, 3, 0, 91), spare=2, experts_per_rank=2, hidden=128, top_k=3, unused=0.1)
each_number = pytest.mark.parametrize("sending", [1, 3, BLOCKS])
few_and_all = pytest.mark.parametrize("sending", [1, BLOCKS])


@contextmanager
def blocks_send(sending: int) -> Iterator[None]:
    """So many of the blocks of communicators that are made in this block."""
    with no_plan_is_small(), mock.patch.object(Work, "sending_blocks", return_value=sending):
        yield


@on_ranks("hoppers")
@each_number
@pytest.mark.parametrize("layout", ["token", "expert", "slots"])
def test_rows_go_there_and_back(context: RankContext, layout: str, sending: int) -> None:
    problem = make_problem(UNEQUAL, context.num_ranks)
    with blocks_send(sending), make_comm(context, "nvlink", problem.plan, num_sms=BLOCKS) as comm:
        sizes = "bounded" if layout == "slots" else "exact"
        round_trip(context, comm, problem, layout, sizes=sizes, alignment=4 if layout == "expert" else 1)


@on_ranks("hoppers")
@few_and_all
@pytest.mark.parametrize("strategy", ["all_to_all", "all_gather"])
def test_strategies(context: RankContext, strategy: str, sending: int) -> None:
    problem = make_problem(UNEQUAL, context.num_ranks)
    with blocks_send(sending), make_comm(context, "nvlink", problem.plan, num_sms=BLOCKS) as comm:
        routed = comm.dispatch(*problem.arguments(context), layout="expert", alignment=4, strategy=strategy)
        same_routed(routed, problem.dispatched("expert", alignment=4)[context.rank], problem.plan)


@on_ranks("hoppers")
@few_and_all
@pytest.mark.parametrize(
    "options", [{"layout": "expert", "alignment": 4}, {"layout": "slots", "scale_layout": "columns"}], ids=str
)
def test_rows_are_quantised_once(context: RankContext, options: dict[str, Any], sending: int) -> None:
    """By the blocks that send, wherever they go."""
    problem = make_problem(replace(UNEQUAL, dtype=BF16), context.num_ranks)
    problem = replace(problem, xs=[torch.nan_to_num(x, 1.0, 1.0, 1.0) for x in problem.xs])
    with blocks_send(sending), make_comm(context, "nvlink", problem.plan, num_sms=BLOCKS) as comm:
        routed = comm.dispatch(*problem.arguments(context), **options, to_fp8=True)
        want = problem.dispatched(**options, to_fp8=True)
        same_routed(routed, want[context.rank], problem.plan)
