"""What commands print on, and the codes they exit with."""

from __future__ import annotations

import sys

from rich.console import Console

FAILED = 1
INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""
INTERRUPTED_TEXT = "tokenloom: interrupted"
WIDTH_OF_FILES = 120
"""Columns where the output is not a terminal: enough for every table."""


def console() -> Console:
    """A console as wide as the terminal, or WIDTH_OF_FILES columns where there is none."""
    terminal = sys.stdout is not None and sys.stdout.isatty()  # None: closed by whoever started the command
    return Console(width=None if terminal else WIDTH_OF_FILES, highlight=False)
