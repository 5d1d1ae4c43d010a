"""Plans of both kinds: small ones, whose bounded calls are eager, and large ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from tests.support.cases import Problem
from tokenloom.backends.peers import buffers


def in_large_plan(problem: Problem) -> Problem:
    """The same tensors for a plan in which more tokens might come than eager calls are for."""
    plan = problem.plan
    tokens = max(plan.max_tokens_per_rank, buffers.EAGER_ROWS // plan.num_ranks + 1)
    large = replace(problem, plan=replace(plan, max_tokens_per_rank=tokens))
    assert not buffers.sends_before_opening(large.plan)
    return large


@contextmanager
def no_plan_is_small() -> Iterator[None]:
    """Communicators that are made in this block make no eager calls, and all their dispatches are direct."""
    with mock.patch.object(buffers, "EAGER_ROWS", 0), mock.patch.object(buffers, "SLOTS_ROOM", float("inf")):
        yield
