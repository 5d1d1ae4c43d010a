"""Compiled kernels on disk. Entries are whole or absent: written aside, then renamed; damage means recompiling.

Ranks and machines that share a file system may race: all of them write the same bytes under the same key.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenloom import env
from tokenloom._version import __version__
from tokenloom.jit.compiler import (
    OPTIONS,
    PACKAGE,
    KernelSpec,
    Resources,
    compile_kernel,
    included_files,
    nvrtc_version,
)

_FORMAT = 1
_SUFFIX = ".kernel"


@dataclass(frozen=True)
class Entry:
    """A compiled kernel.

    Attributes:
        key: names the entry; a hash of everything that went into it.
        name, shape, arch: of the kernel.
        threads: of a block.
        cubin: machine code.
        log: what the compiler said.
    """

    key: str
    name: str
    shape: dict[str, int]
    arch: str
    threads: int
    cubin: bytes
    log: str

    @property
    def resources(self) -> Resources:
        """Registers, spills, shared memory."""
        return Resources.from_log(self.log)


def key_of(spec: KernelSpec) -> str:
    """Hash of the source, every included file, options, architecture and compiler version."""
    options = [option for option in OPTIONS if str(PACKAGE) not in option]
    parts = [_FORMAT, __version__, spec.source(), included_files(spec.path), options, spec.arch, nvrtc_version()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def get(spec: KernelSpec, folder: Path | None = None) -> Entry:
    """The compiled kernel, from disk if it is there and whole, else compiled and, where possible, stored."""
    folder = folder or env.cache_folder()
    key = key_of(spec)
    entry = _read(folder / (key + _SUFFIX))
    if entry is None:
        cubin, log = compile_kernel(spec)
        entry = Entry(key, spec.name, dict(spec.shape), spec.arch, spec.threads, cubin, log)
        _write(folder, entry)
    return entry


def entries(folder: Path | None = None) -> Iterator[Entry]:
    """All whole entries."""
    folder = folder or env.cache_folder()
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob("*" + _SUFFIX)):
            entry = _read(path)
            if entry is not None:
                yield entry


def clear(folder: Path | None = None) -> int:
    """Delete all entries; how many there were."""
    folder = folder or env.cache_folder()
    paths = list(folder.glob("*" + _SUFFIX)) if folder.is_dir() else []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    return len(paths)


def _read(path: Path) -> Entry | None:
    """An entry is one file: a line of JSON with the cubin's hash, then the cubin. None if anything is off."""
    try:
        header, cubin = path.read_bytes().split(b"\n", 1)
        about = json.loads(header)
        if about.pop("sha256") != hashlib.sha256(cubin).hexdigest():
            return None
        return Entry(cubin=cubin, **about)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(folder: Path, entry: Entry) -> None:
    about = {name: value for name, value in vars(entry).items() if name != "cubin"}
    about["sha256"] = hashlib.sha256(entry.cubin).hexdigest()
    # An unwritable or full disk costs a recompilation, never the run.
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=folder, suffix=".partial")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(json.dumps(about).encode() + b"\n" + entry.cubin)
            os.replace(aside, folder / (entry.key + _SUFFIX))
        except OSError:
            Path(aside).unlink(missing_ok=True)
            raise
