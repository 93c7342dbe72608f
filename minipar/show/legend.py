"""What the colours and patterns mean: a row of samples above the data.

Idea    A legend shows only what is in the picture, outside of the data, and in the order in which it is looked for.
Read    `lanes.py`, whose boxes and lines these are samples of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from minipar.facts import Kind, Timeline
from minipar.show import palette, reading
from minipar.show.lanes import PHASES
from minipar.show.palette import HATCH, IDLE, INK, MUTED
from minipar.show.svg import Sheet, hatching, text_width

SWATCH, GAP, LINE = 20, 14, 20
Sample = Callable[[Sheet, float, float], None]  # drawn at (x, y)


def draw_legend(sheet: Sheet, timelines: Sequence[Timeline], x: float, y: float, phases: bool = False) -> float:
    """Samples of what these timelines contain, from (x, y) on; returns where the next thing may begin."""
    at = x
    for sample, words in samples(timelines, phases):
        width = SWATCH + 6 + text_width(words, 11)
        if at + width > sheet.width - x and at > x:
            at, y = x, y + LINE
        sample(sheet, at, y)
        sheet.text(at + SWATCH + 6, y + 10, words, 11, MUTED)
        at += width + GAP
    return y + LINE


def samples(timelines: Sequence[Timeline], phases: bool) -> list[tuple[Sample, str]]:
    """What is to be explained."""
    found: list[tuple[Sample, str]] = [
        (partial(_box, kind), _meaning(kind, timelines))
        for kind in Kind
        if any(span.kind is kind for timeline in timelines for span in timeline.spans)
    ]
    found.append((_idle, "idle"))
    chunks = max(map(reading.chunks, timelines))
    if chunks > 1:
        more = ", two lines: the third, and so on" if chunks > 2 else ""
        found.append((partial(_chunk, chunks), f"underlined: the rank's second stage{more}"))
    return found + [(partial(_phase, dash), word) for word, dash in PHASES.items() if phases]


def _meaning(kind: Kind, timelines: Sequence[Timeline]) -> str:
    """A backward is both gradients, or only that of the input where the weights' is an action of its own."""
    split = [reading.splits_backward(timeline) for timeline in timelines]
    if kind is Kind.BACKWARD and all(split):
        return "backward (gradient of the input)"
    if kind is Kind.WEIGHT and not all(split):
        return "weight gradient (elsewhere part of backward)"
    return palette.WORDS[kind]


def _box(kind: Kind, sheet: Sheet, x: float, y: float) -> None:
    sheet.rect(x, y, SWATCH, 12, palette.FILL[kind])
    if kind is Kind.WEIGHT:
        marks = "".join(f"M{x + 2 + 4 * i:.1f} {edge:.1f}l2 4" for i in range(4) for edge in (y, y + 8))
        sheet.path(marks, "#ffffff", 1.2)


def _idle(sheet: Sheet, x: float, y: float) -> None:
    sheet.rect(x, y, SWATCH, 12, IDLE)
    sheet.path(hatching(x, y, SWATCH, 12), HATCH)


def _chunk(chunks: int, sheet: Sheet, x: float, y: float) -> None:
    sheet.rect(x, y, SWATCH, 12, palette.fill(Kind.FORWARD, 1, chunks))
    sheet.path(f"M{x + 3:.1f} {y + 9:.1f}h{SWATCH - 6}", INK, 1.2)


def _phase(dash: str, sheet: Sheet, x: float, y: float) -> None:
    sheet.line(x, y + 6, x + SWATCH, y + 6, MUTED, 1.8, dash)
