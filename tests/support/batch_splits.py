"""Batches and placements for tests of how a batch is split."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.support.placements import drawn_placement
from tokenloom.plan import Plan

Table = list[list[int]]


class Batch(NamedTuple):
    """What a split is made of; see :func:`tokenloom.ops.split_batch.split_batch`."""

    counts: np.ndarray
    table: Table
    masked: tuple[int, ...]
    always: bool
    rows_per_pull: int


def drawn_counts(generator: np.random.Generator, num_ranks: int, num_experts: int) -> np.ndarray:
    """Routes of each source to each expert: even, skewed, all to one expert, or none of some sources."""
    popularity = np.exp(generator.choice([0.0, 0.5, 1.0, 2.0, 6.0]) * generator.standard_normal(num_experts))
    tokens = generator.integers(0, generator.choice([2, 20, 300]), num_ranks)
    return np.stack([generator.multinomial(each, popularity / popularity.sum()) for each in tokens])


def drawn_table(generator: np.random.Generator, num_ranks: int, num_experts: int, spare: int | None = None) -> Table:
    """A placement with replicas, empty slots, both or neither.

    Args:
        spare: slots of a rank beyond its even share of experts, up to three if None.
    """
    spare = int(generator.integers(0, 4)) if spare is None else spare
    local = num_experts // num_ranks
    if generator.random() < 0.5:
        return [[*range(rank * local, (rank + 1) * local), *[-1] * spare] for rank in range(num_ranks)]
    plan = Plan(num_ranks, num_experts, 8, 1, 1)
    return drawn_placement(plan, spare, int(generator.integers(1 << 30))).to_tensor().tolist()


def drawn_batch(seed: int, sizes: tuple[int, int, int] | None = None) -> Batch:
    """A batch, its placement and its options.

    Args:
        sizes: ranks, experts, and spare slots of a rank; drawn too if None.
    """
    generator = np.random.default_rng(seed)
    num_ranks, num_experts, spare = sizes or (int(generator.choice([1, 2, 3, 4, 8])), 0, None)
    if sizes is None:
        num_experts = num_ranks * int(generator.choice([1, 2, 4]))
    table = drawn_table(generator, num_ranks, num_experts, spare)
    counts = drawn_counts(generator, num_ranks, num_experts)
    masked = tuple(rank for rank in range(1, num_ranks) if generator.random() < 0.2)
    counts[list(masked)] = 0
    return Batch(counts, table, masked, bool(generator.random() < 0.5), int(generator.choice([0, 1, 5, 40])))


def flattened(table: Table, masked: tuple[int, ...]) -> list[int]:
    """The expert in each slot of all ranks, those of masked ones left out."""
    return [-1 if rank in masked else each for rank, row in enumerate(table) for each in row]
