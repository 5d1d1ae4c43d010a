"""The demo's parts. Its comparisons must be able to fail, or their PASS means nothing. test_cli.py runs all of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.conftest import Ranks
from tokenloom.backends.collective import PreparedCombineByCollective
from tokenloom.backends.peers.combine import SumsAtHome
from tokenloom.backends.seam import Sent
from tokenloom.bench.differences import Difference
from tokenloom.demo import check, train
from tokenloom.demo.check import Compared, compare_pairs, merge
from tokenloom.demo.run import compare_runs
from tokenloom.runtime.processes import RankContext

pytestmark = pytest.mark.slow_on(4)

NAN = torch.tensor([math.nan])
ZERO, ONE = torch.zeros(1), torch.ones(1)
OPTIONS = train.DemoOptions(num_experts=8, sequences=8, steps=3, seed=0)


@pytest.mark.parametrize(
    ("pairs", "passes"),
    [
        ([(ONE, ONE)], True),
        ([(ONE, ONE), (None, None)], True),  # absent on both sides
        ([(ONE, ONE), (ONE, ZERO)], False),
        ([(ONE, ONE), (NAN, ZERO)], False),  # every comparison with NaN is false, so it must not slip through max()
        ([(NAN, ZERO), (ONE, ONE)], False),
        ([(ONE, None)], False),
        ([(None, ONE)], False),
        ([(ONE, torch.ones(2))], False),  # broadcasting would call these equal
        ([(torch.ones(0), torch.ones(0))], False),  # nothing was compared
        ([], False),
    ],
)
def test_what_passes_a_comparison(pairs: Any, passes: bool) -> None:
    assert compare_pairs("", pairs).passed is passes


def test_tolerance() -> None:
    """The tolerance is the largest difference that passes."""
    pair = (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]))
    assert compare_pairs("", [pair], tolerance=0.5).passed
    assert not compare_pairs("", [pair], tolerance=0.49).passed
    assert compare_pairs("", [pair]).difference.mean_diff == 0.25


def test_merging_ranks_keeps_the_worst() -> None:
    """One failing rank, or one NaN, decides. A rank without tokens has nothing to compare and fails nobody."""
    fine, bad, lost = (
        Compared("x", Difference(count=2, max_diff=largest, sum_diff=1.0), 0.5) for largest in (0.1, 0.7, math.nan)
    )
    empty = Compared("x", Difference(), 0.5)
    assert merge([[fine], [empty]]) == [fine]
    assert merge([[fine], [bad]])[0].difference.max_diff == 0.7
    assert not merge([[lost], [fine]])[0].passed
    assert not merge([[fine], [lost]])[0].passed


@dataclass
class SlightlyWrong:
    """A combine on its way whose result has a last bit or so wrong in one value."""

    pending: Sent[torch.Tensor]

    def receive(self) -> torch.Tensor:
        out = self.pending.receive()
        out[:1, 0] += out[:1, 0].abs() * 0.01
        return out


def check_with_a_wrong_combine(context: RankContext) -> list[Compared]:
    """Check while every combine of rank 0 is slightly wrong."""
    combines: type[Any] = PreparedCombineByCollective if context.device.type == "cpu" else SumsAtHome
    real = combines.send

    def wrong(prepared: object, *arguments: Any, **options: Any) -> Sent[torch.Tensor]:
        pending = real(prepared, *arguments, **options)
        return SlightlyWrong(pending) if context.rank == 0 else pending

    with mock.patch.object(combines, "send", wrong):
        return check.check_on_rank(context, seed=0)[1]


def test_the_check_sees_a_wrong_value(ranks: Ranks) -> None:
    """Everything passes as it is. With one value of combine off by 1%, the combines and the layer fail."""
    right = merge([result[1] for result in ranks.run(check.check_on_rank, 0)])
    assert [difference.what for difference in right if not difference.passed] == []
    assert [each.difference.max_diff for each in right[:-1]] == [0.0] * (len(right) - 1)
    wrong = merge(ranks.run(check_with_a_wrong_combine))
    failed = [difference.what for difference in wrong if not difference.passed]
    assert sorted(failed) == ["combine per_node", "combine per_rank", "combine per_route", "layer"]
    assert wrong[1].fault.startswith("rank 0: uniform BF16: 1 of")


def train_without_reducing(context: RankContext) -> train.Trained:
    """Make the commonest mistake: replicated parameters keep each rank's own gradient."""
    trainer = train.make_trainer(context, OPTIONS)
    with trainer.ddp.no_sync():
        losses = [trainer.step()[0]]
    return train.Trained(losses, train.last_gradients(trainer), 0.0)


