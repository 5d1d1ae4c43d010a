"""Where and how a run measures, for the file of its rows."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from tokenloom._version import __version__
from tokenloom.bench.common.tables import counted
from tokenloom.tune.choices import device_name

TRANSPORTS = {"cpu": "gloo", "cuda": "nccl"}
"""Transport of a RankPool's process groups, by device."""
ANSWER_LIMIT_S = 10.0
"""Time that another program has for its answer."""


def machine(device: str) -> str:
    """What the ranks run on, for people: the GPU, or the CPU and the cores that this process may use.

    Args:
        device: "cpu" or "cuda".
    """
    name = device_name(torch.device(device))
    if device == "cuda":
        return name
    cores = len(os.sched_getaffinity(0))
    return f"CPU, {counted(cores, 'core')} ({name})"


def run_setup(device: str, num_ranks: int, command: Sequence[str]) -> dict[str, str | int | None]:
    """Describe a run.

    Args:
        device: "cpu" or "cuda".
        num_ranks: W.
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
