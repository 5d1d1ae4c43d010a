"""How long commands wait for their ranks: longer for more samples, so that a long run does not lose its numbers."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from tokenloom.bench import comm, comm_work, mega, setup, train, tune
from tokenloom.bench.mega_work import MegaShape
from tokenloom.bench.setup import Run
from tokenloom.bench.train_work import TrainOptions, TrainShape
from tokenloom.bench.workload import Shape

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


def run(device: str) -> Run:
    return Run(Console(file=io.StringIO()), 2, device, [])


def of_tune(iterations: int) -> None:
    options: dict[str, Any] = {"dtype": "bf16", "skew": 0.0, "backend": "auto"}
    tune.run_tune(run("cpu"), SHAPE, intermediate=64, iterations=iterations, **options)


def of_train(iterations: int) -> None:
    options = TrainOptions("bf16", 0.0, None, True, False, None, False, iterations)
    train.run_train(run("cpu"), TrainShape(8, 32, 16, 4, 2), options)


def of_comm(iterations: int) -> None:
    planned, _ = comm_work.plan_series([SHAPE], 2, "cpu", only=["dispatch/collective/bf16/token/wall"])
    comm.run_comm(run("cpu"), planned, [], iterations)


def of_mega(iterations: int) -> None:
    mega.run_mega(run("cuda"), MegaShape(256, 128, 4, 2), [1], iterations)


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
