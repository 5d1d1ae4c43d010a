"""What the commands that measure refuse before anything starts: one line, which names what is wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

from tokenloom.cli import app
from tokenloom.cli.terminal import FAILED, MISUSED
from tokenloom.runtime.processes import RankPool

REFUSED: dict[str, list[tuple[list[str], str]]] = {
    "bench comm --device cpu": [
        (["--backends", "nvlink,mpi"], "--backends"),
        (["--backends", ""], "--backends"),
        (["--tokens", "0"], "--tokens"),
        (["--num-sms", "-4"], "--num-sms"),
        (["--hidden", "0"], "--hidden"),
        (["--plot", "chart.svg"], "ends in .png"),
        (["--ranks", "4", "--ranks-per-node", "0"], "--ranks-per-node"),
        (["--case", "huge"], "--case is 'huge', expected one of"),
        (["--num-sms", "65"], "--num-sms is 65, expected 0 to 64"),
        (["--timing", "graph,eager"], "--timing is 'graph', expected wall or eager on cpu"),
        (["--timing", "eager", "--halves"], "--timing is 'eager', expected wall for halves on cpu"),
        (["--halves", "--beside-us", "0"], "--beside-us"),
        (["--only", "dispatch/collective,"], "expected no empty part"),
        (["--only", "no/such"], "--only is 'no/such', expected a part of a row's name"),
        (["--top-k", "9", "--num-experts", "8"], "--top-k is 9, expected at most 8"),
        (["--hidden", "200"], "--hidden is 200, expected a multiple of 128 for FP8 rows; leave them out"),
        (["--backends", "nvlink"], "nothing to measure, because nvlink"),
        (["--max-vio", "1,-1"], "--max-vio is -1, expected a number of at least 0"),
        (["--max-vio", "0.2,much"], "--max-vio is much, expected a number of at least 0"),
        (["--max-vio", "3", "--num-experts", "8", "--top-k", "2"], "--max-vio is 3, expected less than 3"),
        (["--spare-slots", "0"], "--spare-slots is 0, expected a whole number of at least 1"),
    ],
    "bench mega": [
        (["--against", "somebody"], "--against"),
        (["--plot", "chart.svg"], "ends in .png"),
        (["--trace", "/no/such/folder/trace.json"], "--trace"),
        (["--shared-experts", "-1"], "--shared-experts"),
        (["--tokens", "8,x"], "--tokens"),
        (["--spare-slots", "0"], "--spare-slots is 0, expected a whole number of at least 1"),
    ],
    "bench train --device cpu --ranks 2": [
        (["--thiek", "96,32,24,16"], "expected five whole numbers above 0, T,H,I,E,K"),
        (["--thiek", "96,32,24,16,3,1"], "--thiek"),
        (["--thiek", "96,32,24,16,many"], "--thiek"),
        (["--thiek", "96,32,0,16,3"], "--thiek"),
        (["--thiek", "97,32,24,16,3"], "97 tokens, those of all ranks, expected a multiple of the 2 ranks; pass 98"),
        (["--thiek", "96,32,24,15,3"], "--num-experts is 15, expected a multiple of the 2 ranks"),
        (["--thiek", "96,32,24,2,3"], "--top-k is 3, expected at most 2"),
        (["--thiek", "96,8,24,24,3", "--max-vio", "1"], "--hidden is 8, expected at least 24"),
        (["--thiek", "96,32,24,24,3", "--dtype", "fp16"], "--dtype"),
        (["--thiek", "96,32,24,24,3", "--strategy", "dedup"], "expected two names, such as dedup,dedup"),
        (["--thiek", "96,32,24,24,3", "--strategy", "dedup,pigeon"], "strategy of combine is 'pigeon'"),
        (["--thiek", "96,32,24,24,3", "--pool-rows", "0"], "--pool-rows"),
        (["--thiek", "96,32,24,24,3", "--json", "/no/such/folder/rows.json"], "--json"),
        (["--thiek", "96,32,24,24,3", "--spare-slots", "-1"], "--spare-slots is -1, expected a whole number"),
        ([], "missing, expected all five sizes"),
        (["--tokens", "96", "--hidden", "32", "--top-k", "3"], "--intermediate, --num-experts"),
        (["--thiek", "96,32,24,24,3", "--hidden", "64", "--top-k", "3"], "leave out --hidden, --top-k"),
        (["--tokens", "0", "--hidden", "32"], "--tokens"),
    ],
    "tune --tokens 64 --hidden 64 --intermediate 64 --num-experts 8 --top-k 2 --device cpu": [
        (["--ranks", "3"], "--num-experts is 8, expected a multiple of the 3 ranks"),
        (["--backend", "pigeon"], "--backend"),
        (["--dtype", "fp8"], "--dtype"),
    ],
    "check-network --device cpu": [
        (["--ranks", "4", "--ranks-per-node", "3"], "--ranks-per-node"),
        (["--timeout-s", "0"], "--timeout-s"),
        (["--constants", "/no/such/folder/constants.json"], "--constants"),
        (["--seed", "18446744073709551616"], "--seed"),
    ],
    "plan": [
        (["--nodes", "0"], "--nodes"),
        (["--tokens", "128,x"], "--tokens"),
        (["--dtype", "fp32"], "--dtype"),
        (["--budget", "100"], "give --nodes too"),
        (["--budget", "inf", "--nodes", "8"], "--budget"),
        (["--routing", "/no/such/file"], "--routing"),
        (
            ["--routing", __file__, "--nodes", "4", "--tokens", "8"],
            "what --nodes, --tokens would; leave out one of them",
        ),
        (["--constants", __file__, "--put-us", "1"], "what --put-us would; leave out one of them"),
        (["--plot", "chart.svg"], "ends in .png"),
        (["--json", "/no/such/folder/plan.json"], "--json"),
        (["--hidden", "100"], "--hidden is 100, expected a multiple of 128 for FP8; pass --dtype bf16"),
        (["--num-experts", "4"], "--top-k is 8, expected at most 4"),
        (["--ranks-per-node", "4096"], "--ranks-per-node is 4096, expected at most 2048"),
        (["--nic-gbytes-per-s", "0"], "--nic-gbytes-per-s is 0, expected a number above 0"),
    ],
}
"""Options, and what is said of them, by command."""


def refused(command: list[str]) -> tuple[int, str]:
    """The exit status and what is printed, of a command that starts no process and ends without a traceback."""
    with mock.patch.object(RankPool, "start", side_effect=AssertionError("ranks were started")):
        done = CliRunner().invoke(app.app, command)
    assert isinstance(done.exception, SystemExit)
    assert done.stdout == ""
    return done.exit_code, " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [(command, *each) for command, refusals in REFUSED.items() for each in refusals],
)
def test_bad_options_start_nothing(command: str, arguments: list[str], said: str) -> None:
    status, shown = refused([*command.split(), *arguments])
    assert status == (FAILED if "nothing to measure" in said else MISUSED)
    assert said in shown


@pytest.mark.parametrize("command", ["bench comm --device cpu", "plan"])
def test_a_chart_without_matplotlib_starts_nothing(command: str, tmp_path: Path) -> None:
    """matplotlib is no dependency; who asks for a chart without it learns so before minutes of measuring."""
    with mock.patch.dict(sys.modules, {"matplotlib.figure": None}):
        status, shown = refused([*command.split(), "--plot", str(tmp_path / "chart.png")])
    assert status == FAILED
    assert "--plot needs matplotlib" in shown
    assert "pip install" in shown
