"""MegaMoE's kernels on the emulator, in random orders: dispatch, lists, both GEMMs, what goes home, sums."""

from __future__ import annotations

import pytest

from tests.inference.test_mega_moe import check_case, check_many_calls
from tests.support import emulator

pytestmark = pytest.mark.skipif(emulator.CXX is None, reason="no g++")

FAST = "one block"
SLOW = ("plain", "fp8", "repeats", "top8", "masked", "gpt_oss", "biases", "two shared experts")


@pytest.mark.parametrize("name", [FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_mega(name: str) -> None:
    emulator.ranks(2).run(check_case, name)


@pytest.mark.slow
def test_four_ranks() -> None:
    emulator.ranks(4).run(check_case, "gated relu2")


@pytest.mark.slow
def test_many_calls_on_one_buffer() -> None:
    emulator.ranks(2).run(check_many_calls, 60)
