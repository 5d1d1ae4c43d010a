"""What a file of rows says about where they were measured."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from tokenloom._version import __version__
from tokenloom.tune.choices import device_name

ASK_LIMIT_S = 10.0
"""For another program's answer."""


def run_setup(device: str, num_ranks: int, command: Sequence[str]) -> dict[str, str | int | None]:
    """Where and how a run measures.

    Args:
        device: "cpu" or "cuda". num_ranks: W.
        command: the arguments of ``tokenloom``.

    Returns:
        commit (None outside a checkout; ends in -dirty after changes), versions of tokenloom, torch, and, on GPUs,
        CUDA, NCCL and the driver (None where it cannot be told), device, device_name, num_ranks, command.
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
    """The commit of the checkout that holds ``folder``; None if that is no checkout, or git does not track it."""

    def git(*arguments: str) -> str:
        return _output(["git", "-C", str(folder), *arguments])

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # not the checkout of a project that installed tokenloom
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def driver() -> str | None:
    """Version of the NVIDIA driver, by the program that comes with it; None if that does not say."""
    try:
        found = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    except (OSError, subprocess.SubprocessError):
        return None
    return found.partition("\n")[0] or None


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=ASK_LIMIT_S).stdout.strip()
