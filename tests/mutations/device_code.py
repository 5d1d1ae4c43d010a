"""Replace one piece of CUDA code inside one symbol of a header, whatever its spaces, line breaks and comments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

TOKEN = re.compile(
    r"""
    (?P<skipped> \s+ | //[^\n]* | /\*.*?\*/ )
  | (?P<text> "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' )
  | (?P<word> [A-Za-z_0-9.]+ )
  | (?P<sign> :: | -> | <<= | >>= | [-+*/%&|^=!<>]= | && | \|\| | \+\+ | -- | . )
    """,
    re.VERBOSE | re.DOTALL,
)
CLOSING = {"(": ")", "{": "}"}


@dataclass(frozen=True)
class Token:
    """A word, sign or literal, and where it stands."""

    text: str
    start: int
    end: int


def replace_in_symbol(source: str, symbol: str, old: str, new: str) -> str:
    """The header with ``new`` in place of ``old`` inside ``symbol``.

    Args:
        source: Text of the header.
        symbol: Name of a function or struct; ``Outer::name`` for one inside a struct. Constructors are not found.
        old: Code, compared token by token.
        new: Text that replaces it.

    Raises:
        LookupError: The symbol is not there, or ``old`` does not stand in it exactly once.
    """
    tokens = tokenize(source)
    bodies = [(0, len(tokens))]
    for name in symbol.split("::"):
        bodies = [body for start, end in bodies for body in _bodies(tokens, name, start, end)]
    if not bodies:
        raise LookupError(f"there is no {symbol}")
    wanted = [token.text for token in tokenize(old)]
    places = [
        at
        for start, end in bodies
        for at in range(start, end - len(wanted) + 1)
        if [token.text for token in tokens[at : at + len(wanted)]] == wanted
    ]
    if len(places) != 1:
        raise LookupError(f"{symbol} should hold the following code once, it holds it {len(places)} times:\n{old}")
    first, last = tokens[places[0]], tokens[places[0] + len(wanted) - 1]
    return source[: first.start] + new + source[last.end :]


def tokenize(source: str) -> list[Token]:
    found = TOKEN.finditer(source)
    return [Token(each.group(), *each.span()) for each in found if each.lastgroup != "skipped"]


def _bodies(tokens: list[Token], name: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Ranges of the tokens between the braces of each definition of the name."""
    for at in range(start, end):
        if tokens[at].text != name:
            continue
        is_struct = tokens[at - 1].text in ("struct", "class") and at > start
        opening = at + 1
        if not is_struct:
            if tokens[opening].text != "(":
                continue
            opening = _closed(tokens, opening) + 1
        ends = ("{", ";", "}", ")") if is_struct else ("{", ";", "}", ")", ",")
        while opening < end and tokens[opening].text not in ends:
            opening += 1  # base classes, const, noexcept
        if opening < end and tokens[opening].text == "{":
            yield opening + 1, _closed(tokens, opening)


def _closed(tokens: list[Token], at: int) -> int:
    """Index of the bracket that closes the one at ``at``."""
    opening, depth = tokens[at].text, 0
    for index in range(at, len(tokens)):
        depth += (tokens[index].text == opening) - (tokens[index].text == CLOSING[opening])
        if depth == 0:
            return index
    raise LookupError(f"{opening} is never closed")
