"""What commands print on, and the codes they exit with."""

from __future__ import annotations

import sys

from rich.console import Console

FAILED = 1
INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""
WIDTH_OF_FILES = 120
"""Columns where the output is not a terminal: enough for every table."""


def console() -> Console:
    """A console as wide as the terminal, or WIDTH_OF_FILES columns where there is none."""
    return Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES, highlight=False)
