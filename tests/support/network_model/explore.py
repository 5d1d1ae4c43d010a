"""Many histories of random problems: python -m tests.support.network_model.explore [histories]"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from tests.support.network_model.calls import Shape, Step, in_halves, make_calls, whole
from tests.support.network_model.history import run

NODES = ((2, 2), (3, 2), (2, 1), (4, 1))
"""Nodes, and ranks of each."""
HISTORIES = 10
"""Of each problem: to make one up takes as long as a history."""


@dataclass
class Totals:
    """What was run, and the most of it that was under way at a time."""

    histories: int = 0
    calls: int = 0
    words: int = 0
    most_puts: int = 0

    def add(self, other: Totals) -> None:
        """Count that too."""
        self.histories += other.histories
        self.calls += other.calls
        self.words += other.words
        self.most_puts = max(self.most_puts, other.most_puts)


def random_routing(chance: random.Random, shape: Shape) -> list[tuple[int, ...]]:
    """Ranks that hold the experts of each token of a rank: of a few tokens, or of none, to up to three ranks."""
    most, ranks = chance.choice((0, 1, shape.max_tokens)), range(shape.num_ranks)
    return [tuple(sorted(chance.sample(ranks, chance.randint(0, min(len(ranks), 3))))) for _ in range(most)]


def random_steps(
    chance: random.Random,
    shape: Shape,
    kinds: list[int] | tuple[int, ...] = (),
    faults: Mapping[int, int] | None = None,
) -> list[Step]:
    """Four to six calls, or calls of these kinds, whole or in halves as the shape says, some with a rank at fault."""
    chosen = kinds or [chance.randint(0, 1) for _ in range(chance.randint(4, 6))]
    calls = make_calls(shape, chosen, lambda: random_routing(chance, shape), faults)
    return in_halves(calls, chance.random) if shape.halves else whole(calls)


def random_problem(seed: int) -> tuple[Shape, list[Step]]:
    """Sizes and calls. The queue has room for just what may be under way."""
    chance = random.Random(seed)
    nodes, size = chance.choice(NODES)
    chunks, halves = chance.randint(1, 3), chance.random() < 0.4
    shape = Shape(nodes, size, chunks, chance.choice((1, 2, 4)), halves, depth=chunks * (4 if halves else 2))
    at_fault = chance.choice((-1, -1, chance.randrange(nodes * size)))
    faults = {number: at_fault for number in range(1, 7) if at_fault >= 0 and chance.random() < 0.5}
    return shape, random_steps(chance, shape, faults=faults)


def explore(problems: range) -> Totals:
    """All histories of these problems.

    Raises:
        Violation: a rule is broken.
    """
    totals = Totals()
    for problem in problems:
        shape, steps = random_problem(problem)
        for seed in range(HISTORIES):
            outcome = run(shape, steps, seed)
            totals.add(Totals(1, len(steps) // 2, outcome.words, outcome.most_puts))
    return totals


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    began, found = time.monotonic(), Totals()
    parts = [range(first, min(first + 100, count // HISTORIES)) for first in range(0, count // HISTORIES, 100)]
    with ProcessPoolExecutor() as pool:
        for part in pool.map(explore, parts):
            found.add(part)
    print(f"{found}, no rule broken, {time.monotonic() - began:.1f} s")
