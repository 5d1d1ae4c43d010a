"""The command line as a whole: its help, its exit codes, and the demo through it."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from tests.cli.borrowed import borrowed
from tokenloom import __version__
from tokenloom.cli import app, options, terminal
from tokenloom.cli.terminal import FAILED, INTERRUPTED, MISUSED
from tokenloom.demo import check, run
from tokenloom.runtime.processes import RankContext, RankPool

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "tokenloom"]
LIMIT_S = 120.0
INTERRUPT_LIMIT_S = 60.0
"""It takes a second where nothing else runs."""


def test_help_lists_the_commands() -> None:
    """The first thing that a user types; it also works from the tree, without an installation."""
    done = subprocess.run([*COMMAND, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert all(
        command in done.stdout
        for command in ("demo", "doctor", "bench", "cache", "tune", "plan", "check-network", "--version")
    )


def test_help_does_not_wait_for_torch() -> None:
    """Importing torch takes seconds, which no command that does not compute should cost."""
    program = "import sys; from tokenloom.cli import app; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=LIMIT_S)


def test_version() -> None:
    """The version comes from the one place that has it."""
    done = CliRunner().invoke(app.app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"tokenloom {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        # More than there are GPUs; without two, no number helps.
        (["--ranks", "1000"], "--ranks" if torch.cuda.device_count() > 1 else "--device"),
        pytest.param(
            [],
            "--device is cuda, which needs 2 GPUs or more, but there are none",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here"),
        ),
    ],
)
def test_ranks_without_gpus_are_refused(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app.app, ["demo", "--device", "cuda", *arguments])
    assert done.exit_code == MISUSED
    assert said in done.output


SIZES = {
    "comm": ["--tokens", "--hidden", "--num-experts", "--top-k"],
    "mega": ["--tokens", "--hidden", "--intermediate", "--num-experts", "--top-k"],
    "train": ["--tokens", "--hidden", "--intermediate", "--num-experts", "--top-k", "--dtype"],
    "tune": ["--tokens", "--hidden", "--intermediate", "--num-experts", "--top-k", "--dtype"],
    "plan": ["--tokens", "--hidden", "--num-experts", "--top-k", "--dtype"],
}


@pytest.mark.parametrize("command", SIZES)
def test_sizes_have_the_same_names_everywhere(command: str) -> None:
    """What one command calls a size, all do; comm and plan have no experts, and mega one dtype."""
    words = [command] if command in ("tune", "plan") else ["bench", command]
    shown = CliRunner().invoke(app.app, [*words, "--help"], env={"COLUMNS": "120"}).output
    sizes = ["--tokens", "--hidden", "--intermediate", "--num-experts", "--top-k", "--dtype"]
    assert [name for name in sizes if re.search(rf"{name}\b", shown)] == SIZES[command]


def test_an_error_of_ours_is_a_message() -> None:
    """What is raised on purpose says what to do in one line, by the name of the option, without a traceback."""
    done = CliRunner().invoke(app.app, ["bench", "comm", "--case", "small", "--ranks", "3", "--device", "cpu"])
    assert (done.exit_code, done.stdout) == (MISUSED, "")
    said = "--num-experts is 8, expected a multiple of the 3 ranks of the group; pad the experts to 9"
    assert done.stderr == f"tokenloom: {said}\n"


def test_ctrl_c_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the command does at that moment, shells see the code that they expect."""

    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_demo", interrupted)
    done = CliRunner().invoke(app.app, ["demo", "--device", "cpu"])
    assert (done.exit_code, done.stderr) == (INTERRUPTED, "tokenloom: interrupted\n")


SWALLOWING = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    pass
"""
IMPORTING = """
from tokenloom.cli import app, examination
def examine():
    import swallowing
    return {}
examination.examine = examine
app.main()
"""


def test_ctrl_c_ends_a_command_that_is_importing(tmp_path: Path) -> None:
    """torch and numpy swallow exceptions while they are imported, and the command would go on."""
    (tmp_path / "swallowing.py").write_text(SWALLOWING)
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING, "doctor", "--json"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", "tokenloom: interrupted\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_full_disk_is_a_message() -> None:
    """What is printed comes first, so that measurements are not lost."""
    done = CliRunner().invoke(app.app, ["plan", "--nodes", "2", "--tokens", "8", "--json", "/dev/full"])
    assert done.exit_code == FAILED
    assert "8 tokens a rank on 2 nodes" in done.stdout
    assert done.stderr == "tokenloom: the results cannot be written (No space left on device)\n"


def test_output_in_ascii() -> None:
    """Signs that the output has no place for become question marks."""
    done = subprocess.run(
        [*COMMAND, "plan", "--nodes", "2", "--tokens", "8"],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "start 30 ?s" in done.stdout


def test_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command whose output was closed, as by ``>&-``, still runs."""
    monkeypatch.setattr(sys, "stdout", None)
    terminal.console().print("nobody reads this")


@pytest.mark.parametrize("passed", [True, False])
def test_the_demo_exits_with_its_verdict(monkeypatch: pytest.MonkeyPatch, passed: bool) -> None:
    """A demo that fails must not look like one that passes to a script."""
    given: list[Any] = []

    def run_demo(console: Any, *arguments: Any, **options: Any) -> bool:
        given.extend([*arguments, options])
        return passed

    monkeypatch.setattr(run, "run_demo", run_demo)
    done = CliRunner().invoke(app.app, ["demo", "--ranks", "3", "--device", "cpu", "--steps", "7"])
    assert done.exit_code == (0 if passed else FAILED)
    assert given == [3, "cpu", 7, {"ranks_per_node": None}]


