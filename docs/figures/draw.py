"""Draws the figures of the README and of the documents, for light and for dark pages.

python docs/figures/draw.py [--check]

With --check it writes nothing, and fails unless each file is as it would be written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import beside_others
import token_way
from svg import THEMES

FOLDER = Path(__file__).resolve().parent
FIGURES = {"token-way": token_way.draw, "beside-others": beside_others.draw}


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw the figures of the README and of the documents.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not current")
    options = parser.parse_args()
    stale = []
    for name, draw in FIGURES.items():
        for theme, colours in THEMES.items():
            file, text = FOLDER / f"{name}-{theme}.svg", draw(colours).svg()
            if not options.check:
                file.write_text(text)
            elif not file.exists() or file.read_text() != text:
                stale.append(file.name)
    if stale:
        print(f"not current: {', '.join(stale)}; run python docs/figures/draw.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
