"""What mkdocs.yml cannot say: the command line's reference comes from its help, colours of code from Pygments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

COMMANDS_MARK = "<!-- commands -->"
"""Stands in docs/reference/command-line.md where the help of all commands goes."""
CODE_STYLE = "css/code.css"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with the text of each page."""
    return markdown.replace(COMMANDS_MARK, commands()) if COMMANDS_MARK in markdown else markdown


def on_post_build(config: Any) -> None:
    """Called by MkDocs once the pages are written. With a style of its own, no page asks another host for one."""
    from pygments.formatters import HtmlFormatter

    style = HtmlFormatter(style="friendly").get_style_defs(".codehilite")
    Path(config["site_dir"], CODE_STYLE).write_text(f"{style}\n")


def commands() -> str:
    """Markdown of every command and its options: a section each, below the heading of the page."""
    command = [sys.executable, "-m", "typer", "tokenloom.cli.app", "utils", "docs", "--name", "tokenloom"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    first = "## `tokenloom "
    return first + text.partition(first)[2]
