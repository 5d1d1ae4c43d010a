"""What every row says about where it was measured."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch

from tokenloom._version import __version__

GIT_LIMIT_S = 10.0


def machine_setup(device: str) -> dict[str, str | None]:
    """commit, versions and device name. The commit is None outside a checkout, and ends in -dirty after changes."""
    return {
        "commit": commit(),
        "tokenloom": __version__,
        "torch": str(torch.__version__),
        "device": device,
        "device_name": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
    }


def commit(folder: Path = Path(__file__).parent) -> str | None:
    """The commit of the checkout that holds ``folder``; None if that is no checkout, or git does not track it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_LIMIT_S).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # not the checkout of a project that installed tokenloom
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def cpu_name() -> str:
    """Model of the CPU, as well as the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
