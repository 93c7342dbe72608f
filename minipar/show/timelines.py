"""Pictures of timelines: one, several on one time axis, measured over predicted.

Idea    The bubble is the hatched area, and everything else serves it: lanes by rank, boxes by action, one time axis,
        the memory curve below. A picture cannot tell a prediction from a measurement: both are `Timeline`s.
Cost    A few milliseconds for 8 stages and 32 micro-batches: fast enough to follow a slider.
Read    `lanes.py` and `curve.py` before; `animation.py` and `widgets.py` for what moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minipar.facts import Timeline
from minipar.order import Schedule
from minipar.show import reading, units, words
from minipar.show.axis import TimeScale, draw_axis, draw_grid
from minipar.show.curve import curves_height, draw_curves
from minipar.show.drawing import Drawing
from minipar.show.lanes import (
    Lane,
    check_size,
    draw_boxes,
    draw_idle,
    draw_labels,
    draw_phases,
    lane_height,
    place,
)
from minipar.show.legend import draw_legend
from minipar.show.palette import INK, MUTED
from minipar.show.svg import BOLD, BOLDER, Sheet, text_width, wrapped

MARGIN = 16
LEFT = 96  # room for "stages 0, 4"
RIGHT = 76  # room for the shares of idle time
WIDTH = 1000


@dataclass(frozen=True)
class Picture:
    """A timeline on its sheet, and where things lie on it: what an animation needs to move over it."""

    sheet: Sheet
    scale: TimeScale
    lanes: list[Lane]
    bottom: float  # of the data
    title: str
    description: str

    def drawing(self) -> Drawing:
        return Drawing(self.sheet.svg(self.title, self.description), self.title, self.description)


def timeline(
    work: Timeline | Schedule,
    name: str = "",
    *,
    title: str = "",
    memory: bool = True,
    activation_bytes: float | None = None,
    width: float = 0,
) -> Drawing:
    """One step as a picture: lanes, bubble, phases of a 1F1B and, with `memory`, what each rank holds.

    `work` is a timeline, predicted or measured, or a schedule, which is then simulated with F = B = W = one second
    for the layers of a rank. `name` is put in front of the title, which says the bubble; `title` replaces it. With
    `activation_bytes`, what one micro-batch leaves on one stage, memory is in bytes. Without a `width`, in pixels, the
    picture is wider when there is more to see. Raises `ValueError` when there is nothing, or too much, to draw.

        show.timeline(simulate(one_f_one_b(4, 8), send=0.1), "1F1B").save("1f1b.svg")
    """
    shown = reading.timeline_of(work)
    return picture(shown, reading.name_of(work, name), title, memory, activation_bytes, width).drawing()


def picture(
    shown: Timeline,
    name: str = "",
    title: str = "",
    memory: bool = True,
    activation_bytes: float | None = None,
    width: float = 0,
) -> Picture:
    """The picture of a timeline that begins at second 0."""
    check_size(shown)
    title = title or words.headline(shown, name)
    sheet, scale = new_sheet(width or natural_width(shown), shown.duration)
    top = draw_title(sheet, title)
    phases = reading.phases(shown) is not None
    top = draw_legend(sheet, [shown], MARGIN, top, phases) + 24
    lanes = place(shown.ranks, top, lane_height(shown.ranks), 9 if phases else 5)
    bottom = lanes[-1].y + lanes[-1].height
    end = bottom + (26 + curves_height(shown.ranks) if memory else 16)
    draw_grid(sheet, scale, top, end)
    _draw_lanes(sheet, shown, lanes, scale)
    _draw_shares(sheet, [units.share(reading.idle_share(shown, rank)) for rank in range(shown.ranks)], lanes, scale)
    if memory:
        draw_curves(sheet, shown, scale, bottom + 20, activation_bytes)
    sheet.height = draw_axis(sheet, scale, end) + MARGIN / 2
    return Picture(sheet, scale, lanes, end, title, words.describe(shown, activation_bytes))


def compare(
    works: Sequence[Timeline | Schedule],
    titles: Sequence[str] | None = None,
    *,
    title: str = "",
    memory: bool = False,
    width: float = 0,
) -> Drawing:
    """Several steps below each other on one time axis, so that a shorter one is seen to be shorter.

    show.compare([simulate(gpipe(4, 8)), simulate(zb_h1(4, 8))], titles=["GPipe", "ZB-H1"])
    """
    if not works or (titles is not None and len(titles) != len(works)):
        raise ValueError(f"{len(works)} timelines, {len(titles or ())} titles: give at least one, and as many titles")
    shown = [reading.timeline_of(work) for work in works]
    check_size(*shown)
    names = [reading.name_of(work, name) for work, name in zip(works, titles or [""] * len(works), strict=True)]
    names = [name or f"Schedule {number + 1}" for number, name in enumerate(names)]
    title = title or words.comparison(shown, names)
    sheet, scale = new_sheet(width or max(map(natural_width, shown)), max(one.duration for one in shown))
    top = draw_title(sheet, title)
    top = draw_legend(sheet, shown, MARGIN, top) + 10
    for one, name in zip(shown, names, strict=True):
        top = _draw_panel(sheet, one, name, scale, top, memory)
    sheet.height = draw_axis(sheet, scale, top) + MARGIN / 2
    said = " ".join(
        f"{words.headline(one, name)}. {words.describe(one)}" for one, name in zip(shown, names, strict=True)
    )
    return Drawing(sheet.svg(title, said), title, said)


def _draw_panel(sheet: Sheet, shown: Timeline, name: str, scale: TimeScale, top: float, memory: bool) -> float:
    """One of several timelines, under its own heading; returns where it ends."""
    most = units.plain(max(shown.peak_activations(1 / reading.chunks(shown))))
    sheet.text(MARGIN, top + 14, name, 13, INK, more=BOLD)
    said = (
        f"{units.time(shown.duration, scale.unit)}, idle {units.share(shown.bubble)} of busy time, "
        f"at most {most} micro-batches held"
    )
    sheet.text(MARGIN + text_width(name, 13 * BOLDER) + 10, top + 14, said, 12, MUTED)
    phases = reading.phases(shown) is not None
    top += 40 if phases else 24
    lanes = place(shown.ranks, top, min(lane_height(shown.ranks), 24), 9 if phases else 5)
    bottom = lanes[-1].y + lanes[-1].height
    draw_grid(sheet, scale, top, bottom)
    _draw_lanes(sheet, shown, lanes, scale)
    _draw_shares(sheet, [units.share(reading.idle_share(shown, rank)) for rank in range(shown.ranks)], lanes, scale)
    if scale.x(shown.duration) < scale.right - 1:
        sheet.line(scale.x(shown.duration), top - 3, scale.x(shown.duration), bottom + 3, INK, 1.5)
    return draw_curves(sheet, shown, scale, bottom + 18) + 12 if memory else bottom + 22


def natural_width(shown: Timeline) -> float:
    """Wide enough for the numbers of the shortest actions, between 1000 and 1400 pixels."""
    shortest = min((span.seconds for span in shown.spans if span.seconds > 0), default=shown.duration)
    wanted = 10.5 * shown.duration / shortest if shown.duration else 0
    return min(max(WIDTH, wanted + LEFT + RIGHT), 1400)


def draw_title(sheet: Sheet, title: str) -> float:
    """The message, in as many lines as it needs; returns where the next thing may begin."""
    lines = wrapped(title, 17 * BOLDER, sheet.width - 2 * MARGIN)
    for number, line in enumerate(lines):
        sheet.text(MARGIN, 30 + 22 * number, line, 17, INK, more=BOLD)
    return 44 + 22 * (len(lines) - 1)


def new_sheet(width: float, seconds: float, right: float = RIGHT) -> tuple[Sheet, TimeScale]:
    """An empty sheet with a time axis; `right` is the room behind it."""
    return Sheet(round(width)), TimeScale(LEFT, round(width) - right, seconds)


def _draw_lanes(sheet: Sheet, shown: Timeline, lanes: list[Lane], scale: TimeScale) -> None:
    draw_idle(sheet, shown, lanes, scale)
    draw_boxes(sheet, shown, lanes, scale)
    draw_labels(sheet, shown, lanes, LEFT - 10)
    draw_phases(sheet, shown, lanes, scale)


def _draw_shares(sheet: Sheet, shares: list[str], lanes: list[Lane], scale: TimeScale) -> None:
    """Behind each lane its idle time, as a share of its busy time."""
    sheet.text(scale.right + 12, lanes[0].y - 5, "idle / busy", 11, MUTED)
    for rank, (lane, share) in enumerate(zip(lanes, shares, strict=True)):
        if lane.height >= 12 or rank % 4 == 0:
            sheet.text(scale.right + 12, lane.y + lane.height / 2 + 4, share, 12, INK)
