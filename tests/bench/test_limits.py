"""How long commands wait for their ranks: longer for more samples, so that a long run does not lose its numbers."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from tokenloom.bench import tune
from tokenloom.bench.comm import measure, series
from tokenloom.bench.common.shape import Shape
from tokenloom.bench.mega import run as mega_run
from tokenloom.bench.mega.work import MegaShape
from tokenloom.bench.train import run as train_run
from tokenloom.bench.train.work import TrainOptions, TrainShape

SHAPE = Shape(8, 128, 2, 4)


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


def of_tune(iterations: int) -> None:
    options: dict[str, Any] = {"dtype": "bf16", "skew": 0.0, "backend": "auto", "command": []}
    tune.run_tune(Console(file=io.StringIO()), 2, "cpu", SHAPE, intermediate=64, iterations=iterations, **options)


def of_train(iterations: int) -> None:
    options = TrainOptions("bf16", 0.0, None, True, False, None, False, iterations)
    train_run.run_train(Console(file=io.StringIO()), 2, "cpu", TrainShape(8, 32, 16, 4, 2), options, command=[])


def of_comm(iterations: int) -> None:
    planned, _ = series.plan_series([SHAPE], 2, "cpu", only=["dispatch/collective/ep2/t8/h128/k2/bf16/token/wall"])
    pool: Any = Pool(2, "cpu")
    next(measure.measure(pool, planned, iterations))


def of_mega(iterations: int) -> None:
    shape = MegaShape(256, 128, 4, 2)
    mega_run.run_mega(Console(file=io.StringIO()), 2, shape, [1], command=[], iterations=iterations)


@pytest.mark.parametrize("command", [of_tune, of_train, of_comm, of_mega])
def test_limits_grow_with_samples(command: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tune, train_run, mega_run):
        monkeypatch.setattr(module, "RankPool", Pool)
    monkeypatch.setattr(mega_run, "run_setup", lambda *arguments: {})  # it asks for a GPU
    limits = []
    for iterations in (10, 1000):
        with pytest.raises(Asked) as asked:
            command(iterations)
        limits.append(asked.value.args[0])
    assert limits[1] - limits[0] >= 990
    assert limits[0] >= 500
