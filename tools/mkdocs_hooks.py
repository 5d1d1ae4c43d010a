"""What mkdocs.yml cannot say: the command line's reference comes from its help."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

COMMANDS_MARK = "<!-- commands -->"
"""Stands in docs/reference/command-line.md where the help of all commands goes."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with the text of each page."""
    return markdown.replace(COMMANDS_MARK, commands()) if COMMANDS_MARK in markdown else markdown


def on_page_content(html: str, **_: Any) -> str:
    """Called by MkDocs with each page's HTML. The templates for parameters leave blanks inside of brackets."""
    return re.sub(r"</code>\s+\)", "</code>)", re.sub(r"\(\s+<code>", "(<code>", html))


def commands() -> str:
    """Markdown of every command and its options: a section each, below the heading of the page."""
    command = [sys.executable, "-m", "typer", "tokenloom.cli.app", "utils", "docs", "--name", "tokenloom"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    first = "## `tokenloom "
    return first + text.partition(first)[2]
