"""A finished picture: it shows itself in a notebook, says itself in words, and saves itself.

Idea    One SVG is the picture everywhere: inline in a notebook or a page, in a file, and, through resvg, as a PNG. So
        what was looked at and tested once is what everybody sees.
Source  resvg (github.com/linebender/resvg) draws SVG to pixels; `resvg-py` is its wheel for every platform, 3 MB and
        nothing else to install. matplotlib cannot read SVG: it would need a second drawing of everything.
Read    `timelines.py`, `meshes.py`, `memories.py` and `cuts.py`, which make pictures.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from html import escape

from minipar.show import pixels
from minipar.show.saving import save


@dataclass(frozen=True)
class Drawing:
    """A picture as `svg`, and in words: `title` states its message, `description` says what there is to see."""

    svg: str
    title: str
    description: str

    def _repr_html_(self) -> str:
        """Inline, and not as an image file, so that screen readers find the words, and the mouse the boxes."""
        return self.svg

    def __repr__(self) -> str:
        return f"{self.title}\n{self.description}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file whose name ends in .svg, .png or .html. Raises `ValueError` for another."""
        save(path, {".svg": self.to_svg, ".png": self.to_png, ".html": self.to_html})

    def to_svg(self) -> bytes:
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{self.svg}\n'.encode()

    def to_png(self) -> bytes:
        return pixels.png(self.svg)

    def to_html(self) -> bytes:
        return page(self.title, self.svg).encode()


def page(title: str, body: str) -> str:
    """A page that stands alone: nothing is fetched from elsewhere."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title></head>\n"
        f'<body style="margin:1rem auto;max-width:1240px;padding:0 1rem;background:#fff">\n{body}\n</body></html>\n'
    )
