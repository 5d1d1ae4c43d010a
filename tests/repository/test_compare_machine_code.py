"""tools/compare_machine_code.py: what counts as the same code, and what its report says of what differs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_kernels import needs_nvrtc

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "compare_machine_code.py"
KERNEL = """#pragma once
struct FillArgs {{ int* out; int count; int padding; }};
template <class Shape>
__device__ void {name}(const FillArgs& args) {{
    const int number = threadIdx.x;
    if (number < args.count) args.out[number] = number {sign} Shape::step;
}}
"""
VARIANTS = """
import ctypes
from dataclasses import dataclass
from tokenloom.jit.compiler import KernelSpec
class FillArgs(ctypes.Structure):
    _fields_ = [("out", ctypes.c_uint64), ("count", ctypes.c_int32), ("padding", ctypes.c_int32)]
@dataclass
class Fill:
    step: int
    def spec(self):
        return KernelSpec("{name}", "kernels/{name}.cuh", (("step", self.step),), FillArgs, 64)
VARIANTS = {{"{name}, 1": Fill(1), "{name}, 2": Fill(2)}}
"""


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Make a checkout of this tool with a package of one kernel."""

    def make(name: str = "fill", sign: str = "+") -> Path:
        root = tmp_path_factory.mktemp("tree")
        for part in ("errors.py", "__init__.py", "_version.py", "jit/__init__.py", "jit/compiler.py"):
            (root / "tokenloom" / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "tokenloom" / part, root / "tokenloom" / part)
        for file, text in (
            (f"tokenloom/kernels/{name}.cuh", KERNEL.format(name=name, sign=sign)),
            ("tests/kernels/variants.py", VARIANTS.format(name=name)),
        ):
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).write_text(text)
        (root / "tools").mkdir()
        shutil.copy(SCRIPT, root / "tools")
        return root

    return make


def compare(ours: Path, theirs: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ours / "tools" / SCRIPT.name), str(theirs), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
@needs_nvrtc
def test_a_renamed_kernel_is_the_same(trees: Any) -> None:
    """Names are no part of the code; variants are paired by names that one says are alike."""
    done = compare(trees("fill"), trees("write"), "--rename", "write=fill")
    assert (done.returncode, done.stdout) == (0, "2 of 2 variants have the same machine code\n"), done.stderr
    done = compare(trees("fill"), trees("write"))
    assert done.returncode == 1, "nothing was compared"
    assert "only here: fill, 1; fill, 2\nonly there: write, 1; write, 2\n" in done.stdout


@needs_nvrtc
def test_another_operand_is_a_difference(trees: Any) -> None:
    """Each variant is told by name, with the size of its code on both sides."""
    done = compare(trees(sign="+"), trees(sign="^"), "--only", "fill, 2")
    assert done.returncode == 1
    first, last = done.stdout.splitlines()
    assert first.startswith("fill, 2: ")
    assert "instructions" in first
    assert "opcodes 0x" in first
    assert last == "0 of 1 variants have the same machine code"


@needs_nvrtc
def test_a_tree_without_a_list_needs_one(trees: Any) -> None:
    """An old checkout, or one of another layout: the list may lie anywhere."""
    ours, theirs = trees(), trees()
    moved = theirs.parent / f"{theirs.name} list.py"
    shutil.move(theirs / "tests" / "kernels" / "variants.py", moved)
    done = compare(ours, theirs)
    assert done.returncode == 1
    assert "--variants" in done.stderr
    assert compare(ours, theirs, "--variants", str(moved)).returncode == 0
