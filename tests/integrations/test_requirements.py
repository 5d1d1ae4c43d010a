"""The integrations without their libraries, or with old ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, path: Path = ROOT) -> str:
    """What a new process prints, or the last line of its error."""
    environment = os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    return (found.stdout or found.stderr).strip().splitlines()[-1]


@pytest.mark.slow
def test_nothing_imports_them_unasked() -> None:
    code = "import sys, tokenloom as tl; [getattr(tl, each) for each in tl.__all__]; print(*sys.modules)"
    names = run(code).split()
    assert "tokenloom.training.layer" in names
    assert not [each for each in names if each.startswith(("tokenloom.integrations", "transformers"))]


def test_without_transformers() -> None:
    error = run("import sys; sys.modules['transformers'] = None; import tokenloom.integrations.transformers")
    assert error.startswith("ImportError: transformers is not installed; tokenloom.integrations.transformers needs it")
    assert error.endswith("pip install 'transformers>=5.23' accelerate")


@pytest.mark.parametrize("has_module", [False, True], ids=["5.20", "5.22"])
def test_with_an_old_transformers(tmp_path: Path, has_module: bool) -> None:
    """Before 5.23 expert parallelism has no registry, and before 5.22 no module of that name."""
    folder = tmp_path / "transformers" / "distributed"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("__version__ = '5.22.2'")
    (folder / "__init__.py").touch()
    if has_module:
        (folder / "expert_parallel.py").touch()
    error = run("import tokenloom.integrations.transformers", tmp_path)
    assert error.startswith("ImportError: transformers 5.22.2 has no registry of expert-parallel implementations")
    assert "pip install 'transformers>=5.23'" in error
