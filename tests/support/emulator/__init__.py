"""Runs tokenloom's kernels without a GPU, for tests: several ranks, in one process, on fibers.

The sources of the kernels compile unchanged, but for the instructions in ``device/ptx/`` (``include/`` has stand-ins),
asm statements and shared memory. Fibers of all blocks of all ranks run in a random order, and bulk copies happen some
time; every seed is another history. It cannot show missing fences, since all see a write at once, nor speed. What
tensor cores multiply is added in float32, at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenloom.jit.compiler import PACKAGE, KernelSpec

ON = False
"""Whether groups of tests are emulated; plugin.py sets it."""
SEED = 1
HERE = Path(__file__).parent
PRELUDE = HERE / "prelude.h"
CXX = shutil.which("g++")
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-w", "-ffp-contract=off", "-fno-gnu-unique")
OF_KERNELS = (*FLAGS, "-Og", "-fvisibility=hidden")
"""Every kernel has a Shape of its own, and all have functions of the same names. It runs for a moment: what counts is
how soon it is compiled."""
TURNS = 200_000
"""Turns of fibers between two looks of a host."""
_ASM = re.compile(r'asm(?: volatile)?\(\s*"([A-Za-z0-9.]+) [^"]*"\s*:\s*"=\w+"\((\w+)\)\s*:\s*((?:"\w+"\([^;]*)+)\);')
_DYNAMIC = re.compile(r"extern __shared__ __align__\(\d+\) unsigned char (\w+)\[\];")
_STATIC = re.compile(r"__shared__ (?:alignas\(\d+\) )?(\w+) (\w+)((?:\[[^\]]+\])?);")
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
_OPERAND = re.compile(r'"\w+"\(((?:[^()]|\([^()]*\))*)\)')


def translated(source: str) -> str:
    """A kernel's source for the host's compiler."""

    def call(match: re.Match[str]) -> str:
        operands = ", ".join(_OPERAND.findall(match[3]))
        return f"{match[2]} = ptx_{match[1].replace('.', '_')}({operands});"

    source = _DYNAMIC.sub(r"unsigned char* \1 = emulated_shared();", _ASM.sub(call, source))
    found = r"*static_cast<shared_\2*>(emulated_static(__COUNTER__, sizeof(shared_\2)))"
    return _STATIC.sub(rf"using shared_\2 = \1\3; auto& \2 = {found};", source)


@lru_cache
def _text(name: str) -> str:
    """What an include of a source means, translated where it is a header of the package."""
    for folder in (HERE, HERE / "include"):
        if (folder / name).exists():
            return (folder / name).read_text()
    return translated((PACKAGE / name).read_text())


def _key(text: str, flags: Sequence[str]) -> str:
    """Of all that a source is compiled from: trees that differ elsewhere share what is compiled."""
    digest, seen, waiting = hashlib.sha256(" ".join(flags).encode()), set[str](), [text]
    while waiting:
        text = waiting.pop()
        digest.update(text.encode())
        names = [name for name in dict.fromkeys(_INCLUDE.findall(text)) if name not in seen]
        seen.update(names)
        waiting += [_text(name) for name in names]
    return digest.hexdigest()[:16]


def _make(target: Path, make: Callable[[Path], None]) -> Path:
    """A file or folder that appears whole: other processes may make the same one."""
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder, target.name)
            make(made)
            with suppress(OSError):  # another was faster
                made.rename(target)
    return target


@lru_cache
def _headers(folder: Path) -> Path:
    """The package's headers, translated, in a folder of their own."""
    names = [path.relative_to(PACKAGE) for kind in ("device", "kernels") for path in PACKAGE.glob(f"{kind}/**/*.cuh")]
    texts = {name: translated((PACKAGE / name).read_text()) for name in names if name.parts[:2] != ("device", "ptx")}

    def write(target: Path) -> None:
        for name, text in texts.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_text(text)

    digest = hashlib.sha256("".join(f"{name}\n{text}" for name, text in sorted(texts.items())).encode())
    return _make(folder / f"headers-{digest.hexdigest()[:16]}", write)


def _compile(folder: Path, source: str, text: str, ending: str, flags: Sequence[str], *folders: Path) -> Path:
    """What the compiler makes of the text of a source, in a file of that ending."""

    def make(target: Path) -> None:
        (target.parent / source).write_text(text)
        files = (str(target.parent / source), "-o", str(target))
        command = [str(CXX), *flags, *(f"-I{each}" for each in folders), *files]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:4000]

    name, _, _ = source.partition(".")
    return _make(folder / f"{name}_{_key(text, flags)}{ending}", make)


