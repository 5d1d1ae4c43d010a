"""Mistakes in a command are told in one line: what came, what was expected, what to do. Help is plain."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import typer
from typer.testing import CliRunner

from tokenloom.backends import registry
from tokenloom.bench import comm_work
from tokenloom.bench.network import check
from tokenloom.cli import app, terminal, usage
from tokenloom.cli.terminal import FAILED, MISUSED
from tokenloom.errors import InvalidArgument
from tokenloom.runtime.processes import RankFailed, RankPool

ROOT = Path(__file__).parents[2]
SIZES = "--tokens 64 --hidden 64 --intermediate 64 --num-experts 8"
NO_GPUS = pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")

MISTAKES = [
    ("--bogus", "there is no option --bogus; see tokenloom --help"),
    ("doctor --jsn", "there is no option --jsn; did you mean --json?"),
    ("bench bogus", "there is no command 'bogus', expected one of comm, mega, train; see tokenloom bench --help"),
    ("demo again", "'again' is no option, and tokenloom demo takes no such argument; see tokenloom demo --help"),
    ("demo --steps", "--steps has no value; see tokenloom demo --help"),
    ("demo --steps 0", "--steps is 0, expected a whole number of at least 1; see tokenloom demo --help"),
    ("demo --steps 1.5", "--steps is 1.5, expected a whole number of at least 1; see tokenloom demo --help"),
    ("demo --device tpu", "--device is tpu, expected one of cpu, cuda; see tokenloom demo --help"),
    ("demo --ranks 1", "--ranks is 1, expected a whole number of at least 2; see tokenloom demo --help"),
    (
        "demo --device cpu --ranks 4 --ranks-per-node 3",
        "--ranks-per-node is 3, expected a divisor of the 4 ranks; see tokenloom demo --help",
    ),
    (f"tune {SIZES}", "--top-k is missing; see tokenloom tune --help"),
    (
        f"tune {SIZES} --top-k 2 --max-vio nan",
        "--max-vio is nan, expected a number of at least 0; see tokenloom tune --help",
    ),
    (
        f"tune {SIZES} --top-k 2 --max-vio inf",
        "--max-vio is inf, expected a number of at least 0; see tokenloom tune --help",
    ),
    (
        f"tune {SIZES} --top-k 9 --device cpu",
        "--top-k is 9, expected at most 8, as there are no more experts to choose; see tokenloom tune --help",
    ),
    ("bench comm --beside-us 5", "--beside-us is 5, but it is for halves; give --halves too"),
    (
        "bench comm --tokens 8,many",
        "--tokens is '8,many', expected whole numbers above 0 with commas between; see tokenloom bench comm --help",
    ),
    ("bench comm --json /no/such/x.json", "--json is /no/such/x.json, but there is no folder /no/such; make it first"),
    ("bench comm --json /", "--json is /, which cannot be written (Is a directory); pass another file"),
    ("plan --constants /no/such", "--constants is /no/such, but there is no such file; pass one that exists"),
    (
        "plan --nodes 2 --budget -1",
        "--budget is -1, expected a number of at least 0 and at most 1,073,741,824; see tokenloom plan --help",
    ),
    (
        "check-network --seed -1",
        "--seed is -1, expected a whole number from 0 to 4294967295; see tokenloom check-network --help",
    ),
    (
        "check-network --ranks 4 --device cpu --constants c.json",
        "--constants is c.json, but it needs two nodes and all ranks are on one; pass --ranks-per-node 2",
    ),
    (
        "check-network --ranks 3 --device cpu --ranks-per-node 3 --constants c.json",
        "--constants is c.json, but it needs two nodes and all ranks are on one; pass --ranks-per-node 1",
    ),
]


@pytest.mark.parametrize(("command", "said"), MISTAKES, ids=[command for command, _ in MISTAKES])
def test_a_mistake_is_one_line(command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 2, nothing on stdout, and no process is started."""
    monkeypatch.chdir(tmp_path)
    with mock.patch.object(RankPool, "start", side_effect=AssertionError("ranks were started")):
        done = CliRunner().invoke(app.app, shlex.split(command), prog_name="tokenloom")
    assert (done.exit_code, done.stdout, done.stderr) == (MISUSED, "", f"tokenloom: {said}\n")


