"""The only module that reads environment variables. docs/api.md lists them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Where compiled kernels are kept: TOKENLOOM_CACHE_DIR, else the user's cache folder, else a temporary one."""
    chosen = os.environ.get("TOKENLOOM_CACHE_DIR")
    if chosen:
        return Path(chosen)
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg:
        return Path(xdg, "tokenloom")
    home = os.environ.get("HOME")
    if home:
        return Path(home, ".cache", "tokenloom")
    return Path(tempfile.gettempdir(), f"tokenloom-{os.getuid()}")
