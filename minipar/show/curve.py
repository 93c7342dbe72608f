"""The memory curve under a timeline: what each rank holds for its backwards, over the same time axis.

Idea    A rank keeps a micro-batch's activations from its forward to its backward (or weight gradient). So the curve
        goes up at the start of every F and down at the end of every B or W, and its peak is what must fit.
Read    `Timeline.activations` in `minipar/facts.py`.
"""

from __future__ import annotations

from minipar.facts import Timeline
from minipar.show import reading, units
from minipar.show.axis import TimeScale
from minipar.show.palette import CURVE, GRID, INK, MUTED, mix
from minipar.show.svg import Sheet

HEADING = 18


def row(ranks: int) -> tuple[float, float]:
    """The height of a curve, and the gap below it."""
    return next(
        (height, gap) for most, height, gap in ((4, 22, 4), (8, 17, 4), (16, 12, 4), (10**9, 7, 2)) if ranks <= most
    )


def curves_height(ranks: int) -> float:
    """How much room the curves take."""
    return HEADING + ranks * sum(row(ranks))


def heading(timeline: Timeline, activation_bytes: float | None) -> str:
    """What the curves count."""
    what = "bytes of activations" if activation_bytes else "micro-batches"
    chunks = reading.chunks(timeline)
    each = f", each on one of the rank's {chunks} stages" if chunks > 1 and not activation_bytes else ""
    return f"Held for backward: {what}{each}"


def amount(value: float, activation_bytes: float | None) -> str:
    """What is held, as a number of micro-batches or as bytes."""
    return units.size(value) if activation_bytes else units.plain(value)


def draw_curves(
    sheet: Sheet, timeline: Timeline, scale: TimeScale, top: float, activation_bytes: float | None = None
) -> float:
    """A curve for each rank, all on one scale, with their peaks; returns where they end."""
    curves = reading.held(timeline, activation_bytes)
    most = max((value for curve in curves for _, value in curve), default=0) or 1
    height, gap = row(timeline.ranks)
    sheet.text(scale.left + 4, top + 9, heading(timeline, activation_bytes), 11, MUTED)
    sheet.text(scale.right + 12, top + 9, "peak", 11, MUTED)
    top += HEADING
    sheet.write('<g class="memory">')
    for rank, curve in enumerate(curves):
        y = top + rank * (height + gap)
        _draw_curve(sheet, curve, scale, y, height, most)
        if height >= 10 or rank % 4 == 0:
            font = min(11.0, height + 1)
            peak = max((value for _, value in curve), default=0)
            sheet.text(scale.left - 10, y + height - 1, f"rank {rank}", font, MUTED, "end")
            sheet.text(scale.right + 12, y + height - 1, amount(peak, activation_bytes), font, INK)
    sheet.write("</g>")
    return top - HEADING + curves_height(timeline.ranks)


def _draw_curve(
    sheet: Sheet, curve: list[tuple[float, float]], scale: TimeScale, y: float, height: float, most: float
) -> None:
    """One rank: an area with steps."""
    floor = y + height
    sheet.line(scale.left, floor, scale.right, floor, GRID)
    if not curve:
        return
    steps = "".join(f"H{scale.x(second):.1f}V{floor - height * value / most:.1f}" for second, value in curve)
    sheet.path(f"M{scale.x(curve[0][0]):.1f} {floor:.1f}{steps}V{floor:.1f}Z", CURVE, 1.2, mix(CURVE, "#ffffff", 0.55))