class Emulator:
    """GPUs of a number of ranks, one stream each.

    Args:
        folder: for what is compiled.
        num_ranks: GPUs.
        seed: of the order in which everything happens.
    """

    def __init__(self, folder: Path, num_ranks: int, seed: int) -> None:
        self.folder, self.num_ranks = folder, num_ranks
        self.lock = threading.RLock()
        self._core = _core(folder)
        self._core.emulator_reset(num_ranks, ctypes.c_uint64(seed))

    def launch(self, rank: int, spec: KernelSpec, args: ctypes.Structure, blocks: int) -> None:
        """Put a kernel on the stream of a rank."""
        kernel = _kernel(self.folder, spec)
        with self.lock:
            self._core.emulator_launch(
                rank,
                kernel.emulated_run,
                ctypes.byref(args),
                ctypes.c_size_t(ctypes.sizeof(args)),
                blocks,
                spec.threads,
                spec.cluster,
                ctypes.c_size_t(spec.shared_bytes),
            )

    def launch_all_to_all(self, rank: int, args: ctypes.Structure) -> None:
        """Put what stands for a collective on the stream of a rank; AllToAll of network.py."""
        size = ctypes.c_size_t(ctypes.sizeof(args))
        with self.lock:
            self._core.emulator_launch(
                rank, self._core.emulated_all_to_all, ctypes.byref(args), size, 1, 32, 1, ctypes.c_size_t(0)
            )

    def run(self, turns: int = TURNS) -> int:
        """Let kernels run for so many turns. Returns: kernels that have not finished."""
        with self.lock:
            return self._core.emulator_run(ctypes.c_uint64(turns))

    def slow_down(self, rank: int, slowness: int) -> None:
        """Let threads of a rank run only every so many times that they could, from now on."""
        with self.lock:
            self._core.emulator_slow_down(rank, ctypes.c_uint64(slowness))

    def slow_copies(self, slowness: int) -> None:
        """Let bulk copies of all ranks go on only every so many turns, from now on."""
        with self.lock:
            self._core.emulator_slow_copies(ctypes.c_uint64(slowness))

    def slow_network(self, slowness: int) -> None:
        """Let puts take a step every so many turns: usually 64."""
        with self.lock:
            self._core.emulator_slow_network(ctypes.c_uint64(slowness))

    def kill(self, rank: int) -> None:
        """End all kernels of a rank in the middle of what they do."""
        with self.lock:
            self._core.emulator_kill(rank)

    def now(self) -> int:
        """Turns of fibers so far, which kernels take for nanoseconds."""
        return self._core.emulated_clock()

    def finished(self, rank: int) -> int:
        """Kernels of a rank that have finished."""
        return self._core.emulator_finished(rank)


@lru_cache
def _core(folder: Path) -> Any:
    source = HERE / "emulator.cpp"
    library = _compile(folder, source.name, source.read_text(), ".so", (*FLAGS, "-O3", "-shared"), HERE)
    core = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    core.emulator_run.restype = ctypes.c_size_t
    core.emulator_finished.restype = core.emulated_clock.restype = ctypes.c_uint64
    return core


@lru_cache
def _prelude(folder: Path) -> Path:
    """Where the compiler finds what every kernel begins with, compiled."""
    compiled = _compile(folder, PRELUDE.name, PRELUDE.read_text(), ".gch", (*OF_KERNELS, "-x", "c++-header"), HERE)

    def link(target: Path) -> None:
        target.mkdir()
        (target / f"{PRELUDE.name}.gch").symlink_to(compiled)

    return _make(compiled.with_suffix(""), link)


_compiling = threading.Lock()


def _kernel(folder: Path, spec: KernelSpec) -> Any:
    with _compiling:
        return _compiled(folder, spec)


@lru_cache
def _compiled(folder: Path, spec: KernelSpec) -> Any:
    shape = (*spec.shape, ("shared_bytes", spec.shared_bytes))
    lines = [f'#include "{PRELUDE.name}"', "struct Shape {"]
    lines += [f"    static constexpr int {key} = {value};" for key, value in shape]
    lines += ["};", f'#include "{spec.path}"', 'extern "C" __attribute__((visibility("default")))']
    lines += ["void emulated_run(const void* args) {"]
    lines += [f"    {spec.name}<Shape>(*static_cast<const {spec.args.__name__}*>(args));", "}"]
    folders = (_prelude(folder), HERE, HERE / "include", _headers(folder))
    library = _compile(folder, f"{spec.name}.cpp", "\n".join(lines), ".so", (*OF_KERNELS, "-shared"), *folders)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_LOCAL)


def ranks(num_ranks: int) -> Any:
    """A group for tests. What is compiled stays in a temporary folder, for as long as its sources do not change."""
    from tests.support.emulator.group import EmulatedRanks

    return EmulatedRanks(_shared_folder(), num_ranks, SEED)


@lru_cache
def _shared_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"tokenloom-emulated-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
