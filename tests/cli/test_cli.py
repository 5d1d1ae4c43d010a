"""The command line as a user runs it: new processes of ``python -m tokenloom``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tokenloom import __version__
from tokenloom.backends.registry import BACKENDS
from tokenloom.cli import app
from tokenloom.demo import check
from tokenloom.runtime.processes import RankContext

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "tokenloom"]
LIMIT_S = 120.0
INTERRUPT_LIMIT_S = 15.0


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)


def test_help_lists_the_commands() -> None:
    """The first thing a user types; also that running from the tree, not installed, works."""
    done = run("--help")
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in ("demo", "doctor", "bench", "cache", "--version"))


def test_version() -> None:
    """From the one place that has it."""
    done = CliRunner().invoke(app.app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"tokenloom {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["demo", "--ranks", "1"], "--ranks"),  # nothing to spread over
        (["demo", "--steps", "0"], "--steps"),
        (["demo", "--device", "tpu"], "--device"),
        (["demo", "--device", "cuda", "--ranks", "1000"], "--ranks"),  # more than there are GPUs
        (["bench", "comm", "--case", "huge"], "--case"),
        (["bench", "comm", "--json", "/no/such/folder/rows.json"], "--json"),  # said before minutes of measuring
    ],
)
def test_bad_options_are_named(arguments: list[str], option: str) -> None:
    """Exit code 2, the option at fault named, and nothing started."""
    done = CliRunner().invoke(app.app, arguments)
    assert done.exit_code == 2
    assert option in done.output
    assert "Traceback" not in done.output


def test_an_error_of_ours_is_a_message() -> None:
    """What is raised on purpose says what to do: exit code 1, on stderr, without a traceback."""
    done = run("bench", "comm", "--case", "small", "--ranks", "3")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "num_experts is 8, not divisible by the 3 ranks" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor() -> None:
    """The tables for people: the versions, every backend, and why the better ones were not picked."""
    done = run("doctor")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for word in ("torch", "NVRTC", "NCCL", "picked by auto", *BACKENDS):
        assert word in done.stdout


def test_bench_comm_lists_its_cases() -> None:
    """The names that --case takes."""
    done = CliRunner().invoke(app.app, ["bench", "comm", "--list"])
    assert done.exit_code == 0
    assert "4096x7168 top-8 of 256" in done.stdout
    assert "128x7168 top-8 of 256" in done.stdout


def test_demo_passes_and_learns() -> None:
    """All three parts on two ranks, and the training is real: the loss falls by more than one nat in 15 steps."""
    done = run("demo", "--ranks", "2", "--device", "cpu", "--steps", "15")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "FAIL" not in done.stdout
    assert len(re.findall(r"PASS", done.stdout)) == 7 + 3 + 1  # check, training, verdict
    found = re.search(r"Loss ([\d.]+) -> ([\d.]+) nats", done.stdout)
    assert found
    first, last = map(float, found.groups())
    assert last < first - 1
    shares = re.search(r"Dispatch took (\d+)% and combine (\d+)% of a step", done.stdout)
    assert shares
    dispatch, combine = map(int, shares.groups())
    assert dispatch > 0
    assert combine > 0
    assert dispatch + combine < 100


def fail_on_rank_1(context: RankContext, *arguments: Any) -> Any:
    if context.rank == 1:
        raise ValueError("injected on rank 1")
    return "", []


def test_a_failing_rank_ends_the_demo_with_its_own_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not with that of another rank, nor with one of the command line's own; and no process stays."""
    monkeypatch.setattr(check, "check_on_rank", fail_on_rank_1)
    monkeypatch.setattr(sys, "argv", ["tokenloom", "demo", "--ranks", "2", "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 1
    shown = capfd.readouterr().err
    assert "rank 1 of 2 failed" in shown
    assert "in fail_on_rank_1" in shown
    assert "ValueError: injected on rank 1" in shown
    assert shown.count("Traceback") == 1


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="counts processes in /proc")
def test_ctrl_c_ends_the_demo_cleanly() -> None:
    """During training: exit code 130 within seconds, a line instead of tracebacks, and no process left behind."""
    process = subprocess.Popen(
        [*COMMAND, "demo", "--ranks", "2", "--device", "cpu", "--steps", "100000"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts what runs in its background with the signal ignored, the tests maybe, and so their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        assert any("Training a language model" in line for line in process.stdout)
        time.sleep(2.0)  # into the training itself
        assert len(session_members(process.pid)) >= 3, "the command and its ranks"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, errors = process.communicate(timeout=INTERRUPT_LIMIT_S)
        assert process.returncode == app.INTERRUPTED
        assert errors == "tokenloom: interrupted\n"
        deadline = time.monotonic() + INTERRUPT_LIMIT_S
        while session_members(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert session_members(process.pid) == []
    finally:
        for pid in session_members(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def session_members(session: int) -> list[int]:
    """Living processes of a session, by /proc: the fields after the command's name are state, ppid, pgrp, session."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue  # gone meanwhile
        if int(its_session) == session and state != "Z":
            members.append(int(stat.parent.name))
    return members
