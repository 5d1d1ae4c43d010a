"""The protocol between nodes, in a model: no history breaks a rule, and every rule that is broken is noticed."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.network_model import COMBINE, DISPATCH, Shape, Violation, culprits, make_calls, run, whole
from tests.support.network_model.broken import BROKEN, Broken
from tests.support.network_model.explore import NODES, explore, random_routing, random_steps
from tokenloom import reference
from tokenloom.plan import Plan

KINDS = (DISPATCH, COMBINE, DISPATCH, DISPATCH, COMBINE)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(data=st.data())
def test_no_history_breaks_a_rule(data: st.DataObject) -> None:
    """Any routing, sizes, chunks and order of calls, and ranks that cannot make some. The queue has room for just what
    the protocol may send.
    """
    nodes, size = data.draw(st.sampled_from(NODES))
    chunks, halves = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    shape = Shape(nodes, size, chunks, data.draw(st.integers(1, 5)), halves, depth=chunks * (4 if halves else 2))
    kinds = data.draw(st.lists(st.sampled_from((DISPATCH, COMBINE)), min_size=4, max_size=7))
    chance = random.Random(data.draw(st.integers(0, 10**6)))
    faults = data.draw(st.dictionaries(st.integers(1, len(kinds)), st.integers(0, shape.num_ranks - 1), max_size=2))
    steps = random_steps(chance, shape, kinds, faults)
    for seed in range(3):
        outcome = run(shape, steps, seed)
        assert not outcome.reports
        assert all(results.keys() == {*range(1, len(kinds) + 1)} - {*faults} for results in outcome.results)


@pytest.mark.slow
def test_many_histories() -> None:
    """Ten of each problem: words land in orders that few of them have."""
    totals = explore(range(150))
    assert totals.histories == 1500
    assert totals.words > 50 * totals.histories


@pytest.mark.soak
def test_100000_histories() -> None:
    """The same, of ten thousand problems: about two minutes."""
    assert explore(range(10_000)).histories == 100_000


@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
def test_puts_under_way(halves: bool) -> None:
    """Turns times chunks are the credit, without a word for it: no fewer are enough, and no more are ever used."""
    shape = Shape(2, 2, chunks=3, halves=halves)
    found = {
        run(shape, random_steps(random.Random(seed), shape, (DISPATCH,) * 6), seed).most_puts for seed in range(20)
    }
    assert max(found) == shape.turns * shape.chunks


@pytest.mark.parametrize("broken", BROKEN, ids=lambda each: f"{each.protocol.__name__}{'-halves' * each.halves}")
def test_broken_rules_are_caught(broken: Broken) -> None:
    """Within a few histories, by what is wrong with it."""
    shape = Shape(2, 2, broken.chunks, halves=broken.halves, depth=broken.depth)
    caught = []
    for seed in range(20):
        steps = random_steps(random.Random(seed), shape, broken.kinds, broken.faults)
        try:
            run(shape, steps, seed, broken.protocol, dies=(1, 20) if broken.dies else None)
        except Violation as violation:
            caught.append(str(violation))
    assert any(re.search(broken.says, each) for each in caught), caught


@pytest.mark.parametrize(
    "shape",
    [Shape(2, 2, chunks=2), Shape(2, 2, halves=True), pytest.param(Shape(3, 2), marks=pytest.mark.slow)],
    ids=["2x2", "halves", "3x2"],
)
def test_a_rank_that_dies_is_named(shape: Shape) -> None:
    """After each of its actions, so in each phase. Everyone else ends, and reports lead from rank to rank to it."""
    steps = random_steps(random.Random(3), shape, KINDS)
    last = steps[-1][1].number
    phases = set()
    for dead in range(shape.num_ranks)[:: 1 if shape.nodes == 3 else 3]:
        actions = run(shape, steps, 0).actions[dead]
        for done in range(actions):
            outcome = run(shape, steps, done, dies=(dead, done))
            phases |= {report.wait.phase for report in outcome.reports.values()}
            silent = [
                rank
                for rank in range(shape.num_ranks)
                if rank != dead and rank not in outcome.reports and last not in outcome.results[rank]
            ]
            assert not silent
            assert culprits(outcome) <= {dead}
            # Whoever dies in its last call may have sent all that others need.
            assert outcome.reports or done > actions * 0.7
    assert phases == {"forward", "rows", "partials", "home"}


def test_a_call_that_one_rank_never_makes() -> None:
    """As if it had died before: all others hear of it in that very call."""
    shape = Shape(3, 2)
    calls = make_calls(shape, KINDS, lambda: random_routing(random.Random(8), shape))
    before = run(shape, whole(calls[:2]), 0).actions[4]
    outcome = run(shape, whole(calls), 1, dies=(4, before))
    assert {rank: report.wait.epoch for rank, report in outcome.reports.items()} == dict.fromkeys((0, 1, 2, 3, 5), 3)
    assert culprits(outcome) == {4}


def test_results_are_those_of_the_reference() -> None:
    """Rows in its order, and sums per node with its bits: the model's own expectations are not a second opinion."""
    shape, chance = Shape(3, 2, chunks=2, max_tokens=5), random.Random(2)
    nodes = [range(2 * node, 2 * node + 2) for node in range(3)]
    plan = Plan(6, 12, 8, 5, 5)
    ids = [
        torch.tensor([chance.sample(range(-1, 12), 5) for _ in range(chance.randint(0, 5))], dtype=torch.int64)
        for _ in range(6)
    ]
    ids = [each.view(-1, 5) for each in ids]
    routes = [[tuple(sorted({e // 2 for e in token if e >= 0})) for token in each.tolist()] for each in ids]
    xs = [torch.tensor([[100.0 * s + t] * 8 for t in range(len(each))]).view(-1, 8) for s, each in enumerate(ids)]
    routed = reference.dispatch(plan, xs, ids, None, "token")
    generator = torch.Generator().manual_seed(1)
    ys = [torch.randn(each.tokens.shape, generator=generator).bfloat16() for each in routed]
    outs = reference.combine(plan, ys, routed, ids, None, mode="per_node", nodes=nodes)

    remaining = iter(routes)
    outcome = run(shape, whole(make_calls(shape, (DISPATCH, COMBINE), lambda: next(remaining))), 3)

    def total(terms: list[torch.Tensor]) -> torch.Tensor:
        result = terms[0].float()
        for term in terms[1:]:
            result = result + term.float()
        return result.bfloat16()

    for rank in range(6):
        rows = [100.0 * source + token for from_source in outcome.results[rank][1] for _, source, token in from_source]
        assert rows == routed[rank].tokens[:, 0].tolist()
        sums: list[Any] = outcome.results[rank][2]
        for token, of_nodes in enumerate(sums):
            terms = [total([ys[r][routed[r].rows[s, t]] for r, (_, s, t) in each]) for _, each in of_nodes]
            want = outs[rank][token]
            assert torch.equal(total(terms) if terms else torch.zeros(8).bfloat16(), want)
