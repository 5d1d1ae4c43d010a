"""env.py: where compiled kernels go, whatever a machine has set or lacks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.small_kernels import needs_nvrtc, scale_spec, write_package
from tokenloom import env
from tokenloom.jit import cache, compiler

VARIABLES = ("TOKENLOOM_CACHE_DIR", "XDG_CACHE_HOME", "HOME")


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """No variable is set, and this is the folder for temporary files."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    env._process_folder.cache_clear()
    yield tmp_path
    env._process_folder.cache_clear()


@pytest.mark.parametrize("unset", ["", None], ids=["empty", "unset"])
def test_which_folder_wins(unset: str | None, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours before XDG's before the home folder before a temporary one; an empty variable counts as none."""
    expected = [Path("/ours"), Path("/xdg/tokenloom"), Path("/home/me/.cache/tokenloom")]
    for name, value in zip(VARIABLES, ("/ours", "/xdg", "/home/me"), strict=True):
        monkeypatch.setenv(name, value)
    for name, folder in zip(VARIABLES, expected, strict=True):
        assert env.cache_folder() == folder
        if unset is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, unset)
    folder = env.cache_folder()
    assert folder == temporary / f"tokenloom-{os.getuid()}" == env.cache_folder()
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("given", "folder"),
    [("~", "/home/me"), ("~/kernels", "/home/me/kernels"), ("/a/~", "/a/~"), ("~nobody-here/k", "~nobody-here/k")],
)
def test_the_home_folder_in_our_variable(given: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of settings has no shell that would look for it, and a folder named ``~`` is hard to remove."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("TOKENLOOM_CACHE_DIR", given)
    assert env.cache_folder() == Path(folder)


def foreign_link(place: Path) -> None:
    (place.parent / "theirs").mkdir()
    place.symlink_to(place.parent / "theirs")


def open_to_all(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


@pytest.mark.parametrize("plant", [foreign_link, open_to_all, Path.touch])
def test_a_temporary_folder_that_others_could_fill_is_not_used(plant: Callable[[Path], None], temporary: Path) -> None:
    """Everybody may make a folder of that name under /tmp; kernels in it would run as this user."""
    place = temporary / f"tokenloom-{os.getuid()}"
    plant(place)
    folder = env.cache_folder()
    assert folder.is_dir()
    assert folder.parent == temporary
    assert folder != place
    assert folder.stat().st_mode & 0o777 == 0o700
    assert env.cache_folder() == folder, "one for the whole process"


def test_another_user_s_folder_is_not_used(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, where only the owner is wrong."""
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    place = temporary / "tokenloom-4242"
    place.mkdir(mode=0o700)
    assert env.cache_folder() != place


def no_folder_for_temporary_files() -> str:
    raise FileNotFoundError(2, "No usable temporary directory found")


@needs_nvrtc
@pytest.mark.parametrize("nowhere", [False, True], ids=["temporary folder", "no folder at all"])
def test_no_home_is_no_obstacle(nowhere: bool, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers and services without HOME: kernels are kept in the temporary folder, or compiled each time."""
    monkeypatch.setattr(compiler, "PACKAGE", write_package(temporary / "package"))
    if nowhere:
        monkeypatch.setattr(tempfile, "gettempdir", no_folder_for_temporary_files)
    assert cache.get(scale_spec()).name == "scale"
    assert (cache.stored(scale_spec()) is None) is nowhere