def test_as_a_process() -> None:
    """It is the same without the test's runner: typer prints no box around it, and no traceback."""
    command = [sys.executable, "-m", "tokenloom", "bench", "comm", "--case", "huge"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (MISUSED, "")
    known = "decode, prefill, small, medium"
    assert done.stderr == (
        f"tokenloom: --case is 'huge', expected one of {known}; see python -m tokenloom bench comm --help\n"
    )


@pytest.mark.parametrize("words", [[], ["bench"], ["cache"]])
def test_a_group_alone_shows_its_help(words: list[str]) -> None:
    done = CliRunner().invoke(app.app, words, prog_name="tokenloom")
    assert (done.exit_code, done.stdout) == (MISUSED, "")
    assert done.stderr == CliRunner().invoke(app.app, [*words, "--help"], prog_name="tokenloom").stdout


@pytest.mark.parametrize(
    ("said", "status", "shown"),
    [
        ("InvalidArgument: timeout_s is 7, expected more", MISUSED, "--timeout-s is 7, expected more; see tokenloom"),
        ("BackendUnavailable: no such card", FAILED, "BackendUnavailable: no such card\n"),
    ],
)
def test_mistakes_that_ranks_find(said: str, status: int, shown: str) -> None:
    """What a rank was given wrong is a mistake of the user's too; what it lacks is not."""
    failed = RankFailed(0, "rank 0 of 2 failed:", "Traceback ...", said)
    with mock.patch.object(check, "run_on_own_ranks", side_effect=failed):
        done = CliRunner().invoke(app.app, ["check-network", "--ranks", "2", "--device", "cpu"], prog_name="tokenloom")
    assert done.exit_code == status
    assert done.stderr.startswith(f"tokenloom: {shown}")
    assert "Traceback" not in done.stderr


@NO_GPUS
def test_options_instead_of_arguments() -> None:
    """The cure of an error of ours is in words that the command knows."""
    done = CliRunner().invoke(app.app, shlex.split(f"tune {SIZES} --top-k 2 --backend nvlink"))
    assert done.exit_code == FAILED, "it is no mistake on another machine"
    assert done.stderr.endswith("it needs a GPU, the tensors are on cpu; use --backend auto\n")


def test_words_that_are_no_options_stay() -> None:
    command = SimpleNamespace(params=[SimpleNamespace(name="top_k", opts=["--top-k"])])
    group: Any = SimpleNamespace(get_command=lambda ctx, name: command)
    ctx: Any = SimpleNamespace(invoked_subcommand="plan")
    text = "top_k is 9, use layout='token' or top_k=3; hidden is 5"
    assert usage.in_options(text, group, ctx) == "--top-k is 9, use layout='token' or --top-k 3; hidden is 5"


# -- help ---------------------------------------------------------------------------------------------------------


def commands(group: Any = None, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command and group."""
    group = typer.main.get_command(app.app) if group is None else group
    yield words
    for name, each in group.commands.items():
        if hasattr(each, "commands"):
            yield from commands(each, (*words, name))
        else:
            yield (*words, name)


ALL = list(commands())


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_help_is_plain(words: tuple[str, ...]) -> None:
    """Flags stand alone, options have the kind of their value behind them, in no jargon of typer's. No line is cut."""
    done = CliRunner().invoke(app.app, [*words, "--help"], prog_name="tokenloom")
    assert done.exit_code == 0
    assert not re.search(r"<\w+|\[x|…|\w\.\.\.$|[│╭]", done.stdout, re.MULTILINE)
    assert re.search(r"^  --help +Show this message", done.stdout, re.MULTILINE)


def test_help_is_as_wide_as_there_is_room() -> None:
    command = [sys.executable, "-m", "tokenloom", "bench", "comm", "--help"]
    env = {**os.environ, "COLUMNS": "70"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=True)
    assert max(map(len, done.stdout.splitlines())) <= 70


def test_commands_have_all_of_their_first_sentence() -> None:
    shown = " ".join(CliRunner().invoke(app.app, ["--help"]).stdout.split())
    for each in typer.main.get_command(app.app).commands.values():  # type: ignore[attr-defined]
        assert " ".join(each.help.partition("\n\n")[0].split()) in shown


@pytest.mark.parametrize(
    ("words", "flag"), [("bench comm", "--list"), ("bench comm", "--halves"), ("doctor", "--json")]
)
def test_flags_have_no_type(words: str, flag: str) -> None:
    shown = CliRunner().invoke(app.app, [*words.split(), "--help"]).stdout
    assert re.search(rf"^  {flag} +[A-Z]", shown, re.MULTILINE)


def test_bench_comm_names_everybody() -> None:
    """All backends of a communicator, in the help and where a name is unknown."""
    who = [*registry.names(), "deep_ep"]
    assert comm_work.names() == who
    shown = CliRunner().invoke(app.app, ["bench", "comm", "--help"], env={"COLUMNS": "200"}).stdout
    about = " ".join(shown.partition("--backends")[2].partition("--num-sms")[0].split())
    assert all(name in about for name in who)
    done = CliRunner().invoke(app.app, ["bench", "comm", "--backends", "mpi"])
    assert f"--backends is 'mpi', expected one of {', '.join(who)}" in done.stderr
    usual = about.partition("Default: those of ")[2]
    assert [name in usual for name in who] == [name in comm_work.usual() for name in who]


# -- width --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "width"), [("70", 70), ("200", 200), (None, 120), ("0", 120), ("5", 40)])
def test_width_where_there_is_no_terminal(columns: str | None, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """COLUMNS counts in a pipe too. Without it there is room for most tables in one piece."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert terminal.console().width == width


def test_an_error_of_ours_keeps_its_cure() -> None:
    """Only an error that has none is told with the help."""
    for text, whole in (("a is 1; pass 2", "a is 1; pass 2"), ("a is 1", "a is 1; see tokenloom plan --help")):
        with mock.patch("tokenloom.bench.plan.run_plan", side_effect=InvalidArgument(text)):
            done = CliRunner().invoke(app.app, ["plan"], prog_name="tokenloom")
        assert (done.exit_code, done.stderr) == (MISUSED, f"tokenloom: {whole}\n")
