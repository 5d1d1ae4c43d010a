"""The harness of all benches: turns, warm-up, percentiles, and how long commands wait for their ranks."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from rich.console import Console

from tokenloom.bench import comm, comm_work, mega, setup, train, tune
from tokenloom.bench.harness import Contestant, Measured, percentiles, take_turns
from tokenloom.bench.mega_work import MegaShape
from tokenloom.bench.setup import Run
from tokenloom.bench.train_work import TrainOptions, TrainShape
from tokenloom.bench.workload import CallSizes


def test_everybody_takes_turns() -> None:
    """Everybody is measured once in each of three rounds, every second of them the other way round."""
    order: list[str] = []
    said: list[str] = []

    def sample(who: str) -> dict[str, float]:
        order.append(who)
        return {"call": float(len(order)), "part": 0.5}

    contestants = {
        who: Contestant(partial(sample, who), check=partial(order.append, f"check {who}")) for who in ("a", "b")
    }
    take_turns(contestants, 10, warm_ups=1, first_warm_ups=2, say=said.append)
    a, b = (lambda count, who=who: [who] * count + [f"check {who}"] for who in ("a", "b"))
    # Two that do not count at first, then one; 3, 3 and 4 that do.
    assert order == [*a(5), *b(5), *b(4), *a(4), *a(5), *b(5)]
    assert contestants["a"].measured.samples == {
        "call": [3, 4, 5, 19, 20, 21, 24, 25, 26, 27],
        "part": [0.5] * 10,
    }
    assert said == [f"round {number} of 3: {who}" for number, who in zip("112233", "abbaab", strict=True)]


def test_the_slowest_rank_counts() -> None:
    """By hand: of each sample by itself, and percentiles are values that were measured."""
    by_rank = [Measured({"call": [10.0, 50.0, 10.0, 10.0]}), Measured({"call": [20.0, 20.0, 40.0, 30.0]})]
    assert percentiles(by_rank) == {"call": (30.0, 50.0, 1)}


SHAPE = CallSizes(8, 128, 2, 4)


class Asked(Exception):
    """Raised in place of a run, with its limit in seconds."""


class Pool:
    """Ranks that are asked, and run nothing."""

    def __init__(self, num_ranks: int, device: str) -> None:
        self.num_ranks, self.device = num_ranks, device

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def run(self, *arguments: Any, limit_s: float, **options: Any) -> Any:
        raise Asked(limit_s)


def run(device: str) -> Run:
    return Run(Console(file=io.StringIO()), 2, device, [])


def of_tune(iterations: int) -> None:
    options: dict[str, Any] = {"dtype": "bf16", "backend": "auto"}
    tune.run_tune(run("cpu"), SHAPE, intermediate=64, iterations=iterations, **options)


def of_train(iterations: int) -> None:
    options = TrainOptions("bf16", 0.0, None, True, False, None, False, iterations)
    train.run_train(run("cpu"), TrainShape(8, 32, 16, 4, 2), options)


def of_comm(iterations: int) -> None:
    planned, _ = comm_work.plan_series([SHAPE], 2, "cpu", only=["dispatch/collective/bf16/token/wall"])
    comm.run_comm(run("cpu"), planned, [], iterations)


def of_mega(iterations: int) -> None:
    mega.run_mega(run("cuda"), [MegaShape(256, 128, 4, 2)], [1], iterations)


@pytest.mark.parametrize("command", [of_tune, of_train, of_comm, of_mega])
def test_limits_grow_with_samples(command: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "RankPool", Pool)
    monkeypatch.setattr(setup, "run_setup", lambda *arguments: {})  # it asks for a GPU
    limits = []
    for iterations in (10, 1000):
        with pytest.raises(Asked) as asked:
            command(iterations)
        limits.append(asked.value.args[0])
    assert limits[1] - limits[0] >= 990
    assert limits[0] >= 500
