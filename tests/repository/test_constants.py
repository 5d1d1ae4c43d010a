"""microbench/constants.py reads what varies, and measures kernels that have it."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from microbench import constants
from microbench.constants import measure, parse_variant
from tests.support.on_ranks import on_ranks
from tokenloom.bench.comm_work import CallSeries
from tokenloom.bench.workload import CallSizes, Operation
from tokenloom.kernels.combine import launch
from tokenloom.runtime.processes import RankContext

SHAPE = CallSizes(num_tokens=20, hidden=128, top_k=2, num_experts=8)
OPERATIONS = (
    Operation("combine", "bf16", "token"),
    Operation("combine", "bf16", "slots"),
    Operation("dispatch", "bf16", "expert"),
)
SERIES = [CallSeries(SHAPE, each, "nvlink", "graph", num_sms=2) for each in OPERATIONS]


def test_what_varies() -> None:
    assert parse_variant("LONE_ROWS=0 COPY_WARPS={0:2}") == {"LONE_ROWS": 0, "COPY_WARPS": {0: 2}}


@pytest.mark.parametrize("text", ["LONELY_ROWS=1", "LONE_ROWS=1 LONELY_ROWS=1"])
def test_unknown_constants(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="LONELY_ROWS"):
        parse_variant(text)


def test_kernels_have_them() -> None:
    """One for each combine; afterwards constants are what they were."""
    before = launch.CHUNK_SHIFT
    found = [dict(spec.shape) for spec in constants.combines(SERIES, {"CHUNK_SHIFT": before + 1}, 1)]
    assert [shape["chunk_shift"] for shape in found] == [before + 1] * 2
    assert before == launch.CHUNK_SHIFT


def test_samples_are_of_the_right_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants count when a call is made; every series of the first variant comes before those of the next."""

    def sampler(context: Any, maker: Any, series: CallSeries) -> Any:
        value = 1000.0 * launch.LONE_ROWS + SERIES.index(series)
        return lambda: {"call": value}

    monkeypatch.setattr(constants, "make_inputs", lambda context, shape: None)
    monkeypatch.setattr(constants, "make_sampler", sampler)
    context: Any = None
    samples = measure(context, SERIES, [{"LONE_ROWS": 7}, {"LONE_ROWS": 9}], rounds=2)
    number = 2 * constants.REPLAYS
    assert samples == [[{"call": value}] * number for value in (7000.0, 7001.0, 7002.0, 9000.0, 9001.0, 9002.0)]


@on_ranks("hoppers")
def test_every_call_of_every_variant(context: RankContext) -> None:
    variants = [{}, {"LONE_ROWS": 1, "COPY_WARPS": {0: 2}}]
    samples = measure(context, SERIES, variants, rounds=2)
    assert [len(each) for each in samples] == [2 * constants.REPLAYS] * len(SERIES) * len(variants)
    assert all(sample["call"] > 0 for each in samples for sample in each)
