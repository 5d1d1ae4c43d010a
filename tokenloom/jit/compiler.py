"""CUDA C++ to cubin through NVRTC. Needs cuda-bindings and NVRTC from pip; no GPU, no driver, no toolkit."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from tokenloom.errors import BackendUnavailable, KernelCompileError

INSTALL = "pip install 'cuda-bindings>=13,<14' 'nvidia-cuda-nvrtc>=13,<14'"
PACKAGE = Path(__file__).parents[1]
"""Includes are written from here: ``#include "device/ptx/memory.cuh"``."""
OPTIONS = (
    "--std=c++17",
    "--device-as-default-execution-space",
    "--fmad=false",  # the semantics round every product and every sum by itself
    "--ptxas-options=-v",
)
_NAMED_AFTER_THE_COMPILER = b"""
#define NAME(major, minor, build) version_##major##_##minor##_##build
#define EXPANDED(major, minor, build) NAME(major, minor, build)
extern "C" __global__ void EXPANDED(__CUDACC_VER_MAJOR__, __CUDACC_VER_MINOR__, __CUDACC_VER_BUILD__)() {}
"""
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Prelude:
    """Source and flags before a kernel that uses headers from outside the package. By default there are none.

    Attributes:
        text: begins the translation unit, and includes them.
        folders: where they lie.
        in_memory: (name, text) of those that lie in no folder.
        digest: stands for the texts in the folders; names entries of the cache.
    """

    text: str = field(default="", repr=False)
    folders: tuple[Path, ...] = ()
    in_memory: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    digest: str = ""


NO_PRELUDE = Prelude()


@dataclass(frozen=True)
class KernelSpec:
    """One form of a kernel: its source, constants, and how to launch it.

    Attributes:
        name: name of the kernel: the stem of its file, and its entry point.
        path: its file in the package, say "kernels/dispatch/dispatch.cuh". The file defines ``template <class Shape>
            void name(const Args&)`` and the struct that ``args`` mirrors.
        shape: compile-time integers, ``Shape::key`` in the kernel.
        args: ctypes.Structure with the run-time values. Its class has the name of the struct.
        threads: threads of a block.
        arch: architecture to compile for.
        cluster: blocks of a cluster. A launch has a multiple of it.
        shared_bytes: dynamic shared memory of a block, ``Shape::shared_bytes`` in the kernel.
        blocks_per_sm: blocks that an SM has registers for, at least.
        prelude: headers from outside the package that come first.
    """

    name: str
    path: str
    shape: tuple[tuple[str, int], ...]
    args: type[ctypes.Structure]
    threads: int
    arch: str = "sm_90a"
    cluster: int = 1
    shared_bytes: int = 0
    blocks_per_sm: int = 1
    prelude: Prelude = NO_PRELUDE

    def behind(self, prelude: Prelude) -> KernelSpec:
        """The same kernel, compiled behind headers from outside the package."""
        return replace(self, prelude=prelude)

    def source(self) -> str:
        """The translation unit: prelude, shape, kernel file, checks that both sides agree on Args, entry point."""
        struct = self.args.__name__
        lines = ["struct Shape {"]
        constants = (*self.shape, ("shared_bytes", self.shared_bytes))
        lines += [f"    static constexpr int {key} = {value};" for key, value in constants]
        lines += ["};", f'#include "{self.path}"']
        lines.append(f'static_assert(sizeof({struct}) == {ctypes.sizeof(self.args)}, "size of {struct}");')
        for each, offset, size in _fields(self.args):
            member = f"(({struct}*)0)->{each}"
            # NVRTC has no offsetof; __INTADDR__ is how its front end spells the constant.
            same = f"__INTADDR__(&{member}) == {offset} && sizeof({member}) == {size}"
            lines.append(f'static_assert({same}, "{struct}::{each}");')
        cluster = f"__cluster_dims__({self.cluster}, 1, 1) " if self.cluster > 1 else ""
        lines.append(
            f'extern "C" __global__ void {cluster}__launch_bounds__({self.threads}, {self.blocks_per_sm}) '
            f"{entry_symbol(self.name)}(const __grid_constant__ {struct} args) {{ {self.name}<Shape>(args); }}"
        )
        return self.prelude.text + "\n".join(lines) + "\n"


def entry_symbol(name: str) -> str:
    """The name of the kernel in its cubin."""
    return f"{name}_entry"


