"""Tables that fit any width: words stay whole, nothing is lost, and what does not fit beside comes below."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tokenloom.bench.tables import Fitted, counted, say

WORDS = "every good table tells all it has"


def shown(what: Any, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def made(columns: int = 4, style: Any = box.SIMPLE_HEAD) -> Table:
    table = Table("name", *(f"column {i}" for i in range(columns)), title="a title", title_justify="left", box=style)
    for i in range(columns):
        table.columns[i + 1].justify = "right"
    for row in ("first", "second"):
        table.add_row(row, *(f"{row[0]}{i}23456789" for i in range(columns)))
    return table


@pytest.mark.parametrize("style", [box.SIMPLE_HEAD, box.HEAVY_HEAD])
@pytest.mark.parametrize("width", range(24, 90, 3))
def test_every_width(width: int, style: Any) -> None:
    """Each number is there once and whole, no line is too long, and each part begins with the names of its rows."""
    lines = shown(Fitted(made(style=style)), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for row in ("f", "s"):
        assert all(text.count(f"{row}{i}23456789") == 1 for i in range(4))
    assert "…" not in text
    assert text.count("first") == text.count("second") == text.count("name")
    assert text.count("a title") == 1


def test_as_it_is_where_there_is_room() -> None:
    """One table, as rich prints it."""
    assert shown(Fitted(made()), 120) == shown(made(), 120)


def test_parts_have_the_columns_that_tell_rows_apart() -> None:
    table = Table("a", "b", "c", "d", box=box.SIMPLE_HEAD)
    table.add_row("one", "two", "x" * 12, "y" * 12)
    text = "\n".join(shown(Fitted(table, keys=2), 26))
    assert (text.count("one"), text.count("two"), text.count("x" * 12), text.count("y" * 12)) == (2, 2, 1, 1)


def test_paths_break_behind_slashes() -> None:
    """A unit such as GB/s stays whole; names of rows and kernels do not fit otherwise."""
    table = Table("operation", "GB/s", box=box.SIMPLE_HEAD, padding=0)
    table.add_row("dispatch/collective/bf16/token/wall", "1.5")
    lines = shown(Fitted(table), 28)
    assert [line.split()[0] for line in lines if "/" in line and "GB/s" not in line] == [
        "dispatch/collective/",
        "bf16/token/wall",
    ]
    assert any("GB/s" in line for line in lines)


def test_a_word_wider_than_the_console_is_folded() -> None:
    """It is all there, over several lines."""
    table = Table("", "key", box=None, padding=0)
    table.add_row("k", "0123456789" * 5)
    assert "".join("".join(shown(Fitted(table), 20)).split()) == "key" + "k" + "0123456789" * 5


def test_styles_and_markup_stay() -> None:
    """Cells are those of rich: markup in text, and texts as they are."""
    table = Table("verdict", "what", box=None)
    table.add_row("[green]PASS[/]", Text("[bold] is no style here"))
    text = "\n".join(shown(Fitted(table), 60))
    assert "[bold] is no style here" in text
    assert "[green]" not in text


def test_lines_wrap_between_words() -> None:
    """What follows stands a little further to the right; a path stays whole, so that it can be copied."""
    console = Console(file=io.StringIO(), width=20, highlight=False)
    path = "/a/folder/that/is/longer-than/a/line"
    say(console, f"  {WORDS}", path)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[0].startswith("  every good")
    assert all(line.startswith("    ") for line in lines[1:-1])
    assert " ".join(" ".join(lines[:-1]).split()) == WORDS
    assert lines[-1] == path


def test_so_many() -> None:
    assert (counted(1, "rank"), counted(3, "rank")) == ("1 rank", "3 ranks")
