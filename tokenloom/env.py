"""Environment variables, which only this module reads. docs/reference/environment.md lists them."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from functools import cache
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder for kernels and choices: TOKENLOOM_CACHE_DIR, the user's cache folder, or a temporary one."""
    chosen = os.environ.get("TOKENLOOM_CACHE_DIR")
    if chosen:
        return _at_home(chosen)
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg:
        return Path(xdg, "tokenloom")
    home = os.environ.get("HOME")
    if home:
        return Path(home, ".cache", "tokenloom")
    try:
        folder = Path(tempfile.gettempdir(), f"tokenloom-{os.getuid()}")
        return folder if _is_ours(folder) else _process_folder()
    except OSError:  # nowhere to write: kernels are not kept
        return Path(os.devnull, "tokenloom")


def _at_home(folder: str) -> Path:
    """Return the folder with ``~`` as the home folder: what sets the variable need not be a shell."""
    try:
        return Path(folder).expanduser()
    except RuntimeError:  # there is no such home folder
        return Path(folder)


def _is_ours(folder: Path) -> bool:
    """Return whether only this user can write to the folder, making it if needed. Others could plant code in it."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


@cache
def _process_folder() -> Path:
    """Make a folder for this process alone, so the next process compiles its kernels again."""
    return Path(tempfile.mkdtemp(prefix="tokenloom-"))


def rendezvous() -> tuple[str, int, int]:
    """Return where the nodes of a job meet, how many there are, and which one this is.

    From MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK, as programs for DeepEP set them: of nodes, not of processes.
    """
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "8361")
    return f"tcp://{address}:{port}", int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))


def appear_as_a_host(name: str) -> None:
    """Make NCCL take this process for one on another host than those of other names."""
    os.environ["NCCL_HOSTID"] = name


def nccl_plugin() -> str:
    """Return the network plugin that NCCL is told to load, by NCCL_GIN_PLUGIN or NCCL_NET_PLUGIN, or ""."""
    return os.environ.get("NCCL_GIN_PLUGIN") or os.environ.get("NCCL_NET_PLUGIN", "")
