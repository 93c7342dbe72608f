"""What the colours and patterns mean: a row of samples above the data."""

from __future__ import annotations

from collections.abc import Iterable

from minipar.facts import Kind, Timeline
from minipar.show import palette, reading
from minipar.show.lanes import PHASES
from minipar.show.palette import HATCH, IDLE, INK, MUTED
from minipar.show.svg import Sheet, hatching, text_width

SWATCH = 20


def draw_legend(sheet: Sheet, timelines: Iterable[Timeline], x: float, y: float, phases: bool = False) -> None:
    """Samples of what these timelines contain, on one line that begins at (x, y)."""
    shown = list(timelines)
    kinds = [kind for kind in Kind if any(span.kind is kind for timeline in shown for span in timeline.spans)]
    for kind in kinds:
        _draw_box(sheet, kind, x, y)
        x = _say(sheet, _meaning(kind, shown), x + SWATCH + 6, y)
    sheet.rect(x, y, SWATCH, 12, IDLE)
    sheet.path(hatching(x, y, SWATCH, 12), HATCH)
    x = _say(sheet, "idle", x + SWATCH + 6, y)
    chunks = max(map(reading.chunks, shown))
    if chunks > 1:
        sheet.rect(x, y, SWATCH, 12, palette.fill(Kind.FORWARD, 1, chunks))
        sheet.path(f"M{x + 3:.1f} {y + 9:.1f}h{SWATCH - 6}", INK, 1.2)
        more = ", two lines: the third, and so on" if chunks > 2 else ""
        x = _say(sheet, f"underlined: the rank's second stage{more}", x + SWATCH + 6, y)
    if phases:
        for word, dash in PHASES.items():
            sheet.line(x, y + 6, x + SWATCH + 4, y + 6, MUTED, 1.8, dash)
            x = _say(sheet, word, x + SWATCH + 10, y)


def _draw_box(sheet: Sheet, kind: Kind, x: float, y: float) -> None:
    sheet.rect(x, y, SWATCH, 12, palette.FILL[kind])
    if kind is Kind.WEIGHT:
        marks = "".join(f"M{x + 2 + 4 * i:.1f} {edge:.1f}l2 4" for i in range(4) for edge in (y, y + 8))
        sheet.path(marks, "#ffffff", 1.2)


def _meaning(kind: Kind, timelines: list[Timeline]) -> str:
    """A backward is both gradients, or only that of the input where the weights' is an action of its own."""
    split = [reading.splits_backward(timeline) for timeline in timelines]
    if kind is Kind.BACKWARD and all(split):
        return "backward (gradient of the input)"
    if kind is Kind.WEIGHT and not all(split):
        return "weight gradient (elsewhere part of backward)"
    return palette.WORDS[kind]


def _say(sheet: Sheet, text: str, x: float, y: float) -> float:
    sheet.text(x, y + 10, text, 11, MUTED)
    return x + text_width(text, 11) + 14
