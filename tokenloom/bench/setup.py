"""Where and how a run measures, and the file that keeps rows with it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tokenloom._version import __version__
from tokenloom.bench.tables import Fitted, counted
from tokenloom.runtime.devices import device_name
from tokenloom.runtime.processes import RankPool

TRANSPORTS = {"cpu": "gloo", "cuda": "nccl"}
"""Transport of a RankPool's process groups, by device."""
ANSWER_LIMIT_S = 10.0
"""Time that another program has for its answer."""


def machine(device: str) -> str:
    """The machine of the ranks, for people: the GPU, or the CPU and the cores that this process may use."""
    name = device_name(torch.device(device))
    if device == "cuda":
        return name
    cores = len(os.sched_getaffinity(0))
    return f"CPU, {counted(cores, 'core')} ({name})"


def run_setup(device: str, num_ranks: int, command: Sequence[str]) -> dict[str, str | int | None]:
    """Describe a run.

    Args:
        command: the arguments of ``tokenloom``.

    Returns:
        commit (None outside a checkout, ends in -dirty after changes); versions of tokenloom and torch; on GPUs those
        of CUDA, NCCL and the driver (else None, as where they are unknown); device; device_name; num_ranks; command.
    """
    gpu = device == "cuda"
    return {
        "commit": commit(),
        "tokenloom": __version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda if gpu else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
        "driver": driver() if gpu else None,
        "device": device,
        "device_name": device_name(torch.device(device)),
        "num_ranks": num_ranks,
        "command": shlex.join(["tokenloom", *command]),
    }


def commit(folder: Path = Path(__file__).parent) -> str | None:
    """The commit of the checkout that holds ``folder``; None outside a checkout that tracks the folder."""

    def git(*arguments: str) -> str:
        return _output(["git", "-C", str(folder), *arguments])

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # not the checkout of a project that installed tokenloom
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def driver() -> str | None:
    """Version of the NVIDIA driver, as the program that comes with it says; None if it does not."""
    try:
        found = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    except (OSError, subprocess.SubprocessError):
        return None
    return found.partition("\n")[0] or None


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=ANSWER_LIMIT_S).stdout.strip()


def write_json(file: Path, setup: Mapping[str, Any], notes: Sequence[str], rows: Sequence[Any]) -> None:
    """Write one JSON object: ``setup``, which all rows share, ``notes``, and ``rows``.

    Args:
        notes: why rows are missing, and what else a reader must know to believe the rest.
        rows: dataclasses.
    """
    content = {"setup": setup, "notes": list(notes), "rows": [asdict(row) for row in rows]}
    file.write_text(json.dumps(content, indent=1) + "\n")


@dataclass(frozen=True)
class Run:
    """How a command measures, and where its results go.

    Attributes:
        num_ranks, device: W ranks on "cpu" or "cuda".
        json_file, plot_file: for the rows with their setup, and for a chart; None: not asked for.
    """

    console: Console
    num_ranks: int
    device: str
    command: Sequence[str]
    json_file: Path | None = None
    plot_file: Path | None = None

    def setup(self) -> dict[str, Any]:
        """The description that :func:`run_setup` makes."""
        return run_setup(self.device, self.num_ranks, self.command)

    def say(self, *lines: str) -> None:
        """Print lines as they are."""
        for line in lines:
            self.console.print(line, markup=False)

    def show(self, table: Table, keys: int = 1) -> None:
        """Print a table, see :class:`Fitted`."""
        self.console.print(Fitted(table, keys))

    @contextmanager
    def ranks(self) -> Iterator[tuple[RankPool, Callable[[str], None]]]:
        """Start the ranks; and what shows what they are doing."""
        starting = f"starting {counted(self.num_ranks, 'rank')}"
        with RankPool(self.num_ranks, self.device) as pool, self.console.status(starting) as status:
            yield pool, status.update

    def keep(self, setup: Mapping[str, Any], notes: Sequence[str], rows: Sequence[Any], what: str = "rows") -> None:
        """Write the file of rows, if it was asked for."""
        if self.json_file is not None:
            write_json(self.json_file, setup, notes, rows)
            self.say(f"{what} written to {self.json_file}")
