"""What a file of rows says about where they were measured."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tokenloom.bench import setup


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_commit_is_that_of_our_own_checkout(tmp_path: Path) -> None:
    """Never that of a project which installed tokenloom below its own checkout. Changes since are said."""

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "__init__.py").write_text("")
    assert setup.commit(tmp_path) is None, "no checkout at all"
    git("init", "-q")
    (tmp_path / "other.py").write_text("")
    git("add", "other.py")
    git("commit", "-q", "-m", "other")
    assert setup.commit(tmp_path) is None, "a checkout of something else"
    git("add", "__init__.py")
    git("commit", "-q", "-m", "ours")
    assert setup.commit(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "__init__.py").write_text("changed = True\n")
    assert setup.commit(tmp_path) == git("rev-parse", "HEAD") + "-dirty"