@dataclass(frozen=True)
class Resources:
    """A report of ptxas on a kernel: registers a thread, and bytes of stack, spills and static shared memory."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    static_shared_bytes: int

    @staticmethod
    def from_log(log: str) -> Resources:
        """Read the log of ``--ptxas-options=-v`` for a module with one kernel."""

        def number(pattern: str) -> int:
            return sum(int(value) for value in re.findall(pattern, log))

        return Resources(
            registers=number(r"Used (\d+) registers"),
            stack_bytes=number(r"(\d+) bytes stack frame"),
            spill_bytes=number(r"(\d+) bytes spill (?:stores|loads)"),
            static_shared_bytes=number(r"(\d+) bytes smem"),
        )


def compile_kernel(spec: KernelSpec) -> tuple[bytes, str]:
    """Compile: (cubin, compiler log).

    Raises:
        BackendUnavailable: NVRTC is not installed.
        KernelCompileError: the source does not compile; the message is the compiler's log.
    """
    prelude = spec.prelude
    return compile_source(spec.name, spec.source(), spec.arch, prelude.folders, dict(prelude.in_memory))


def compile_source(
    name: str, source: str, arch: str, folders: Sequence[Path] = (), headers: Mapping[str, str] | None = None
) -> tuple[bytes, str]:
    """Compile a translation unit: (cubin, compiler log).

    Args:
        name: what errors call it.
        source: its text.
        arch: architecture to compile for.
        folders: where to look for headers, besides the package.
        headers: texts of headers that are in no folder, by the name that includes them.

    Raises:
        BackendUnavailable, KernelCompileError: as :func:`compile_kernel`.
    """
    nvrtc = load_nvrtc()
    given = {each: text.encode() for each, text in (headers or {}).items()}
    texts, names = list(given.values()), [each.encode() for each in given]
    program = _checked(
        nvrtc, nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), len(given), texts, names)
    )
    try:
        where = (f"--gpu-architecture={arch}", *(f"--include-path={each}" for each in (PACKAGE, *folders)))
        options = [option.encode() for option in (*where, *OPTIONS)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = bytearray(_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
        # How long it took is left out: the same kernel has the same log, whoever compiles it.
        lines = log.rstrip(b"\0 \n").decode(errors="replace").splitlines()
        text = "\n".join(line for line in lines if "Compile time" not in line)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelCompileError(f"{name} does not compile for {arch}:\n{text}")
        cubin = bytearray(_checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@cache
def load_nvrtc() -> Any:
    """The NVRTC bindings, checked to work.

    Raises:
        BackendUnavailable: cuda-bindings or NVRTC itself is missing.
    """
    try:
        from cuda.bindings import nvrtc

        _checked(nvrtc, nvrtc.nvrtcVersion())
    except Exception as error:  # the bindings raise errors of several types when the library is missing
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise BackendUnavailable(f"NVRTC is missing ({why}); {INSTALL}") from error
    return nvrtc


def nvrtc_version() -> str:
    """The compiler's full version and its build, say "13.0.88 CL-36424714"."""
    return _version_of(load_nvrtc())


@cache
def _version_of(nvrtc: Any) -> str:
    """NVRTC tells its release alone when asked, and the rest only to what it compiles: here to a kernel's name."""
    program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(_NAMED_AFTER_THE_COMPILER, b"version.cu", 0, [], []))
    try:
        _checked(nvrtc, nvrtc.nvrtcCompileProgram(program, 0, []))
        ptx = bytearray(_checked(nvrtc, nvrtc.nvrtcGetPTXSize(program)))
        _checked(nvrtc, nvrtc.nvrtcGetPTX(program, ptx))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    numbers = re.findall(rb"\.entry version_(\d+)_(\d+)_(\d+)", ptx)
    builds = re.findall(rb"Build ID: (\S+)", ptx)
    return b" ".join([*(b".".join(each) for each in numbers), *builds]).decode()


def included_files(path: str) -> Mapping[str, str]:
    """Text of ``path`` and of every file it includes, by path in the package.

    Raises:
        KernelCompileError: one of them cannot be read.
    """
    texts: dict[str, str] = {}
    waiting = [path]
    while waiting:
        each = waiting.pop()
        if each not in texts:
            try:
                texts[each] = (PACKAGE / each).read_text(encoding="utf-8")
            except OSError as error:
                raise KernelCompileError(f"{PACKAGE / each}: {error.strerror}; install tokenloom again") from error
            waiting += _INCLUDE.findall(texts[each])
    return dict(sorted(texts.items()))


def _fields(struct: type[ctypes.Structure], prefix: str = "", start: int = 0) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) of all fields, those of inner structs as "outer.inner"."""
    for name, kind, *_ in struct._fields_:
        offset = start + getattr(struct, name).offset
        yield prefix + name, offset, ctypes.sizeof(kind)
        if issubclass(kind, ctypes.Structure):
            yield from _fields(kind, f"{prefix}{name}.", offset)


def _checked(nvrtc: Any, answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelCompileError(f"NVRTC failed: {status.name}")
    return values[0] if len(values) == 1 else values
