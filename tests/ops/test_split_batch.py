"""The planner of balanced batches: against the reference, which moves route by route, and properties of all splits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.batch_splits import Table, drawn_batch, drawn_counts, flattened
from tokenloom import reference
from tokenloom.ops.split_batch import Split, routes_of_slots, split_batch
from tokenloom.plan import Plan


def loads_after(split: Split, before: np.ndarray, num_ranks: int) -> list[int]:
    """Routes of each rank, from the shares alone."""
    rows = before.sum(0).astype(int)
    ends = dict(enumerate(rows.tolist()))
    for slot, first, target in split.shares:
        moved = ends[slot] - first
        assert moved > 0, "a share has routes"
        ends[slot] = first
        rows[slot] -= moved
        rows[target] += moved
    return rows.reshape(num_ranks, -1).sum(1).tolist()


def check(counts: np.ndarray, table: Table, masked: tuple[int, ...], always: bool, rows_per_pull: int) -> Split:
    num_ranks, per_rank = len(table), len(table[0])
    split = split_batch(counts, table, masked, rows_per_pull=rows_per_pull, always=always)
    flat = flattened(table, masked)
    before = routes_of_slots(counts, flat)
    lost = set(range(counts.shape[1])) - set(flat)
    assert before.sum() == counts.sum() - counts[:, list(lost)].sum(), "every route has a slot"
    loads, total = loads_after(split, before, num_ranks), int(before.sum())
    mean = -(-total // (num_ranks - len(masked)))
    assert sum(loads) == total, "no route is lost or doubled"
    assert max(loads) == split.rows
    assert all(loads[rank] == 0 for rank in masked)
    base = before.sum(0).reshape(num_ranks, -1).sum(1)
    assert (loads <= np.maximum(mean, base)).all(), "no helper is overloaded"
    for slot, _, target in split.shares:
        assert split.slot_experts[target] == flat[slot]
    new = [slot for slot, each in enumerate(split.slot_experts) if each != flat[slot]]
    assert all(flat[slot] == -1 for slot in new)
    givers = {target: slot // per_rank for slot, _, target in reversed(split.shares)}
    taken, given = np.bincount([slot // per_rank for slot in new]), np.bincount([givers[slot] for slot in new])
    assert max([0, *taken, *given]) == split.pulls
    cuts = 0
    for slot, first, _ in split.shares:
        cuts += first not in {0, *before[:, slot].cumsum().tolist()}
    assert cuts <= num_ranks - 1, "whole runs go"
    if not always and split.shares:
        assert split.rows_before - split.rows >= max(1, rows_per_pull * split.pulls)
    return split


@pytest.mark.parametrize("part", range(4))
def test_what_every_split_keeps(part: int) -> None:
    """Random counts and placements."""
    for seed in range(part * 150, (part + 1) * 150):
        check(*drawn_batch(seed))


@pytest.mark.slow
def test_of_many() -> None:
    """The same of 10^5."""
    for seed in range(10_000, 110_000):
        check(*drawn_batch(seed))


@pytest.mark.parametrize("seed", range(60))
def test_equals_the_reference(seed: int) -> None:
    """The reference moves one route after the other."""
    counts, table, masked, always, rows_per_pull = drawn_batch(seed)
    counts = np.minimum(counts, 30)
    num_ranks, num_experts = counts.shape
    generator = torch.Generator().manual_seed(seed)
    ids = []
    for row in counts.tolist():
        flat = torch.repeat_interleave(torch.arange(num_experts), torch.tensor(row))
        ids.append(flat[torch.randperm(len(flat), generator=generator)][:, None])
    plan, by_slot = reference.place(Plan(num_ranks, num_experts, 8, 1, 1000), ids, table, masked)
    want, batch = reference.split(plan, by_slot, table, masked, rows_per_pull=rows_per_pull, always=always)
    split = split_batch(counts, table, masked, rows_per_pull=rows_per_pull, always=always)
    assert split.slot_experts == flattened(batch, masked)
    routes: dict[int, list[tuple[int, int]]] = {}
    for source, each in enumerate(by_slot):
        for token, slot in enumerate(each.flatten().tolist()):
            routes.setdefault(slot, []).append((source, token))
    found = [each.clone() for each in by_slot]
    ends = {slot: len(each) for slot, each in routes.items()}
    for slot, first, target in split.shares:
        for source, token in routes[slot][first : ends[slot]]:
            found[source][token] = target
        ends[slot] = first
    for each, wanted in zip(found, want, strict=True):
        assert torch.equal(each, wanted)


def test_by_hand() -> None:
    """Rank 0 has 10 routes and rank 1 two: four go, those of expert 0, the fullest, from its end."""
    counts = np.array([[4, 1, 1, 0], [3, 2, 0, 1]])
    split = split_batch(counts, [[0, 1, -1], [2, 3, -1]])
    assert split.shares == [(0, 3, 5)]  # one run of source 1, whole, and the last of source 0
    assert split.slot_experts == [0, 1, -1, 2, 3, 0]
    assert (split.rows_before, split.rows, split.pulls) == (10, 6, 1)


def test_whether_it_pays() -> None:
    """Four routes for one pull: at a threshold of four it pays, and not above."""
    counts = np.array([[4, 1, 1, 0], [3, 2, 0, 1]])
    table = [[0, 1, -1], [2, 3, -1]]
    assert split_batch(counts, table, rows_per_pull=4).shares
    unsplit = split_batch(counts, table, rows_per_pull=5)
    assert unsplit == ([0, 1, -1, 2, 3, -1], [], 10, 10, 0)
    assert split_batch(counts, table, rows_per_pull=5, always=True).shares


def test_exact_with_spare_slots_for_all() -> None:
    """With as many empty slots as experts of a rank, every rank gets the mean, whatever is asked for."""
    for seed in range(300):
        generator = np.random.default_rng(seed)
        num_ranks, local = int(generator.choice([2, 4, 8])), int(generator.choice([1, 2, 8]))
        table = [[*range(rank * local, (rank + 1) * local), *[-1] * local] for rank in range(num_ranks)]
        counts = drawn_counts(generator, num_ranks, num_ranks * local)
        assert split_batch(counts, table).rows == -(-int(counts.sum()) // num_ranks)


def test_replicas_need_no_pull() -> None:
    """A helper that has the expert computes it where it lies, which pays at any threshold."""
    counts = np.array([[0, 3, 8, 0], [0, 0, 0, 0]])
    split = split_batch(counts, [[2, 0, 1], [3, 2, -1]], rows_per_pull=100)
    assert (split.shares, split.pulls) == ([(0, 3, 4)], 0)  # seven and four, one goes
    assert split.slot_experts == [2, 0, 1, 3, 2, -1]


def test_a_giver_becomes_a_helper() -> None:
    """Rank 0 fills up rank 2 with more than it has too many, and gets the rest from rank 1."""
    counts = np.zeros((4, 4), dtype=np.int64)
    counts[3] = 9, 9, 0, 6
    split = split_batch(counts, [[0, -1], [1, -1], [2, -1], [3, -1]])
    assert split.shares == [(0, 3, 5), (2, 6, 1)]
    assert (split.rows, split.pulls) == (6, 1)


def test_out_of_slots() -> None:
    """As near as empty slots allow: a helper without one is passed over."""
    counts = np.array([[6, 6, 0, 0], [0, 0, 0, 0]])
    split = split_batch(counts, [[0, 1], [2, 3]])
    assert (split.shares, split.rows) == ([], 12)
    split = split_batch(np.array([[2, 2, 2, 0, 0, 0], [0, 0, 0, 0, 0, 0]]), [[0, 1, 2, -1], [3, 4, 5, -1]])
    assert split.shares == [(0, 0, 7)]  # three were wanted; the second expert would need another slot
    assert split.rows == 4


def test_what_one_rank_sends() -> None:
    """Seven helpers pull an expert from one rank: its links carry seven."""
    counts = np.zeros((8, 8), dtype=np.int64)
    counts[:, 0] = 1000
    table = [[rank, -1] for rank in range(8)]
    split = split_batch(counts, table, rows_per_pull=1000)
    assert (split.rows_before, split.rows, split.pulls) == (8000, 1000, 7)
    assert not split_batch(counts, table, rows_per_pull=1001).shares
