"""Backend "nvlink": kernels take as many SMs as their rows need, where the user has given no number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.backends.large_plans import no_plan_is_small
from tests.support.cases import Case, make_comm, make_problem
from tests.support.nvlink_cases import round_trip
from tests.support.on_ranks import on_ranks
from tokenloom.backends.nodes import gin, padded
from tokenloom.backends.peers import backend
from tokenloom.backends.registration import Availability, Request
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.rank_group import RankGroup

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
        assert "by expert 64 of a dispatch (64 of FP8) and 64 of a combine" in comm.describe(), "few tokens"
    with make_comm(context, "nvlink", problem.plan, num_sms=3) as comm:
        assert "SMs of a kernel: 3, as num_sms says" in comm.describe()


REAL_GATHER = RankGroup.all_gather_object


def gather_fewer(ranks: RankGroup, value: Any, phase: str) -> list[Any]:
    """As if rank 0 had an MPS limit."""
    return REAL_GATHER(ranks, (20, value[1]) if phase == "counting SMs" and ranks.rank == 0 else value, phase)


@on_ranks("hoppers")
def test_a_rank_that_may_take_fewer(context: RankContext) -> None:
    """All choose up to its number: each waits for as many blocks of others as it has itself."""
    problem = make_problem(CASE, context.num_ranks)
    limited = mock.patch.object(RankGroup, "all_gather_object", gather_fewer)
    with limited, make_comm(context, "nvlink", problem.plan, num_sms=None) as comm:
        assert "by expert 20 of a dispatch (20 of FP8) and 20 of a combine" in comm.describe()
        round_trip(context, comm, problem, "expert")


@pytest.mark.parametrize("probe", [gin.probe, padded.probe], ids=["gin", "padded"])
def test_kernels_between_nodes_take_a_fixed_number(
    probe: Callable[[Request], Availability], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Theirs is refused where fewer SMs may be used, also if the user has given none."""
    monkeypatch.setattr(backend, "usable_sms", lambda index: 8)
    for module in (gin, padded):
        monkeypatch.setattr(module, "why_no_kernels", lambda request, most_ranks: None)
    name = probe.__module__.rsplit(".", 1)[-1]
    request = Request("nccl", torch.device("cuda", 0), name=name, between_nodes="gin")
    with pytest.raises(tl.InvalidArgument, match="num_sms is 16, more than the 8 SMs of cuda:0"):
        probe(request)
