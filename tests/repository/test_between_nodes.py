"""microbench/between_nodes.py judges what it measures."""

from __future__ import annotations

from typing import Any

import pytest

from microbench.between_nodes import BOTH, INSIDE, PLAIN, RAIL, broken, ratios_of


def found(**changes: float) -> dict[str, Any]:
    """Measurements of which every promise just holds."""
    us = {BOTH: 125.0, RAIL: 100.0, INSIDE: 90.0, PLAIN: 250.0, "GIN dispatch": 25.0, "GIN dispatch, no tokens": 10.0}
    us |= {"GIN combine": 50.0, "GIN combine, no tokens": 20.0}
    return {"us": us | changes, "rows": {BOTH: 1.0, PLAIN: 2.0}}


def test_promises_that_just_hold() -> None:
    assert len(ratios_of(found())) == 5
    assert broken(ratios_of(found()), on_gpus=True) == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({RAIL: 99.0}, "both calls / the longer"),
        ({PLAIN: 249.0}, "time of plain"),
        ({"GIN dispatch": 25.1}, "GIN dispatch"),
        ({"GIN combine": 50.1}, "GIN combine"),
    ],
)
def test_broken_promises(changes: dict[str, float], what: str) -> None:
    """Each by itself. Times of processes on a CPU say nothing."""
    ratios = ratios_of(found(**changes))
    (failing,) = broken(ratios, on_gpus=True)
    assert failing.what.startswith(what)
    assert broken(ratios, on_gpus=False) == []


def test_rows_are_judged_everywhere() -> None:
    measured = found()
    measured["rows"][PLAIN] = 1.9
    (failing,) = broken(ratios_of(measured), on_gpus=False)
    assert "at least 2" in str(failing)
    assert failing.what.startswith("rows of plain")
