"""Console and exit codes of commands."""

from __future__ import annotations

import shutil
import sys

from rich.console import Console

FAILED = 1
MISUSED = 2
"""The user gave something wrong; click has the same code."""
INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""
INTERRUPTED_TEXT = "tokenloom: interrupted"
WIDTH_OF_FILES = 120
"""Columns where the output is not a terminal and COLUMNS is not set: enough for most tables in one piece."""
LEAST_WIDTH = 40
"""Columns below which words would break."""


def console() -> Console:
    """A console as wide as COLUMNS says, else as the terminal, else WIDTH_OF_FILES columns."""
    terminal = sys.stdout is not None and sys.stdout.isatty()  # None: closed by whoever started the command
    width = shutil.get_terminal_size((WIDTH_OF_FILES, 0)).columns
    return Console(width=None if terminal else max(LEAST_WIDTH, width), highlight=False)
