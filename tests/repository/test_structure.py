"""tools/check_structure.py passes on this tree, and finds every kind of fault that it is there for.

Faults are planted in a small package with the rooms of the real one, so that no rename there touches these tests.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / "tools" / "check_structure.py"
check = load_script(CHECK).check

HOUSE = {
    "__init__": "from tokenloom.comm.communicator import Communicator\n",
    "__main__": "from tokenloom.cli.app import main\n",
    "_version": '__version__ = "1"\n',
    "plan": "class Plan:\n    def __init__(self):\n        self._sizes = {}\n",
    "errors": "class TokenloomError(Exception): ...\n",
    "env": "import os\nFOLDER = os.environ.get('TOKENLOOM_FOLDER')\n",
    "reference": "import dataclasses\nimport torch\nfrom tokenloom.plan import Plan\n",
    "runtime.__init__": "",
    "runtime.ranks": "_made = 0\nclass Ranks:\n    def _wait(self):\n        return _made\n",
    "jit.__init__": "",
    "jit.cache": "from tokenloom import __version__\n",
    "kernels.__init__": "",
    "kernels.common.__init__": "",
    "kernels.common.buffers": "from tokenloom.plan import Plan\n",
    "kernels.one.__init__": "",
    "kernels.one.launch": "from tokenloom.kernels.common.buffers import Plan\n",
    "kernels.two.__init__": "",
    "kernels.two.launch": "from tokenloom.kernels.two import args\n",
    "kernels.two.args": "",
    "ops.__init__": "",
    "ops.routing": "from tokenloom.kernels.one import launch\n",
    "backends.__init__": "",
    "backends.base": "from tokenloom.runtime.ranks import Ranks\n",
    "backends.collective": "from tokenloom.backends import base\nNAME = 'collective'\nIS_THIS = NAME == 'nvlink'\n",
    "comm.__init__": "",
    "comm.communicator": "from tokenloom.backends.collective import NAME\nclass Communicator:\n    _number = 0\n",
    "training.__init__": "",
    "training.layer": "from tokenloom.comm.communicator import Communicator\nfrom tokenloom.ops import routing\n",
    "tune.__init__": "",
    "tune.choices": "",
    "demo.__init__": "",
    "demo.run": "import tokenloom as tl\n",
    "cli.__init__": "",
    "cli.app": "from tokenloom.demo import run\n",
}
"""Module -> text. It has no fault."""


@pytest.fixture
def house(tmp_path: Path) -> Path:
    for name, text in HOUSE.items():
        write(tmp_path, name, text)
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    """Append to a module of the small package."""
    path = root.joinpath("tokenloom", *name.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"{text}\n")


@pytest.mark.slow
def test_this_tree_passes() -> None:
    """Run as CI runs it."""
    done = subprocess.run([sys.executable, str(CHECK)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "structure: fine\n"


def test_the_small_package_passes(house: Path) -> None:
    """So the tests below fail for what they plant alone. Lower rooms, own rooms and `__version__` may be imported."""
    assert check(house) == []


# module, text appended to it, what the fault must say
FAULTS = {
    "upward": (
        "comm.communicator",
        "from tokenloom.training import layer",
        "comm.communicator imports training.layer",
    ),
    "far upward": ("errors", "import tokenloom.comm.communicator", "errors imports comm.communicator, which is above"),
    "public names from below": (
        "training.layer",
        "import tokenloom as tl",
        "training.layer imports __init__, which is",
    ),
    "relative": ("ops.routing", "from ..training import layer", "ops.routing imports training.layer, which is above"),
    "relative, from a package": ("ops.__init__", "from ..comm import communicator", "ops imports comm.communicator"),
    "inside a function": (
        "ops.routing",
        "def late():\n    from tokenloom.tune import choices",
        "imports tune.choices",
    ),
    "for types alone": (
        "runtime.ranks",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tokenloom.backends.base import Ranks",
        "runtime.ranks imports backends.base, which is above it",
    ),
    "kernel uses kernel": (
        "kernels.one.launch",
        "from tokenloom.kernels.two import args",
        "kernels.one.launch imports kernels.two.args, another kernel; share through kernels.common",
    ),
    "common part uses a kernel": (
        "kernels.common.buffers",
        "from tokenloom.kernels.two import args",
        "kernels.common.buffers imports kernels.two.args, another kernel",
    ),
    "private attribute of another room": (
        "training.layer",
        "def peek(comm):\n    return comm._number",
        "touches _number, which is private to another room",
    ),
    "private method of another room": (
        "backends.base",
        "def wait(ranks):\n    ranks._wait()",
        "touches _wait, which is private to another room",
    ),
    "private attribute that is set": ("ops.routing", "def size(plan):\n    plan._sizes['x'] = 1", "touches _sizes"),
    "private import": (
        "backends.base",
        "from tokenloom.runtime.ranks import _made",
        "imports _made of runtime.ranks, which is private to its room",
    ),
    "backend asked by name": (
        "training.layer",
        "def is_fast(comm):\n    return comm.backend == 'nvlink'",
        "asks which backend it has; ask for a capability instead",
    ),
    "backend among names": (
        "comm.communicator",
        "def is_slow(name):\n    return name in ('collective', 'other')",
        "asks which backend it has",
    ),
    "backend asked by class": (
        "comm.communicator",
        "def is_ours(backend, CollectiveBackend):\n    return isinstance(backend, CollectiveBackend)",
        "asks which backend it has",
    ),
    "cycle of modules": (
        "backends.base",
        "from tokenloom.backends import collective",
        "cycle of imports: backends.collective -> backends.base -> backends.collective",
    ),
    "reference shares code": (
        "reference",
        "from tokenloom.ops import routing",
        "reference imports ops.routing, it may",
    ),
    "reference needs more": ("reference", "import numpy as np", "reference imports numpy, it may import only torch"),
    "unknown room": ("helpers.text", "x = 1", "tokenloom.helpers.text has no place in LAYERS"),
    "import of an unknown room": ("ops.routing", "from tokenloom.helpers import x", "helpers, which has no place"),
    "environ": ("ops.routing", "import os\nx = os.environ.get('X')", "touches environment variables; only"),
    "getenv": ("training.layer", "from os import getenv", "touches environment variables; only tokenloom/env.py may"),
    "Python too long": ("ops.long", "#\n" * 801, "tokenloom/ops/long.py: 802 lines, at most 800; split it"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_kind_of_fault_is_found(name: str, house: Path) -> None:
    module, text, said = FAULTS[name]
    write(house, module, text)
    assert [fault for fault in check(house) if said in fault], check(house)


def test_rooms_of_one_layer_in_a_circle(house: Path) -> None:
    """No two modules import each other: the rooms do."""
    write(house, "training.options", "from tokenloom.tune import choices")
    assert check(house) == []
    write(house, "tune.profiler", "from tokenloom.training import layer")
    assert check(house) == ["cycle of imports: training -> tune -> training"]


def test_privates_of_the_own_room_are_nobodys_business(house: Path) -> None:
    """A private name that this room defines too, or another module of it, is its own."""
    write(house, "comm.engine", "def number(comm):\n    return comm._number")
    write(house, "training.layer", "class Layer:\n    _wait = None\n    def wait(self):\n        return self._wait")
    assert check(house) == []


def test_backends_may_know_each_other(house: Path) -> None:
    """Only rooms above backends/ ask for capabilities; benchmarks compare backends by name."""
    write(house, "demo.run", "def is_fast(comm):\n    return comm.backend == 'nvlink'")
    assert check(house) == []


@pytest.mark.parametrize("file", ["tokenloom/device/long.cuh", "tests/test_long.py", "microbench/long.cu"])
def test_long_files_are_found_everywhere(house: Path, file: str) -> None:
    path = house / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("//\n" * 801)
    assert check(house) == [f"{file}: 801 lines, at most 800; split it"]


def test_an_empty_folder_is_a_fault(tmp_path: Path) -> None:
    """Run from the wrong place it must not say that all is fine."""
    done = subprocess.run([sys.executable, str(CHECK), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no modules here" in done.stdout
