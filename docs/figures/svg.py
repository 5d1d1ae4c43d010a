"""A drawing as SVG: boxes, lines, texts, in the colours of a light or a dark page."""

from __future__ import annotations

from dataclasses import dataclass
from xml.sax.saxutils import escape


@dataclass(frozen=True)
class Colours:
    """Colours of a page that a drawing lies on; the drawing itself has no background."""

    text: str
    faint: str
    """Of notes and frames."""
    ours: str
    others: str
    accents: tuple[str, str]
    """Of the two experts that a token goes to."""


THEMES = {
    "light": Colours("#1f2328", "#59636e", "#0969da", "#b6bdc5", ("#0969da", "#bc4c00")),
    "dark": Colours("#e6edf3", "#9198a1", "#4493f8", "#5a626c", ("#4493f8", "#f0883e")),
}


class Drawing:
    """Collects shapes; ``svg()`` is the file's text. Lengths are pixels, and y grows downwards."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._shapes: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, *, fill: str = "none", frame: str = "none",
            radius: float = 0) -> None:  # fmt: skip
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}"'
            f' stroke="{frame}"/>'
        )

    def text(self, x: float, y: float, words: str, colour: str, *, size: float = 13, anchor: str = "start",
             bold: bool = False) -> None:  # fmt: skip
        """Put ``words`` with their baseline at y; ``anchor`` says which end lies at x: start, middle or end."""
        weight = ' font-weight="600"' if bold else ""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" fill="{colour}"{weight}>'
            f"{escape(words)}</text>"
        )

    def arrow(self, points: list[tuple[float, float]], colour: str, *, dashed: bool = False) -> None:
        """Draw a curve from the first point to the last, which has the head; points between them bend it."""
        (x, y), *rest = points
        kind = {1: "L", 2: "Q", 3: "C"}[len(rest)]
        way = " ".join(f"{a:g},{b:g}" for a, b in rest)
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._shapes.append(
            f'<path d="M{x:g},{y:g} {kind}{way}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
        )
        (back_x, back_y), (tip_x, tip_y) = points[-2:]
        length = ((tip_x - back_x) ** 2 + (tip_y - back_y) ** 2) ** 0.5
        along = (tip_x - back_x) / length, (tip_y - back_y) / length
        base = tip_x - 9 * along[0], tip_y - 9 * along[1]
        sides = [(base[0] - side * along[1], base[1] + side * along[0]) for side in (4.5, -4.5)]
        corners = " ".join(f"{a:.1f},{b:.1f}" for a, b in [(tip_x, tip_y), *sides])
        self._shapes.append(f'<polygon points="{corners}" fill="{colour}"/>')

    def svg(self) -> str:
        shapes = "\n".join(self._shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}"'
            f' height="{self.height}" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
            f' role="img">\n<title>{escape(self.title)}</title>\n{shapes}\n</svg>\n'
        )
