"""microbench/constants.py reads what varies, and measures kernels that have it."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from microbench import constants
from microbench.constants import Task, measure, parse_call, parse_variant
from tests.conftest import Ranks
from tokenloom.bench.common.shape import Shape
from tokenloom.kernels.combine import launch
from tokenloom.runtime.processes import RankContext

LARGEST = Shape(num_tokens=20, hidden=128, top_k=2, num_experts=8)
CALLS = (("combine", "token", 20), ("combine", "slots", 7), ("dispatch", "expert", 20))


def test_what_varies() -> None:
    assert parse_variant("LONE_ROWS=0 COPY_WARPS={0:2}") == {"LONE_ROWS": 0, "COPY_WARPS": {0: 2}}
    assert parse_call("combine/token/4096") == ("combine", "token", 4096)


@pytest.mark.parametrize("text", ["LONELY_ROWS=1", "LONE_ROWS=1 LONELY_ROWS=1"])
def test_unknown_constants(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="LONELY_ROWS"):
        parse_variant(text)


def test_unknown_operations() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="reduce"):
        parse_call("reduce/token/1")


def test_kernels_are_compiled_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each layout of a combine; afterwards constants are what they were."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(constants.cache, "get", lambda spec: found.append(dict(spec.shape)))
    before = launch.LONE_ROWS
    constants.compile_combines(Task(CALLS, LARGEST, num_sms=2, rounds=1), 1, {"LONE_ROWS": before + 1})
    assert [shape["lone_rows"] for shape in found] == [before + 1] * 2
    assert before == launch.LONE_ROWS


def test_every_call_of_every_variant(hoppers: Ranks) -> None:
    hoppers.run(check_measure, [{}, {"LONE_ROWS": 1, "COPY_WARPS": {0: 2}}])


def check_measure(context: RankContext, variants: list[dict[str, Any]]) -> None:
    times = measure(context, Task(CALLS, LARGEST, num_sms=2, rounds=2), variants)
    assert [len(each) for each in times] == [2 * constants.REPLAYS] * len(CALLS) * len(variants)
    assert all(time > 0 for each in times for time in each)
