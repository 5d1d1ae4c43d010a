"""Kernels on disk that somebody else could have written: they would run with the rights of whoever loads them."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.small_kernels import needs_nvrtc, only_file, scale_spec
from tokenloom import env
from tokenloom.jit import cache, compiler
from tokenloom.jit.compiler import KernelSpec

ROOT_UID, SOMEBODY = 0, 4242


@pytest.fixture(autouse=True)
def compiled(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[KernelSpec]]:
    """What was asked of the compiler; a stand-in answers."""
    specs: list[KernelSpec] = []

    def compile_kernel(spec: KernelSpec) -> tuple[bytes, str]:
        specs.append(spec)
        return b"code", "log"

    monkeypatch.setattr(cache, "compile_kernel", compile_kernel)
    monkeypatch.setattr(cache, "nvrtc_version", lambda: "99.9")
    cache._warned.clear()
    yield specs
    cache._warned.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache folder with one entry, which only this user can write."""
    made = tmp_path / "cache"
    cache.get(scale_spec(), made)
    return made


def owned_by(monkeypatch: pytest.MonkeyPatch, owners: dict[Path, int]) -> None:
    """As if these files belonged to others, which only root could bring about."""
    real_stat, real_fstat = Path.stat, os.fstat

    def owner_of(found: Any) -> Any:
        for path, uid in owners.items():
            if os.path.samestat(found, real_stat(path)):
                return SimpleNamespace(st_mode=found.st_mode, st_uid=uid, st_size=found.st_size)
        return found

    monkeypatch.setattr(Path, "stat", lambda path, **options: owner_of(real_stat(path, **options)))
    monkeypatch.setattr(os, "fstat", lambda file: owner_of(real_fstat(file)))


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_what_is_made_is_trusted(tmp_path: Path, umask: int, compiled: list[KernelSpec]) -> None:
    """Whatever the umask lets others do, the cache lets them read at most, as in images that root has built."""
    before = os.umask(umask)
    try:
        cache.get(scale_spec(), tmp_path / "new" / "cache")
    finally:
        os.umask(before)
    made = tmp_path / "new" / "cache"
    assert made.stat().st_mode & 0o777 == 0o700
    assert only_file(made).stat().st_mode & 0o777 == 0o644
    cache.get(scale_spec(), made)
    assert len(compiled) == 1


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777])
def test_a_folder_that_others_can_write_is_not_used(folder: Path, mode: int, compiled: list[KernelSpec]) -> None:
    """Neither read nor written, whoever has chosen it; one warning names the folder and the cure, which helps."""
    folder.chmod(mode)
    with pytest.warns(UserWarning, match=rf"others can write to the cache folder {folder} .*chmod go-w {folder}"):
        cache.get(scale_spec(), folder)
    assert len(compiled) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get(scale_spec(more=1), folder).cubin == b"code"
        assert cache.stored(scale_spec(), folder) is None
        assert list(cache.entries(folder)) == []
    assert len(list(folder.iterdir())) == 1, "nothing is stored"
    folder.chmod(mode & ~0o022)
    cache.get(scale_spec(), folder)
    assert len(compiled) == 3


def test_every_folder_is_warned_of(folder: Path, tmp_path: Path) -> None:
    """Once each: the next one may be the one that somebody can mend."""
    other = tmp_path / "other"
    other.mkdir()
    for each in (folder, other):
        each.chmod(0o777)
        with pytest.warns(UserWarning, match=str(each)):
            cache.get(scale_spec(), each)


def test_somebody_elses_folder_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[KernelSpec]
) -> None:
    """Its owner may write it, whatever its mode says now."""
    owned_by(monkeypatch, {folder: SOMEBODY})
    with pytest.warns(UserWarning, match=rf"its owner is user {SOMEBODY}, not you.*TOKENLOOM_CACHE_DIR"):
        cache.get(scale_spec(), folder)
    assert len(compiled) == 2


def test_roots_folder_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[KernelSpec]) -> None:
    """An image, or an administrator, brings kernels along that users read."""
    owned_by(monkeypatch, {folder: ROOT_UID, only_file(folder): ROOT_UID})
    monkeypatch.setattr(os, "getuid", lambda: SOMEBODY)
    folder.chmod(0o555)
    cache.get(scale_spec(), folder)
    assert len(compiled) == 1
    folder.chmod(0o700)


