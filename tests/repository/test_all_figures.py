"""microbench/all_figures.py runs where nobody can wait for a second try."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.support.scripts import load_script
from tokenloom.cli.app import app

ROOT = Path(__file__).parents[2]


all_figures = load_script(ROOT / "microbench/all_figures.py")


@pytest.mark.parametrize("num_gpus", [1, 2, 4, 8])
def test_commands_parse(num_gpus: int, tmp_path: Path) -> None:
    """Options of tokenloom's commands exist, and take these values."""
    for step in all_figures.steps(num_gpus, "h200"):
        first, *rest = step.arguments
        if first != "-m":
            assert (ROOT / first).is_file()
            continue
        command: Any = typer.main.get_command(app)
        arguments = [*rest[1:], "--json", str(tmp_path / step.rows)]
        while hasattr(command, "commands"):
            command = command.commands[arguments.pop(0)]
        command.make_context(step.name, arguments)


@pytest.mark.parametrize("num_gpus", sorted(all_figures.MEGA_AIMS))
def test_aims_have_rows(num_gpus: int) -> None:
    """Every aim is of a row that a step measures: of these experts, tokens and shapes."""
    said = [" ".join(step.arguments) for step in all_figures.steps(num_gpus, "h200")]
    for name in all_figures.aims(num_gpus):
        what, *parts = name.split("/")
        sizes = {part[0]: part[1:] for part in parts if part[1:].isdecimal()}
        assert f"ep{num_gpus}" in parts
        if what == "mega":
            assert any(f"--num-experts {sizes['e']} " in each and f"{sizes['t']}" in each for each in said)
        elif what == "train":
            thiek = ",".join(sizes[letter] for letter in "thiek")
            assert any(each.endswith(thiek) for each in said), name


def test_the_table() -> None:
    """A row that was not measured says so."""
    first, second, *_ = all_figures.aims(4)
    lines = all_figures.beside_aims(
        [{"rows": [{"name": first, "p50_us": 670.0}, {"name": "other"}]}, {"rows": {"both": 1.0}}], 4
    )
    assert lines[0].split() == ["670.0", "/", "335.0", "=", "2.00", first]
    assert lines[1].split() == ["not", "measured", second]


def test_it_goes_on_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails or hangs leaves its log, and says how it ended."""
    fails = all_figures.Step("fails", ("-c", "print('seen'); raise SystemExit(3)"), "", 60)
    hangs = all_figures.Step("hangs", ("-c", "import time; time.sleep(60)"), "", 0.5)
    works = all_figures.Step("works", ("-c", "import sys; open(sys.argv[2], 'w').write('{}')"), "rows.json", 60)
    assert all_figures.run(fails, tmp_path).startswith("FAILED with 3")
    assert (tmp_path / "fails.log").read_text() == "seen\n"
    assert all_figures.run(hangs, tmp_path) == "ended after 0.5 s"
    assert all_figures.run(works, tmp_path).startswith("done")
    assert json.loads((tmp_path / "rows.json").read_text()) == {}


@pytest.mark.slow
def test_without_a_gpu() -> None:
    """It lists its commands, and refuses to measure."""
    command = [sys.executable, "microbench/all_figures.py", "unused"]
    listed = subprocess.run([*command, "--list", "--only", "mega,comm"], cwd=ROOT, capture_output=True, text=True)
    assert listed.returncode == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["mega", "comm"]
    wrong = subprocess.run([*command, "--list", "--only", "meg"], cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "no step meg" in wrong.stderr
