"""A picture in pixels: SVG, drawn by resvg.

Idea    What a PNG needs is looked for before a picture is made, and before a run whose picture it is.
Source  resvg (github.com/linebender/resvg); `resvg-py` is its wheel for every platform.
Read    `drawing.py`, whose pictures are drawn.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

ZOOM = 2.0  # pixels of a PNG for one of the drawing


def png(svg: str) -> bytes:
    """The picture in pixels. Raises `ValueError` when the package that draws them, or any font, is missing."""
    check()
    from resvg_py import svg_to_bytes

    return bytes(svg_to_bytes(svg, zoom=ZOOM, **_fonts()))


def check() -> None:
    """Raise `ValueError` when the package that draws pixels, or any font, is missing."""
    try:
        from resvg_py import svg_to_bytes
    except ImportError:
        raise ValueError("a PNG needs the package resvg-py: pip install resvg-py, or name the file .svg") from None
    empty = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9">{}</svg>'
    letter = empty.format('<text y="9" font-family="sans-serif">M</text>')
    if svg_to_bytes(letter, **_fonts()) == svg_to_bytes(empty.format(""), **_fonts()):
        raise ValueError(
            "a PNG needs a font, and there is none here: install one (fonts-dejavu), or name the file .svg"
        )


def _fonts() -> dict[str, Any]:
    """matplotlib, if it is installed, keeps fonts of its own: enough for a machine that has none."""
    spec = importlib.util.find_spec("matplotlib")
    folder = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf" if spec and spec.origin else None
    return {
        "font_dirs": [str(folder)] if folder and folder.is_dir() else [],
        "sans_serif_family": "DejaVu Sans",  # without a name, resvg looks for Arial alone
        "monospace_family": "DejaVu Sans Mono",
    }
