"""Compiled kernels on disk. Entries are whole or absent: written aside, then renamed; damage means recompiling.

Ranks start together and want the same kernels. One process of a host compiles each, and the others wait for it.
Machines that share a file system may race: all of them write the same bytes under the same key.

A kernel runs with the rights of its user. So a folder or a file that somebody else could have written is not used: it
has to belong to this user or to root, and neither its group nor others may write it. That holds for what a symbolic
link leads to.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tokenloom import env
from tokenloom._version import __version__
from tokenloom.errors import KernelCompileError
from tokenloom.jit.compiler import OPTIONS, KernelSpec, Resources, compile_kernel, included_files, nvrtc_version

_FORMAT = 2
_SUFFIX = ".kernel"
_ASIDE = ".partial"
_MOST_WAIT_S, _LOOK_EVERY_S = 20.0, 0.01
"""Longest wait for another process that compiles, which may be stopped, and the time between two looks at it."""

_warned: set[Path] = set()
"""Folders that this process has said it does not use."""


@dataclass(frozen=True)
class Entry:
    """A compiled kernel.

    Attributes:
        key: names the entry; a hash of everything that went into it.
        name, shape, arch: of the kernel.
        threads: of a block.
        shared_bytes: dynamic shared memory of a block.
        cubin: machine code.
        log: what the compiler said.
    """

    key: str
    name: str
    shape: dict[str, int]
    arch: str
    threads: int
    shared_bytes: int
    cubin: bytes
    log: str

    @property
    def resources(self) -> Resources:
        """Registers, spills, shared memory."""
        return Resources.from_log(self.log)


def key_of(spec: KernelSpec) -> str:
    """Hash of the source, every included file, options, architecture and compiler version."""
    parts = [_FORMAT, __version__, spec.source(), included_files(spec.path), OPTIONS, spec.arch, nvrtc_version()]
    if spec.prelude.digest:
        parts += [spec.prelude.digest, spec.prelude.in_memory]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def get(spec: KernelSpec, folder: Path | None = None) -> Entry:
    """The compiled kernel, from disk if it is there and whole, else compiled and, where possible, stored.

    Warns, once for each folder, where others could write it: kernels are compiled then and not stored.
    """
    folder = folder or env.cache_folder()
    key = key_of(spec)
    entry = _read(folder / (key + _SUFFIX))
    if entry is None:
        with _turn(folder, key) as has_waited:
            entry = _read(folder / (key + _SUFFIX)) if has_waited else _make(spec, key, folder)
    # Whoever has waited in vain goes on without a turn: if entries cannot be stored, all compile at the same time.
    return entry or _make(spec, key, folder)


def _make(spec: KernelSpec, key: str, folder: Path) -> Entry:
    cubin, log = compile_kernel(spec)
    entry = Entry(key, spec.name, dict(spec.shape), spec.arch, spec.threads, spec.shared_bytes, cubin, log)
    with contextlib.suppress(KernelCompileError):  # headers that were there a moment ago
        if key_of(spec) == key:  # else they have changed since it was found, and the code may be of other texts
            _write(folder, entry)
    return entry


def find(key: str, folder: Path | None = None) -> Entry | None:
    """The entry of a key that somebody else has made, if it is on disk and whole."""
    return _read((folder or env.cache_folder()) / (key + _SUFFIX))


def keep(entry: Entry, folder: Path | None = None) -> None:
    """Store an entry where possible."""
    _write(folder or env.cache_folder(), entry)


def stored(spec: KernelSpec, folder: Path | None = None) -> Entry | None:
    """The compiled kernel if it is on disk and whole."""
    return _read((folder or env.cache_folder()) / (key_of(spec) + _SUFFIX))


def entries(folder: Path | None = None) -> Iterator[Entry]:
    """All whole entries."""
    folder = folder or env.cache_folder()
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob("*" + _SUFFIX)):
            entry = _read(path)
            if entry is not None:
                yield entry


def clear(folder: Path | None = None) -> int:
    """Delete all entries, damaged ones too, and what killed writers left; how many entries went.

    What cannot be deleted stays.
    """
    folder = folder or env.cache_folder()
    deleted = 0
    with contextlib.suppress(OSError):
        for path in [*folder.glob("*" + _SUFFIX), *folder.glob("*" + _ASIDE)]:
            with contextlib.suppress(OSError):
                path.unlink()
                deleted += path.suffix == _SUFFIX
    return deleted


def _read(path: Path) -> Entry | None:
    """The entry in a file: a line with the hash of the rest, a line of JSON, the cubin. None if anything is off."""
    try:
        if not _is_trusted(path.parent):
            return None
        with path.open("rb") as file:
            if not _only_ours(os.fstat(file.fileno())):  # of what is read: a link may lead elsewhere a moment later
                return None
            said, whole = file.read().split(b"\n", 1)
        if said.decode() != hashlib.sha256(whole).hexdigest():
            return None
        about, cubin = whole.split(b"\n", 1)
        entry = Entry(cubin=cubin, **json.loads(about))
    except (OSError, ValueError, TypeError):
        return None
    return entry if path.name == entry.key + _SUFFIX else None


@contextlib.contextmanager
def _turn(folder: Path, key: str) -> Iterator[bool]:
    """Let one process of a host compile a kernel, where the folder can be used and knows locks.

    A lock ends with the turn, or with the process and all that it has forked meanwhile. Whoever is done deletes the
    file: those who wait for it need no other.

    Yields:
        Whether it has waited for another process.
    """
    path, file, has_waited = folder / (key + _ASIDE), None, False
    try:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_trusted(folder):
                file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
                has_waited = _lock(file)
        yield has_waited
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                path.unlink()
            with file, contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # to close it is not enough where a child has been forked meanwhile


def _lock(file: IO[bytes]) -> bool:
    """Lock a file, or give up after a while. Return whether somebody else had it. OSError: it cannot be locked."""
    deadline, has_waited = time.monotonic() + _MOST_WAIT_S, False
    while time.monotonic() < deadline:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            has_waited = True
            time.sleep(_LOOK_EVERY_S)
    return has_waited


def _write(folder: Path, entry: Entry) -> None:
    about = {name: value for name, value in vars(entry).items() if name != "cubin"}
    whole = json.dumps(about).encode() + b"\n" + entry.cubin
    # An unwritable or full disk costs a recompilation, never the run.
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_trusted(folder):
            return
        handle, aside = tempfile.mkstemp(dir=folder, suffix=_ASIDE)
        try:
            with os.fdopen(handle, "wb") as file:
                os.fchmod(file.fileno(), 0o644)  # what root has built, in an image say, others may use
                file.write(hashlib.sha256(whole).hexdigest().encode() + b"\n" + whole)
            os.replace(aside, folder / (entry.key + _SUFFIX))
        except BaseException:
            Path(aside).unlink(missing_ok=True)
            raise


def _is_trusted(folder: Path) -> bool:
    """Whether nobody else can write a folder; warns if somebody can. OSError: there is none."""
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode) or _only_ours(found):
        return True  # a file in its place fails when it is used as a folder
    if folder not in _warned:
        _warned.add(folder)
        why = f"its owner is user {found.st_uid}, not you"
        cure = "let TOKENLOOM_CACHE_DIR name a folder of your own"
        if found.st_uid in (0, os.getuid()):
            why, cure = f"its mode is {stat.filemode(found.st_mode)}", f"chmod go-w {folder}, or {cure}"
        warnings.warn(
            f"compiled kernels are not kept: others can write to the cache folder {folder} ({why}); {cure}",
            stacklevel=4,
        )
    return False


def _only_ours(found: os.stat_result) -> bool:
    """Whether this user, or root, alone can write what was found."""
    return found.st_uid in (0, os.getuid()) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
