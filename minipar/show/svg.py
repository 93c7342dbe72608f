"""A sheet on which shapes are written as SVG, in the order in which they cover each other.

Idea    SVG is text, so a drawing needs no library: a shape is one line. There are no ids, no styles and no references
        in it, so that any number of drawings stand on one page, inline, without getting into each other's way. That
        is also why hatching is written out as lines, and not as a pattern that shapes refer to.
Cost    About a microsecond a shape.
Read    `drawing.py` for what becomes of a sheet.
"""

from __future__ import annotations

from html import escape

from minipar.show.palette import INK, PAPER

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, 'DejaVu Sans', sans-serif"


NARROW, WIDE = set(" .,:;'|!()[]/-filjtrI"), set("mwMW%@+=")


def text_width(text: str, font: float) -> float:
    """About how wide a text is: no two readers have the same font, so rather too wide than too narrow."""
    return font * sum(0.37 if c in NARROW else 0.95 if c in WIDE else 0.72 if c.isupper() else 0.6 for c in text)


class Sheet:
    """A page of fixed width that grows downwards. Sizes are in pixels, y runs down."""

    def __init__(self, width: float) -> None:
        self.width = width
        self.height = 0.0
        self._parts: list[str] = []

    def write(self, part: str) -> None:
        """Add SVG as it is."""
        self._parts.append(part)

    @property
    def content(self) -> str:
        """All that was written, to be put on another sheet."""
        return "".join(self._parts)

    def rect(self, x: float, y: float, width: float, height: float, fill: str, more: str = "", tip: str = "") -> None:
        """A rectangle; `tip` is shown when the mouse rests on it."""
        body = f"><title>{escape(tip)}</title></rect>" if tip else "/>"
        self.write(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" fill="{fill}"{more}{body}')

    def line(
        self, x1: float, y1: float, x2: float, y2: float, stroke: str = INK, width: float = 1, dash: str = ""
    ) -> None:
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.write(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" '
            f'stroke-width="{width:g}"{dashes}/>'
        )

    def path(self, d: str, stroke: str = "none", width: float = 1, fill: str = "none", more: str = "") -> None:
        """Any outline, in the notation of SVG."""
        if d:
            self.write(f'<path d="{d}" stroke="{stroke}" stroke-width="{width:g}" fill="{fill}"{more}/>')

    def text(
        self, x: float, y: float, text: str, font: float = 12, fill: str = INK, anchor: str = "start", more: str = ""
    ) -> None:
        """Text on the baseline y, that starts, is centred (middle) or ends at x."""
        anchored = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.write(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{font:g}" fill="{fill}"{anchored}{more}>{escape(text)}</text>'
        )

    def svg(self, title: str, description: str) -> str:
        """The whole picture. Title and description are its text alternative, for those who do not see it."""
        label, height = escape(title, quote=True), round(self.height)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {height}" width="{self.width:g}" '
            f'height="{height}" role="img" aria-label="{label}" font-family="{FONT}" '
            'style="max-width:100%;height:auto;display:block">'
            f"<title>{label}</title><desc>{escape(description)}</desc>"
            f'<rect width="{self.width:g}" height="{height}" fill="{PAPER}"/>{self.content}</svg>'
        )


TIMES = "\N{MULTIPLICATION SIGN}"
HALO = f' stroke="{PAPER}" stroke-width="4" stroke-linejoin="round" paint-order="stroke"'  # around text on anything
BOLD, BOLDER = ' font-weight="600"', 1.1  # bold letters are so much wider


def hatching(x: float, y: float, width: float, height: float, step: float = 6) -> str:
    """Lines through a rectangle, from bottom left to top right, as the outline of a path."""
    pieces = []
    # The lines x + y = c; they start from the same grid everywhere, so that neighbouring rectangles fit together.
    c = (x + y) // step * step + step
    while c < x + width + y + height:
        x1, y1 = (x, c - x) if c - x <= y + height else (c - y - height, y + height)
        x2, y2 = (c - y, y) if c - y <= x + width else (x + width, c - x - width)
        pieces.append(f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}")
        c += step
    return "".join(pieces)


def arrow_head(x: float, y: float, dx: float, dy: float, size: float = 6) -> str:
    """The outline of an arrow's head whose tip is at (x, y), pointing along (dx, dy)."""
    length = (dx * dx + dy * dy) ** 0.5 or 1.0
    ux, uy = dx / length * size, dy / length * size
    left, right = (x - ux - uy / 2, y - uy + ux / 2), (x - ux + uy / 2, y - uy - ux / 2)
    return f"M{x:.1f} {y:.1f}L{left[0]:.1f} {left[1]:.1f}L{right[0]:.1f} {right[1]:.1f}Z"


def wrapped(text: str, font: float, width: float) -> list[str]:
    """The text in lines that are at most so wide."""
    lines: list[str] = []
    for word in text.split():
        if lines and text_width(f"{lines[-1]} {word}", font) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
