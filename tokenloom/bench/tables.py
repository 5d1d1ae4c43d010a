"""Tables and lines that are as wide as there is room: words and numbers stay whole, and nothing is cut off."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

UNLIMITED = 10_000


class Fitted:
    """A table for the width of the console that prints it. Without this, rich cuts off what is too wide.

    Cells wrap between words, and behind the "/" of paths and names. Where that is not enough, columns without lines
    between them move together. Where they are too many even so, the table is printed as several, one below the other,
    each with the first columns.

    Args:
        table: its columns are taken in their order. What it says of a column's width does not count.
        keys: how many columns tell a row from others; each of several tables has them.
    """

    def __init__(self, table: Table, keys: int = 1) -> None:
        self._table, self._keys = table, keys

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        cells = [[_text(console, cell) for cell in (each.header, *each.cells)] for each in self._table.columns]
        natural = [max(len(line) for text in column for line in text.split("\n")) for column in cells]
        least = [max([0, *(len(piece.strip()) for text in column for piece in _pieces(text))]) for column in cells]
        paddings: list[Any] = [self._table.padding, *([0] if self._table.box is box.SIMPLE_HEAD else [])]
        for padding in paddings:
            frame = _Frame(self._table, padding, console, options)
            groups = self._groups(frame, least)
            if len(groups) == 1:
                break
        for number, chosen in enumerate(groups):
            widths = frame.shrunk(chosen, natural, least)
            headers = [_wrapped(cells[each][0], width) for each, width in zip(chosen, widths, strict=True)]
            part = frame.empty(chosen, widths, headers, titled=number == 0)
            columns = [
                [_wrapped(text, width) for text in cells[each][1:]] for each, width in zip(chosen, widths, strict=True)
            ]
            for row in zip(*columns, strict=True):
                part.add_row(*row)
            yield part

    def _groups(self, frame: _Frame, least: Sequence[int]) -> list[list[int]]:
        """Columns of each table: the first ones, and as many others as there is room for."""
        keys, rest = list(range(self._keys)), list(range(self._keys, len(least)))
        groups = [[*keys, *rest[:1]]]
        for each in rest[1:]:
            more = [*groups[-1], each]
            if sum(least[column] for column in more) <= frame.room_for(more):
                groups[-1] = more
            else:
                groups.append([*keys, each])
        return groups


class _Frame:
    """Surroundings of cells: lines and blanks of a table like ``whole``."""

    def __init__(self, whole: Table, padding: Any, console: Console, options: ConsoleOptions) -> None:
        self._whole, self._padding = whole, padding
        self._console, self._options = console, options

    def room_for(self, chosen: Sequence[int]) -> int:
        """Columns of the console that the cells of a row may take."""
        part = self.empty(chosen, [1] * len(chosen), [Text()] * len(chosen), titled=False)
        part.add_row(*["x"] * len(chosen))
        around = Measurement.get(self._console, self._options.update(max_width=UNLIMITED), part).maximum - len(chosen)
        return self._options.max_width - around

    def shrunk(self, chosen: Sequence[int], natural: Sequence[int], least: Sequence[int]) -> list[int]:
        """Widths of columns: the widest gives way first. Words break only where there is no room for them at all."""
        widths, room = [natural[each] for each in chosen], self.room_for(chosen)
        for floors in ([least[each] for each in chosen], [1] * len(widths)):
            while sum(widths) > room:
                slack = [place for place, floor in enumerate(floors) if widths[place] > floor]
                if not slack:
                    break
                widths[max(slack, key=widths.__getitem__)] -= 1
        return [max(1, each) for each in widths]

    def empty(self, chosen: Sequence[int], widths: Sequence[int], headers: Sequence[Text], *, titled: bool) -> Table:
        """A table without rows."""
        whole = self._whole
        part = Table(
            title=whole.title if titled else None,
            title_justify=whole.title_justify,
            title_style=whole.title_style,
            box=whole.box,
            padding=self._padding,
            show_header=whole.show_header,
            show_edge=whole.show_edge,
        )
        for each, width, header in zip(chosen, widths, headers, strict=True):
            part.add_column(header, justify=whole.columns[each].justify, overflow="fold", width=width)
        return part


def _text(console: Console, cell: object) -> Text:
    return cell if isinstance(cell, Text) else console.render_str(str(cell), highlight=False)


def _pieces(text: Text) -> list[str]:
    """Pieces that stay together, each with the blanks before it."""
    found = []
    for word in re.findall(r"\s*\S+", text.plain):
        found += re.findall(r"[^/]*/+|[^/]+", word) if word.count("/") > 1 else [word]
    return found


def _wrapped(text: Text, width: int) -> Text:
    """The text with line breaks, so that no line is wider unless a single piece of it is."""
    lines: list[Text] = []
    for line in text.split("\n"):
        breaks, start, end = [], 0, 0
        for piece in _pieces(line):
            after = end + len(piece)
            if after - start > width and end > start:
                start = after - len(piece.lstrip())
                breaks.append(start)
            end = after
        lines += line.divide(breaks)
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)


def make_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]] = (),
    *,
    title: str | None = None,
    title_style: str | None = "bold",
    left: Sequence[int] = (0,),
    padding: Any = (0, 1, 0, 0),
    show_edge: bool = True,
) -> Table:
    """A table of numbers, which stand on the right.

    Args:
        left: columns of words, which stand on the left.
    """
    table = Table(
        title=title,
        title_justify="left",
        title_style=title_style,
        box=box.SIMPLE_HEAD,
        padding=padding,
        show_edge=show_edge,
    )
    for place, header in enumerate(headers):
        table.add_column(header, justify="left" if place in left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def counted(count: int, word: str) -> str:
    """So many of a thing, in words."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def say(console: Console, *lines: str) -> None:
    """Print lines that wrap between words, with what follows a little further to the right. Paths stay whole."""
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        wrapped = textwrap.fill(
            line, console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        console.print(wrapped, markup=False, highlight=False, soft_wrap=True)
