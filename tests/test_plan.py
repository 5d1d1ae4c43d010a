"""Sizes: what a plan accepts, and that its worst cases are reached and never exceeded."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
import torch

from tokenloom import reference
from tokenloom.errors import InvalidArgument
from tokenloom.plan import Plan, align_up, padded

PLAN = Plan(num_ranks=2, num_experts=6, hidden=256, top_k=3, max_tokens_per_rank=5)


def test_derived_sizes() -> None:
    """By hand: 6 experts on 2 ranks; 10 tokens, 30 routes; 3 groups."""
    assert PLAN.experts_per_rank == 3
    assert PLAN.scales_per_token == PLAN.scales_by("block") == 2
    assert PLAN.scales_by("row") == 1
    assert (PLAN.scale_shape("block"), PLAN.scale_shape("row")) == ((2,), ())
    assert PLAN.worst_case_rows("token") == 10
    assert PLAN.worst_case_rows("rank") == 10
    assert PLAN.worst_case_rows("expert") == 30
    # 28 routes in one group, 1 in each of the others: 28 + 4 + 4
    assert PLAN.worst_case_rows("expert", 4) == 36
    # One route in each of two groups and 28 in the third: three groups of 128
    assert PLAN.worst_case_rows("expert", 128) == 384


@pytest.mark.parametrize("alignment", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_padded_is_the_worst_case(groups: int, alignment: int) -> None:
    """Against every way to split the routes over the groups: reached, never exceeded."""
    for routes in range(12):
        splits = (split for split in product(range(routes + 1), repeat=groups) if sum(split) == routes)
        most = max(sum(align_up(count, alignment) for count in split) for split in splits)
        assert padded(routes, groups, alignment) == most


@pytest.mark.parametrize("layout", ["token", "rank", "expert"])
def test_worst_case_is_reached(layout: str) -> None:
    """All tokens of all ranks with all their routes on one rank."""
    ids = [torch.zeros(PLAN.max_tokens_per_rank, PLAN.top_k, dtype=torch.int64)] * 2
    x = [torch.zeros(PLAN.max_tokens_per_rank, PLAN.hidden)] * 2
    routed = reference.dispatch(PLAN, x, ids, None, layout)
    assert routed[0].num_rows == PLAN.worst_case_rows(layout)
    assert routed[1].num_rows == 0


def test_align_up() -> None:
    """0 stays 0: an empty expert has no rows."""
    assert [align_up(value, 4) for value in (0, 1, 4, 5)] == [0, 4, 4, 8]


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Plan)])
@pytest.mark.parametrize("value", [0, -1, 1.0, "8", None, True])
def test_sizes_are_positive_integers(name: str, value: object) -> None:
    """The message names the size and what came."""
    with pytest.raises(InvalidArgument, match=f"{name} is {value!r}, expected a positive integer"):
        Plan(**(vars(PLAN) | {name: value}))


def test_experts_divide_over_ranks() -> None:
    """The message says what to do."""
    with pytest.raises(
        InvalidArgument, match=r"num_experts is 7, expected a multiple of the 2 ranks.*pad the experts to 8"
    ):
        Plan(**(vars(PLAN) | {"num_experts": 7}))


def test_top_k_limit() -> None:
    """32 is the most."""
    assert Plan(**(vars(PLAN) | {"top_k": 32})).top_k == 32
    with pytest.raises(InvalidArgument, match="top_k is 33, expected at most 32"):
        Plan(**(vars(PLAN) | {"top_k": 33}))


def test_plan_is_frozen() -> None:
    """Every rank keeps what all of them agreed on."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAN.hidden = 1  # type: ignore[misc]
