"""CUDA C++ to cubin through NVRTC. Needs cuda-bindings and NVRTC from pip; no GPU, no driver, no toolkit."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenloom.errors import BackendUnavailable, KernelCompileError

PACKAGE = Path(__file__).parents[1]
"""Includes are written from here: ``#include "device/ptx/memory.cuh"``."""
OPTIONS = (
    "--std=c++17",
    "--device-as-default-execution-space",
    "--fmad=false",  # the semantics round every product and every sum by itself
    "--ptxas-options=-v",
    f"--include-path={PACKAGE}",
)
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class KernelSpec:
    """One kernel variant.

    Attributes:
        name: of the kernel, its file's stem and its entry point.
        path: of the file in the package, say "kernels/dispatch/dispatch.cuh". It defines ``template <class Shape>
            void name(const Args&)`` and the struct that ``args`` mirrors.
        shape: compile-time integers, ``Shape::key`` in the kernel.
        args: ctypes.Structure with the run-time values; its class name is the struct's.
        threads: of a block.
        arch: what to compile for.
    """

    name: str
    path: str
    shape: tuple[tuple[str, int], ...]
    args: type[ctypes.Structure]
    threads: int
    arch: str = "sm_90a"

    def source(self) -> str:
        """The translation unit: shape, kernel file, checks that both sides agree on Args, entry point."""
        struct = self.args.__name__
        lines = ["struct Shape {"]
        lines += [f"    static constexpr int {key} = {value};" for key, value in self.shape]
        lines += ["};", f'#include "{self.path}"']
        lines.append(f'static_assert(sizeof({struct}) == {ctypes.sizeof(self.args)}, "size of {struct}");')
        for field, *_ in self.args._fields_:
            offset = getattr(self.args, field).offset
            # NVRTC has no offsetof; __INTADDR__ is how its front end spells the constant.
            lines.append(f'static_assert(__INTADDR__(&(({struct}*)0)->{field}) == {offset}, "{struct}::{field}");')
        lines.append(
            f'extern "C" __global__ void __launch_bounds__({self.threads}, 1) '
            f"{self.name}_entry(const __grid_constant__ {struct} args) {{ {self.name}<Shape>(args); }}"
        )
        return "\n".join(lines) + "\n"

    @property
    def entry(self) -> str:
        """Symbol of the kernel in the cubin."""
        return f"{self.name}_entry"


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of a kernel: registers a thread, and bytes of stack, spills and static shared memory."""

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
    nvrtc = load_nvrtc()
    source = spec.source()
    program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(source.encode(), f"{spec.name}.cu".encode(), 0, [], []))
    try:
        options = [option.encode() for option in (f"--gpu-architecture={spec.arch}", *OPTIONS)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = bytearray(_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
        text = log.rstrip(b"\0 \n").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelCompileError(f"{spec.name} does not compile for {spec.arch}:\n{text}")
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

        nvrtc.nvrtcVersion()
    except Exception as error:  # the bindings raise errors of several types when the library is missing
        raise BackendUnavailable(f"NVRTC is missing ({error}); pip install cuda-bindings nvidia-cuda-nvrtc") from error
    return nvrtc


def nvrtc_version() -> str:
    """Say "13.0"."""
    nvrtc = load_nvrtc()
    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def included_files(path: str) -> Mapping[str, str]:
    """Text of ``path`` and of every file it includes, by path in the package."""
    texts: dict[str, str] = {}
    waiting = [path]
    while waiting:
        each = waiting.pop()
        if each not in texts:
            texts[each] = (PACKAGE / each).read_text()
            waiting += _INCLUDE.findall(texts[each])
    return dict(sorted(texts.items()))


def _checked(nvrtc: Any, answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelCompileError(f"NVRTC failed: {status.name}")
    return values[0] if values else None
