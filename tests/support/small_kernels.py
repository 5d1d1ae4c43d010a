"""Small kernels in a package folder of their own, so that tests of jit/ can change what they like."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tokenloom.errors import BackendUnavailable
from tokenloom.jit import cache, compiler
from tokenloom.jit.compiler import KernelSpec


def why_no_nvrtc() -> str | None:
    """Why nothing can be compiled here; None if it can."""
    try:
        compiler.load_nvrtc()
    except BackendUnavailable as error:
        return str(error)
    return None


WHY_NO_NVRTC = why_no_nvrtc()
needs_nvrtc = pytest.mark.skipif(WHY_NO_NVRTC is not None, reason=str(WHY_NO_NVRTC))


class Inner(ctypes.Structure):
    """A struct within the arguments."""

    _fields_ = [("bias", ctypes.c_int32), ("factor", ctypes.c_int32)]


class ScaleArgs(ctypes.Structure):
    """Mirror of ScaleArgs in SOURCES."""

    _fields_ = [
        ("out", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("inner", Inner),
        ("start", ctypes.c_int32),
        ("step", ctypes.c_int32),
    ]


SOURCES = {
    "kernels/scale/scale.cuh": """#pragma once
#include "device/numbers.cuh"

struct Inner {
    int bias;
    int factor;
};

struct ScaleArgs {
    int* out;
    unsigned long long length;
    Inner inner;
    int start;
    int step;
};

template <class Shape>
__device__ void scale(const ScaleArgs& args) {
    const unsigned i = blockIdx.x * Shape::threads + threadIdx.x;
    const int value = args.start + int(i) * args.step;
    if (i < args.length) args.out[i] = value * args.inner.factor + args.inner.bias + kSeven;
}
""",
    "device/numbers.cuh": '#pragma once\n#  include"device/deep/seven.cuh"\n',
    "device/deep/seven.cuh": '#pragma once\n#include "device/numbers.cuh"\nconstexpr int kSeven = 7;\n',
    "device/unused.cuh": "#pragma once\nconstexpr int kUnused = 1;\n",
}
"""out[i] = (start + i * step) * factor + bias + 7. The two headers include each other, as headers with a guard may."""


def only_file(folder: Path) -> Path:
    """The one entry of a cache."""
    (file,) = folder.iterdir()
    return file


def write_package(folder: Path) -> Path:
    """The sources as a package folder."""
    for name, text in SOURCES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def scale_spec(
    args: type[ctypes.Structure] = ScaleArgs, threads: int = 64, arch: str = "sm_90a", **more: int
) -> KernelSpec:
    """The kernel of SOURCES."""
    shape = (("threads", threads), *more.items())
    return KernelSpec("scale", "kernels/scale/scale.cuh", shape, args, threads, arch)


def race(barrier: Any, answers: Any, package: Path, folder: Path, rounds: int) -> None:
    """One process: real compilation first, then many rounds on large made-up code while others clear the folder."""
    try:
        compiler.PACKAGE = package
        barrier.wait()
        real = cache.get(scale_spec(), folder)
        code = random.Random(0).randbytes(1 << 18)
        cache.compile_kernel = lambda spec: (code, real.log)
        generator = random.Random(os.getpid())
        spec = scale_spec(raced=1)
        for _ in range(rounds):
            assert cache.get(spec, folder).cubin == code
            assert all(entry.cubin in (code, real.cubin) for entry in cache.entries(folder))
            if generator.random() < 0.3:
                (folder / f"{cache.key_of(spec)}.kernel").unlink(missing_ok=True)
        cache.get(spec, folder)
        answers.put(hashlib.sha256(real.cubin).hexdigest())
    except BaseException as error:
        answers.put(repr(error))
        raise
