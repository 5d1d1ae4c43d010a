"""A package of small kernels, for tests of jit/."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.small_kernels import write_package
from tokenloom.jit import compiler


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where kernels are looked for, in place of the installed package."""
    folder = write_package(tmp_path / "package")
    monkeypatch.setattr(compiler, "PACKAGE", folder)
    return folder
