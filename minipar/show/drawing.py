"""A finished picture: it shows itself in a notebook, says itself in words, and saves itself.

Idea    One SVG is the picture everywhere: inline in a notebook or a page, in a file, and, through resvg, as a PNG. So
        what was looked at and tested once is what everybody sees.
Source  resvg (github.com/linebender/resvg) draws SVG to pixels; `resvg-py` is its wheel for every platform, 3 MB and
        nothing else to install. matplotlib cannot read SVG: it would need a second drawing of everything.
Read    `timelines.py`, `meshes.py`, `memories.py` and `cuts.py`, which make pictures.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from minipar.show.saving import save

ZOOM = 2.0  # pixels of a PNG for one of the drawing


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
        return png(self.svg)

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


def png(svg: str) -> bytes:
    """The picture in pixels. Raises `ValueError` when the package that draws them, or any font, is missing."""
    try:
        from resvg_py import svg_to_bytes
    except ImportError:
        raise ValueError("a PNG needs the package resvg-py: pip install resvg-py, or name the file .svg") from None
    fonts: dict[str, Any] = {
        "font_dirs": _matplotlib_fonts(),
        "sans_serif_family": "DejaVu Sans",  # matplotlib's own; without a name, resvg looks for Arial alone
        "monospace_family": "DejaVu Sans Mono",
    }
    empty = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9">{}</svg>'
    letter = empty.format('<text y="9" font-family="sans-serif">M</text>')
    if svg_to_bytes(letter, **fonts) == svg_to_bytes(empty.format(""), **fonts):
        raise ValueError(
            "a PNG needs a font, and there is none here: install one (fonts-dejavu), or name the file .svg"
        )
    return bytes(svg_to_bytes(svg, zoom=ZOOM, **fonts))


def _matplotlib_fonts() -> list[str]:
    """Where matplotlib, if it is installed, keeps its own fonts: enough for a machine that has none."""
    spec = importlib.util.find_spec("matplotlib")
    folder = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf" if spec and spec.origin else None
    return [str(folder)] if folder and folder.is_dir() else []