def train_with_too_much_balance_loss(context: RankContext) -> train.Trained:
    """Add aux_loss * W on every rank, which Adam would hide from the losses for a while."""
    trainer = train.make_trainer(context, OPTIONS)
    real = trainer.model.forward

    def scaled(tokens: torch.Tensor) -> Any:
        logits, balance_loss = real(tokens)
        return logits, balance_loss * context.num_ranks

    with mock.patch.object(trainer.model, "forward", scaled):
        losses = [trainer.step()[0]]
    return train.Trained(losses, train.last_gradients(trainer), 0.0)


def test_ranks_train_like_one_and_mistakes_show(ranks: Ranks) -> None:
    """Gradients of W ranks are those of one. Forgetting a sum, or counting the balance loss W times, fails."""
    if ranks.num_ranks == 1:
        pytest.skip("there is nothing to compare one rank with")
    one = Ranks(ranks.pool, 1).run(train.train, OPTIONS)
    many = ranks.run(train.train, OPTIONS)
    assert [difference.what for difference in compare_runs(many, one) if not difference.passed] == []

    first_step = [replace(one[0], losses=one[0].losses[:1])]
    for mistake in (train_without_reducing, train_with_too_much_balance_loss):
        gradients, *_ = compare_runs(ranks.run(mistake), first_step)
        assert not gradients.passed, mistake.__name__


def test_shares_are_measured_on_every_rank(ranks: Ranks) -> None:
    """Further steps under the profiler, whose losses do not count."""
    if ranks.num_ranks != 2:
        pytest.skip("the profiler takes seconds; two ranks show what there is to see")
    for found in ranks.run(train.train, replace(OPTIONS, steps=1, profiled_steps=1)):
        assert len(found.losses) == 1
        assert 0 < found.dispatch_share < 1
        assert 0 < found.combine_share < 1


def trained(losses: list[float], gradient: float = 1.0) -> list[train.Trained]:
    gradients = {"head.weight": np.array([gradient, 2.0]), "blocks.0.experts.w1": np.array([gradient])}
    return [train.Trained(losses, gradients, 0.0)]


@pytest.mark.parametrize(
    ("many", "failing"),
    [
        (trained([3.0] * 30), []),
        (trained([3.0] * 30, gradient=1.001), [0]),
        (trained([3.0, 3.01, *[3.0] * 28]), [1]),  # early on, only rounding is allowed
        (trained([*[3.0] * 29, 3.01]), []),
        (trained([*[3.0] * 29, 3.2]), [2]),
        (trained([*[3.0] * 29, math.nan]), [2]),
        (trained([3.0] * 29), [2]),  # a lost step
    ],
)
def test_comparing_runs(many: list[train.Trained], failing: list[int]) -> None:
    """Each of the three comparisons fails for what it is there to find."""
    found = compare_runs(many, trained([3.0] * 30))
    assert [index for index, difference in enumerate(found) if not difference.passed] == failing


def test_time_under_a_range_counts_once() -> None:
    """Ranges nest (a backend's inside ours) and appear on host and device timelines, so their union is the time."""

    def event(name: str, start: float, end: float) -> Any:
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))

    events = [event("a", 10, 20), event("a", 12, 15), event("b", 0, 100), event("a", 18, 25), event("a", 40, 41)]
    assert train.covered_us(events, "a") == 16
    assert train.covered_us(events, "missing") == 0