def test_doctor() -> None:
    """The tables for people: the versions, every backend, and why the better ones are not picked."""
    done = CliRunner().invoke(app.app, ["doctor"])
    assert (done.exit_code, done.stderr) == (0, "")
    for word in ("torch", "NVRTC", "NCCL", "IPC namespace", "picked by auto", "nvlink", "collective"):
        assert word in done.stdout


def test_bench_comm_lists_its_cases() -> None:
    """The names that --case takes."""
    done = CliRunner().invoke(app.app, ["bench", "comm", "--list"])
    assert done.exit_code == 0
    assert "4096x7168 top-8 of 256" in done.stdout
    assert "128x7168 top-8 of 256" in done.stdout


def assert_passed_and_learned(shown: str) -> None:
    shown = " ".join(shown.split())  # lines are as wide as whoever runs this has room for
    assert "FAIL" not in shown
    assert len(re.findall(r"PASS", shown)) == 5 + 3 + 1  # check, training, verdict
    found = re.search(r"Loss ([\d.]+) -> ([\d.]+) nats", shown)
    assert found
    first, last = map(float, found.groups())
    assert last < first - 1
    shares = re.search(r"Dispatch took (\d+)% and combine (\d+)% of a step", shown)
    assert shares
    dispatch, combine = map(int, shares.groups())
    assert dispatch > 0
    assert combine > 0
    assert dispatch + combine < 100


def test_the_demo_passes_and_learns(pools: Callable[[str], RankPool], capsys: pytest.CaptureFixture[str]) -> None:
    """All three parts on two ranks, its loss really falls, by more than one nat in 25 steps."""
    from tokenloom.cli.terminal import console

    with borrowed(run, pools):
        assert run.run_demo(console(), 2, "cpu", 25, profiled_steps=1)
    shown = capsys.readouterr().out
    assert_passed_and_learned(shown)
    assert_goes_on(shown)


def assert_goes_on(shown: str) -> None:
    """The demo ends with commands that there are, and with files of this repository."""
    _, title, rest = shown.partition("Next you can try\n")
    found = [line.strip() for line in rest.splitlines() if line.startswith("  ") and not line.startswith("    ")]
    assert title
    assert found == [command for command, _ in run.NEXT]
    for command in found:
        first, *words = command.split()
        if first == "tokenloom":
            assert CliRunner().invoke(app.app, [*words, "--help"]).exit_code == 0
        else:
            assert (ROOT / command.split()[-1]).exists()


@pytest.mark.slow
def test_the_demo_on_two_nodes(pools: Callable[[str], RankPool], capsys: pytest.CaptureFixture[str]) -> None:
    """Its four ranks are taken for two nodes of two; the one that is compared with them has none."""
    from tokenloom.cli.terminal import console

    with borrowed(run, pools):
        assert run.run_demo(console(), 4, "cpu", 2, profiled_steps=1, ranks_per_node=2)
    shown = capsys.readouterr().out
    assert "2 nodes of 2, as ranks_per_node says; 2 rails of 2" in shown
    assert "backend network:" in shown


@pytest.mark.slow
def test_the_whole_demo_as_a_process() -> None:
    """As a user runs it, with ranks of its own and the model that it has."""
    command = [*COMMAND, "demo", "--ranks", "2", "--device", "cpu", "--steps", "25"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert_passed_and_learned(done.stdout)
    assert_goes_on(done.stdout)


def fail_on_rank_1(context: RankContext, *arguments: Any) -> Any:
    if context.rank == 1:
        raise ValueError("injected on rank 1")
    return "", []


@pytest.mark.slow  # ranks are started anew
def test_a_failing_rank_ends_the_demo_with_its_own_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not with that of another rank, nor with one of the command line's own; and no process stays."""
    monkeypatch.setattr(check, "check_on_rank", fail_on_rank_1)
    monkeypatch.setattr(sys, "argv", ["tokenloom", "demo", "--ranks", "2", "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == FAILED
    shown = capfd.readouterr().err
    assert "rank 1 of 2 failed" in shown
    assert "in fail_on_rank_1" in shown
    assert "ValueError: injected on rank 1" in shown
    assert shown.count("Traceback") == 1


@pytest.mark.slow
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
        # A shell starts what runs in its background, tests too, with the signal ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        assert any("Training a model" in line for line in process.stdout)
        time.sleep(2.0)  # into the training itself
        assert len(session_members(process.pid)) >= 3, "the command and its ranks"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, errors = process.communicate(timeout=INTERRUPT_LIMIT_S)
        assert process.returncode == INTERRUPTED
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


def test_files_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused before anything is measured, and nothing is left behind."""
    options.new_file("--json")(tmp_path / "new.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.json").write_text("kept")
    options.new_file("--json")(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "kept"

    def opened(file: Path, mode: str) -> io.StringIO:
        return io.StringIO()

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", opened)  # another rank has checked the file, and deleted it, at the same time
        options.new_file("--json")(tmp_path / "new.json")
    for file, said in ((tmp_path / "none" / "x.json", "there is no folder"), (tmp_path, "cannot be written")):
        with pytest.raises(typer.BadParameter, match=said):
            options.new_file("--json")(file)
