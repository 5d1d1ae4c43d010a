"""tools/check_structure.py passes on this tree, and fails on every kind of fault it is there for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / "tools" / "check_structure.py"


def run_check(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHECK), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package, to be broken."""
    shutil.copytree(ROOT / "tokenloom", tmp_path / "tokenloom", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_this_tree_passes(copy: Path) -> None:
    """And so does the copy that the other tests break, so that they fail for what they break alone."""
    for arguments in ((), (copy,)):
        done = run_check(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "fine" in done.stdout


# file, line appended to it, what the fault must say
VIOLATIONS = {
    "upward": ("plan.py", "from tokenloom.layer import ExpertParallelMoE", "plan imports layer, which is above it"),
    "far_upward": ("errors.py", "import tokenloom.communicator", "errors imports communicator, which is above it"),
    "public_names_from_below": ("layer.py", "import tokenloom as tl", "layer imports __init__, which is above it"),
    "neighbour": ("router.py", "from tokenloom import routing", "router imports routing, its neighbour"),
    "relative": ("routing.py", "from . import layer", "routing imports layer, which is above it"),
    "relative_from_a_package": ("backends/base.py", "from ..checks import MODES", "backends.base imports checks"),
    "inside_a_function": ("quant.py", "def late():\n    from tokenloom import autograd", "quant imports autograd"),
    "cycle_in_a_package": (
        "backends/base.py",
        "from tokenloom.backends import collective",
        "cycle of imports: backends.base -> backends.collective -> backends.base",
    ),
    "reference_shares_code": ("reference.py", "from tokenloom import routing", "reference imports routing, it may"),
    "reference_needs_more": ("reference.py", "import numpy as np", "reference imports numpy, it may import only"),
    "unknown_module": ("helpers.py", "x = 1", "tokenloom.helpers has no place in LAYERS"),
    "import_of_unknown": ("layer.py", "from tokenloom.helpers import x", "tokenloom.helpers, which has no place"),
    "environ": ("layer.py", "import os\nx = os.environ.get('X')", "touches environment variables"),
    "getenv": ("checks.py", "from os import getenv", "touches environment variables"),
    "kernel_uses_kernel": (
        "kernels/one/launch.py",
        "from tokenloom.kernels.two import launch",
        "kernels.one.launch imports kernels.two, its neighbour",
    ),
    "shared_by_kernels_uses_a_kernel": (
        "kernels/shape.py",
        "from tokenloom.kernels.two import launch",
        "kernels.shape imports kernels.two, which is above it",
    ),
    "python_too_long": ("long.py", "#\n" * 601, "tokenloom/long.py: 60"),
    "device_code_too_long": ("device/long.cuh", "//\n" * 601, "tokenloom/device/long.cuh: 60"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_every_kind_of_fault_fails(name: str, copy: Path) -> None:
    file, text, said = VIOLATIONS[name]
    path = copy / "tokenloom" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:
        out.write(f"\n{text}\n")
    done = run_check(copy)
    assert done.returncode == 1, done.stdout + done.stderr
    assert said in done.stdout


def test_the_lower_neighbours_and_own_package_are_allowed(copy: Path) -> None:
    """The table forbids directions, not distances."""
    with (copy / "tokenloom" / "layer.py").open("a") as out:
        out.write("\nfrom tokenloom.plan import Plan\nfrom tokenloom._version import __version__\n")
    with (copy / "tokenloom" / "backends" / "__init__.py").open("a") as out:
        out.write("\nfrom .exchange import exchange\n")
    kernel = copy / "tokenloom" / "kernels" / "one" / "launch.py"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("from tokenloom.kernels.shape import x\nfrom tokenloom.kernels.one import y\n")
    assert run_check(copy).returncode == 0


def test_tests_are_measured_too(copy: Path) -> None:
    (copy / "tests").mkdir()
    (copy / "tests" / "test_long.py").write_text("#\n" * 601)
    done = run_check(copy)
    assert done.returncode == 1
    assert "tests/test_long.py: 601 lines, at most 600; split it" in done.stdout


def test_an_empty_folder_is_a_fault(tmp_path: Path) -> None:
    """Run from the wrong place it must not say that all is fine."""
    assert run_check(tmp_path).returncode == 1
