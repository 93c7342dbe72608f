"""The links of a mesh: a line along each axis, told apart by colour, dashes and direction.

Idea    Along tp the lines run from side to side, along pp from stage to stage with heads at both ends (activations go
        down, gradients up), along dp over the ranks' heads from replica to replica. With traffic, the thickness is
        that of the bytes, and the first line of each axis says them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Protocol

from minipar.show import units
from minipar.show.svg import Sheet, arrow_head, text_width

LINES = {"tp": ("#4d3a63", ""), "pp": ("#2b66a8", ""), "dp": ("#2e7d64", "7 4")}


class Placed(Protocol):
    """A rank's box."""

    @property
    def x(self) -> float: ...
    @property
    def y(self) -> float: ...
    @property
    def width(self) -> float: ...
    @property
    def height(self) -> float: ...


def thickness(axis: str, loads: Mapping[str, int]) -> float:
    """Of the lines of an axis: by the root of its bytes, or by its rank in the order of chattiness."""
    most = max(loads.values(), default=0)
    return 1.2 + 3.4 * (loads[axis] / most) ** 0.5 if most else {"tp": 3.6, "pp": 2.2, "dp": 1.6}[axis]


def drawn(axis: str, rank: int, shape: Mapping[str, int]) -> bool:
    """Whether the line that begins at this rank is drawn: with many slices, that of the first one stands for all."""
    return axis != "dp" or shape["tp"] <= 2 or rank % shape["tp"] == 0


def draw_links(
    sheet: Sheet,
    shape: Mapping[str, int],
    boxes: Mapping[int, Placed],
    groups: Callable[[str], list[list[int]]],
    loads: Mapping[str, int],
) -> None:
    """The lines of all groups, as far as their ranks are drawn."""
    draws = {"tp": _along_slices, "pp": _along_stages, "dp": _along_replicas}
    for axis, draw in draws.items():
        if shape[axis] == 1:
            continue
        colour, dash = LINES[axis]
        width = thickness(axis, loads)
        label = units.size(loads[axis]) if loads[axis] else ""
        sheet.write(f'<g class="{axis}" stroke-linecap="butt">')
        for group in groups(axis):
            for number, (one, other) in enumerate(pairwise(rank for rank in group if rank in boxes)):
                if drawn(axis, one, shape):
                    first = label if number == 0 and group[0] == 0 else ""
                    draw(sheet, boxes[one], boxes[other], (colour, width, dash), first, _lane(one, shape))
        sheet.write("</g>")


def _lane(rank: int, shape: Mapping[str, int]) -> float:
    """How high above the boxes a line between replicas runs: slice beside slice, so that none covers another."""
    return 17 + 9 * (rank % shape["tp"])


Style = tuple[str, float, str]


def _along_slices(sheet: Sheet, one: Placed, other: Placed, style: Style, label: str, raised: float) -> None:
    colour, width, dash = style
    y = one.y + one.height / 2
    sheet.line(one.x + one.width, y, other.x, y, colour, width, dash)
    if label and other.x - one.x - one.width > text_width(label, 10):
        sheet.text((one.x + one.width + other.x) / 2, y - width / 2 - 4, label, 10, colour, "middle")


def _along_stages(sheet: Sheet, one: Placed, other: Placed, style: Style, label: str, raised: float) -> None:
    colour, width, dash = style
    x, start, end = one.x + one.width * 0.36, one.y + one.height, other.y
    size = max(7.0, 2.2 * width)
    sheet.line(x, start + size, x, end - size, colour, width, dash)
    sheet.path(arrow_head(x, end - 1, 0, 1, size) + arrow_head(x, start + 1, 0, -1, size), fill=colour)
    if label:
        sheet.text(x - size, (start + end) / 2 + 4, label, 10, colour, "end")


def _along_replicas(sheet: Sheet, one: Placed, other: Placed, style: Style, label: str, raised: float) -> None:
    colour, width, dash = style
    start, end, y = one.x + one.width * 0.72, other.x + other.width * 0.72, one.y - raised
    dashes = f' stroke-dasharray="{dash}"'
    sheet.path(f"M{start:.1f} {one.y:.1f}V{y:.1f}H{end:.1f}V{other.y:.1f}", colour, width, more=dashes)
    if label:
        sheet.text(start + 4, y - width / 2 - 4, label, 10, colour)
