"""``tokenloom check-network`` over transport "gin": what it checks of it, and what it says where there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from tests.bench.test_network import on_rank_check
from tests.conftest import Ranks
from tokenloom.backends import registry
from tokenloom.backends.nodes.hierarchical.backend import NetworkBackend
from tokenloom.backends.nodes.hierarchical.nvlink_inside import make_inside
from tokenloom.backends.registration import Availability, Registration
from tokenloom.bench.network.bits import PAYLOADS
from tokenloom.bench.network.check import CheckOptions, check_on_rank
from tokenloom.plan import LAYOUTS
from tokenloom.runtime.processes import RankContext

EXPERIMENTAL = True


class LikeGin(NetworkBackend):
    """What "gin" can do, on CPUs."""

    name = "gin"
    capabilities = replace(NetworkBackend.capabilities, combine_strategies=("per_node",), other_nodes="gin")


def with_gin(context: RankContext) -> Any:
    able = Registration(
        "gin",
        LikeGin.capabilities,
        lambda request: Availability("gin", request.between_nodes == "gin", "as if"),
        lambda request, ranks: LikeGin(request.plan, ranks, make_inside(request, ranks)),  # type: ignore[arg-type]
    )
    others = [each for each in registry._registered if each.name != "gin"]
    with (
        mock.patch.object(registry, "_registered", [*others, able]),
        mock.patch("tokenloom.bench.network.check.check_links", return_value=[]),
        mock.patch("tokenloom.bench.network.check.check_rails", return_value=([], None)),
    ):
        return check_on_rank(context, CheckOptions(ranks_per_node=2, rounds=3))


@pytest.mark.slow
def test_gin_is_checked_where_it_works(four: Ranks) -> None:
    """Its layouts and its order of sums, against the reference, and order under random waits."""
    found = four.run(with_gin)[0]
    gin = [each for each in found.findings if each.group.startswith("gin: ")]
    assert all(each.passed for each in gin), gin
    layouts = {f"{layout} {payload.upper()}" for layout in LAYOUTS for payload in PAYLOADS}
    for call in ("dispatch", "combine per_node"):
        assert {each.what for each in gin if each.group == f"gin: {call}"} == layouts
    assert [each.part for each in gin if each.group == "gin: two calls open at once"] == ["order"]
    assert {each.group for each in gin if each.part == "bits"} == {"gin: dispatch", "gin: combine per_node"}


def test_why_kernels_are_not_checked(four: Ranks) -> None:
    """Without what a communicator's user could pass instead: a check takes whatever works."""
    found = four.run(on_rank_check, 2)[0]
    for line, what in zip(found.about[-2:], ("transport gin", "backend padded"), strict=True):
        why = f"{what.split()[1]} does not work on every rank: it needs a GPU, the tensors are on cpu"
        assert line == f"  {what} is not checked: {why}"