def writable(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.chmod(0o666)


def writable_by_group(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.chmod(0o660)


def somebody_elses(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owned_by(monkeypatch, {file: SOMEBODY})


def link_to_a_writable_one(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = file.parent.parent / "elsewhere"
    file.rename(elsewhere)
    elsewhere.chmod(0o666)
    file.symlink_to(elsewhere)


@pytest.mark.parametrize("spoil", [writable, writable_by_group, somebody_elses, link_to_a_writable_one])
def test_a_file_that_others_can_write_is_compiled_again(
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiled: list[KernelSpec],
) -> None:
    """However right its hash is: whoever writes a kernel writes its hash too. One of our own takes its place."""
    file = only_file(folder)
    whole = file.read_bytes()
    with monkeypatch.context() as patch:
        spoil(file, patch)
        assert cache.stored(scale_spec(), folder) is None
        assert list(cache.entries(folder)) == []
        cache.get(scale_spec(), folder)
    assert len(compiled) == 2
    assert not file.is_symlink()
    assert file.stat().st_mode & 0o022 == 0
    assert file.read_bytes() == whole
    cache.get(scale_spec(), folder)
    assert len(compiled) == 2


def test_a_link_that_leads_elsewhere_when_it_is_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can rename what a link leads to may do so between the look at its owner and the reading."""
    file, ours, theirs = only_file(folder), tmp_path / "ours", tmp_path / "theirs"
    file.rename(ours)
    file.symlink_to(ours)
    whole = ours.read_bytes().split(b"\n", 1)[1].replace(b"code", b"evil")
    theirs.write_bytes(hashlib.sha256(whole).hexdigest().encode() + b"\n" + whole)
    theirs.chmod(0o666)
    real_stat, real_fstat = Path.stat, os.fstat

    def renamed_behind(found: Any) -> Any:
        if os.path.samestat(found, os.stat(ours)) and os.path.lexists(theirs):
            os.replace(theirs, ours)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", lambda path, **options: renamed_behind(real_stat(path, **options)))
        patch.setattr(os, "fstat", lambda file: renamed_behind(real_fstat(file)))
        assert cache.get(scale_spec(), folder).cubin == b"code"
    assert b"evil" in file.read_bytes(), "it was renamed"
    assert cache.get(scale_spec(), folder).cubin == b"code"


def test_a_link_to_a_folder_of_ones_own(folder: Path, tmp_path: Path, compiled: list[KernelSpec]) -> None:
    """Homes are small, and caches moved to a larger disk; what counts is where the link leads."""
    link = tmp_path / "link"
    link.symlink_to(folder)
    cache.get(scale_spec(), link)
    assert len(compiled) == 1
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match=str(link)):
        cache.get(scale_spec(), link)
    assert len(compiled) == 2


@pytest.mark.parametrize("name", ["TOKENLOOM_CACHE_DIR", "XDG_CACHE_HOME", "HOME"])
def test_however_the_folder_was_chosen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[KernelSpec]
) -> None:
    """The folder for temporary files is not the only one that others may write."""
    for each in ("TOKENLOOM_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, str(tmp_path / "shared"))
    cache.get(scale_spec())
    env.cache_folder().chmod(0o777)
    with pytest.warns(UserWarning, match=str(env.cache_folder())):
        cache.get(scale_spec())
    assert len(compiled) == 2


@needs_nvrtc
def test_the_compilers_full_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Major, minor and build: an update of the compiler's package alone makes other code, and so another key."""
    monkeypatch.setattr(cache, "nvrtc_version", compiler.nvrtc_version)
    version, (major, minor) = compiler.nvrtc_version(), compiler.load_nvrtc().nvrtcVersion()[1:]
    assert version.startswith(f"{major}.{minor}.")
    assert version.split()[0].count(".") == 2
    before = cache.key_of(scale_spec())

    real = compiler.load_nvrtc()

    class OneBuildLater:
        """NVRTC as it is, except for the number of its build in what it compiles."""

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def nvrtcGetPTX(self, program: Any, text: bytearray) -> Any:
            answer = real.nvrtcGetPTX(program, text)
            last = version.split()[0].rpartition(".")[2].encode()
            text[:] = text.replace(b"_" + last + b"(", b"_" + str(int(last) + 1).encode() + b"(")
            return answer

    monkeypatch.setattr(compiler, "load_nvrtc", OneBuildLater)
    assert compiler.nvrtc_version() != version
    assert cache.key_of(scale_spec()) != before
