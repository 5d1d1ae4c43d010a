"""microbench/between_nodes.py judges what it measures, and refuses ranks on which there is nothing to measure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from microbench import between_nodes
from microbench.between_nodes import BOTH, INSIDE, PLAIN, RAIL, broken, ratios_of
from tokenloom.backends.nodes.registration import why_no_network_on
from tokenloom.runtime.topology import pretended


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "4", "--ranks-per-node", "1"], "--ranks-per-node is 1, expected 2 or more"),
        (["--ranks", "2", "--ranks-per-node", "0"], "--ranks-per-node is 0"),
        (["--ranks", "2"], "2 rank(s) do not make two or more nodes of 2"),
        (["--ranks", "5"], "5 rank(s) do not"),
        (["--ranks", "0"], "0 rank(s) do not"),
        (["--ranks", "6"], "6 ranks cannot have equally many of 256 experts"),
    ],
)
def test_ranks_with_nothing_to_measure(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused by one line before a rank starts, and not by a rank's traceback."""

    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(between_nodes, "RankPool", started)
    monkeypatch.setattr("sys.argv", ["between_nodes.py", *options])
    with pytest.raises(SystemExit) as ended:
        between_nodes.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_as_a_script(tmp_path: Path) -> None:
    """As its own text and all_figures.py start it: no other folder is on the path than that of the script."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, between_nodes.__file__, "--ranks-per-node", "1"]
    ended = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2, ended.stderr
    assert "error: --ranks-per-node is 1" in ended.stderr


@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(4, 1), (2, 2), (4, 2), (8, 4), (8, 2)])
def test_ranks_that_the_backend_takes(ranks: int, ranks_per_node: int) -> None:
    """The script refuses no nodes that the backend would take, and starts none that it would not."""
    topology = pretended(ranks, ranks_per_node)
    assert (between_nodes.why_not(ranks, ranks_per_node) is None) == (why_no_network_on(topology) is None)
