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
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenloom.jit.compiler import PACKAGE, KernelSpec

ON = False
"""Whether groups of tests are emulated; plugin.py sets it."""
SEED = 1
HERE = Path(__file__).parent
CXX = shutil.which("g++")
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-ffp-contract=off", "-fno-gnu-unique")
TURNS = 200_000
"""Turns of fibers between two looks of a host."""
_ASM = re.compile(r'asm(?: volatile)?\(\s*"([A-Za-z0-9.]+) [^"]*"\s*:\s*"=\w+"\((\w+)\)\s*:\s*((?:"\w+"\([^;]*)+)\);')
_DYNAMIC = re.compile(r"extern __shared__ __align__\(\d+\) unsigned char (\w+)\[\];")
_STATIC = re.compile(r"__shared__ (?:alignas\(\d+\) )?(\w+) (\w+)((?:\[[^\]]+\])?);")
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
def _headers(folder: Path) -> Path:
    """The package's headers, translated, in a folder of their own."""
    target = folder / "headers"
    for path in [*PACKAGE.glob("device/**/*.cuh"), *PACKAGE.glob("kernels/**/*.cuh")]:
        name = path.relative_to(PACKAGE)
        if name.parts[:2] == ("device", "ptx"):
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(translated(path.read_text()))
    return target


def _compile(folder: Path, name: str, source: Path, *flags: str) -> Path:
    assert CXX is not None
    library = folder / f"{name}.so"
    if library.exists():
        return library
    folders = [f"-I{each}" for each in (HERE, HERE / "include", _headers(folder))]
    command = [CXX, *FLAGS, *flags, *folders, str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return library


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
    core = ctypes.CDLL(str(_compile(folder, "emulator", HERE / "emulator.cpp")), mode=ctypes.RTLD_GLOBAL)
    core.emulator_run.restype = ctypes.c_size_t
    core.emulator_finished.restype = core.emulated_clock.restype = ctypes.c_uint64
    return core


_compiling = threading.Lock()


def _kernel(folder: Path, spec: KernelSpec) -> Any:
    with _compiling:
        return _compiled(folder, spec)


@lru_cache
def _compiled(folder: Path, spec: KernelSpec) -> Any:
    shape = (*spec.shape, ("shared_bytes", spec.shared_bytes))
    lines = ['#include "emulator.h"', '#include "gin.h"', "struct Shape {"]
    lines += [f"    static constexpr int {key} = {value};" for key, value in shape]
    lines += ["};", f'#include "{spec.path}"', 'extern "C" __attribute__((visibility("default")))']
    lines += ["void emulated_run(const void* args) {"]
    lines += [f"    {spec.name}<Shape>(*static_cast<const {spec.args.__name__}*>(args));", "}"]
    text = "\n".join(lines)
    name = f"{spec.name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    source = folder / f"{name}.cpp"
    source.write_text(text)
    # Every kernel has a Shape of its own, and all have functions of the same names.
    return ctypes.CDLL(str(_compile(folder, name, source, "-fvisibility=hidden")), mode=ctypes.RTLD_LOCAL)


def ranks(num_ranks: int) -> Any:
    """A group for tests. What is compiled stays in a temporary folder, for as long as no source changes."""
    from tests.support.emulator.group import EmulatedRanks

    return EmulatedRanks(_shared_folder(), num_ranks, SEED)


@lru_cache
def _shared_folder() -> Path:
    sources = [*HERE.rglob("*.*"), *PACKAGE.glob("device/**/*.cuh"), *PACKAGE.glob("kernels/**/*.cuh")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources) if path.suffix != ".pyc"))
    folder = Path(tempfile.gettempdir()) / f"tokenloom-emulated-{os.getuid()}-{digest.hexdigest()[:12]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
